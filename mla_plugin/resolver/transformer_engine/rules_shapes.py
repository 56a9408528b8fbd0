"""Rules 12 to 22: KV cache, head dimensions, packed sequences."""

from __future__ import annotations

from mla_plugin.resolver.transformer_engine.flash import (
    fa2_takes,
    fa3_takes,
    fa4_backward_misaligned,
    fa4_takes,
    fa4_takes_unasked,
)
from mla_plugin.resolver.transformer_engine.query import Query
from mla_plugin.resolver.transformer_engine.rule import EVERYTHING, Rule, always, any_installed_version_on

_SEQUENCE_LETTERS = str.maketrans("", "", "bst")


def _page_size(q: Query) -> int:
    if q.page_size is None:
        raise ValueError("inference_params: page_size=None with is_paged=True; expected a positive integer")
    return q.page_size


def _layout_excludes_mla(q: Query) -> bool:
    """Rule 13 compares the layout's name, so a paged cache counts as packed too."""
    return q.dq != q.dv and q.layout.translate(_SEQUENCE_LETTERS) != "hd_hd_hd"


def _dims(q: Query) -> str:
    return f"head_dim_qk={q.dq}, head_dim_v={q.dv}"


def _fa2_dims(q: Query) -> str:
    return (
        f"{_dims(q)} on {q.device}; the larger must be a multiple of 8, at most 192, or at most 256 on exactly 8.0, "
        "9.0, 10.0 and 12.0"
    )


def _fa3_rejects(q: Query) -> bool:
    return not fa3_takes(q.dq, q.dv, q.num_heads, q.num_kv_heads, q.dtype)


def _fa3_dims(q: Query) -> str:
    return (
        f"{_dims(q)}, {q.num_heads} heads in {q.num_kv_heads} groups; expected whole groups with equal dimensions "
        "up to 256, (129..192, 97..128) or (up to 64, up to 512)"
    )


def _has_fa4_on_blackwell(q: Query) -> bool:
    return q.has("flash4") and q.is_blackwell_datacenter


def _is_padded(q: Query) -> bool:
    return q.fmt == "thd" and q.pad_between_seqs


def _is_padded_beside_a_cache(q: Query) -> bool:
    """One of Q and the KV cache is packed, the other is not."""
    return q.fmt != "thd" and "thd" in (q.q_format, q.kv_format) and q.pad_between_seqs


def _padding_reason(q: Query) -> str:
    return "thd with padding between the sequences"


KV_CACHE: tuple[Rule, ...] = (
    Rule(
        "12a",
        ("fused",),
        lambda q: q.kv_cache and q.cc == (8, 9),
        lambda q: f"KV cache on {q.device}",
        asked_while=always,
    ),
    Rule(
        "12a",
        ("fused",),
        lambda q: q.kv_cache and q.cc == (12, 0),
        lambda q: f"KV cache on {q.device}",
        asked_while=always,
        since="2.14",
    ),
    Rule(
        "12b",
        ("flash",),
        lambda q: q.kv_cache and q.cc == (12, 0),
        lambda q: f"KV cache on {q.device}",
        asked_while=always,
        since="2.14",
    ),
    Rule(
        "12c",
        EVERYTHING,
        lambda q: q.kv_cache and q.context_parallel,
        lambda q: "KV cache with context parallelism",
        subject="all backends",
        asked_while=always,
    ),
    Rule(
        "12d",
        EVERYTHING,
        lambda q: q.kv_cache and q.q_format == "thd" and q.pad_between_seqs,
        lambda q: "KV cache with padding between the sequences of a thd query",
        subject="all backends",
        asked_while=always,
    ),
    Rule(
        "12e",
        ("flash2",),
        lambda q: q.is_paged and _page_size(q) < 256,
        lambda q: f"page_size={q.page_size}, below 256",
    ),
    Rule(
        "12e",
        ("flash2",),
        lambda q: q.is_paged and _page_size(q) % 256 != 0,
        lambda q: f"page_size={q.page_size} is not a multiple of 256",
        since="2.16",
    ),
    Rule(
        "12e",
        ("flash2",),
        lambda q: q.is_paged and not q.fa2_at_least("2.5"),
        lambda q: f"paged KV cache needs flash-attn 2.5, found {q.flash_versions['flash2']}",
    ),
    Rule(
        "12f",
        ("flash2",),
        lambda q: q.kv_cache and not q.is_paged and q.skv % 256 != 0,
        lambda q: f"KV cache with max_seqlen_kv={q.skv}, not a multiple of 256",
        since="2.16",
    ),
    Rule("12g", ("flash4",), lambda q: q.has("flash4") and q.kv_cache, lambda q: "KV cache is not supported"),
)

HEAD_DIMS: tuple[Rule, ...] = (
    Rule(
        "13",
        ("flash2",),
        lambda q: q.has("flash2") and q.dq != q.dv,
        lambda q: f"{_dims(q)} differ",
        until="2.16",
    ),
    Rule(
        "13",
        ("fused",),
        _layout_excludes_mla,
        lambda q: f"{_dims(q)} with layout {q.layout}; expected three separate tensors that are not paged",
    ),
    Rule(
        "14",
        ("fused",),
        lambda q: q.cc == (12, 0) and q.is_training and q.dq != q.dv and (q.dq > 128 or q.dq % 8 != 0),
        lambda q: f"{_dims(q)} in training on {q.device}; head_dim_qk must be a multiple of 8, at most 128",
    ),
    # up to 2.14 rules 15, 16 and 23 also turn off versions that are not installed; then rule 29 gives no reason
    Rule("15", ("flash2",), lambda q: not (q.has("flash2") or fa2_takes(q.dq, q.cc)), _fa2_dims, until="2.14"),
    Rule("15", ("flash2",), lambda q: q.has("flash2") and not fa2_takes(max(q.dq, q.dv), q.cc), _fa2_dims),
    Rule("16", ("flash3",), lambda q: not q.has("flash3") and _fa3_rejects(q), _fa3_dims, until="2.14"),
    Rule("16", ("flash3",), lambda q: q.has("flash3") and _fa3_rejects(q), _fa3_dims),
    Rule(
        "17",
        ("flash4",),
        lambda q: q.has("flash4") and not fa4_takes_unasked(q.dq, q.dv, q.cc),
        lambda q: f"{_dims(q)} on {q.device}; expected up to 256, on 10.x and 11.x up to 128 and (192, 128)",
        until="2.15",
    ),
    Rule(
        "17",
        ("flash4",),
        lambda q: q.has("flash4") and not fa4_takes(q.dq, q.dv, q.cc, q.flash_versions["flash4"]),
        lambda q: f"{_dims(q)} are not accepted by flash-attn-4 {q.flash_versions['flash4']} on {q.device}",
        since="2.16",
    ),
    Rule(
        "18",
        ("flash4",),
        lambda q: _has_fa4_on_blackwell(q) and q.dq == q.dv == 512,
        lambda q: f"{_dims(q)} on {q.device}",
        since="2.19",
    ),
    Rule(
        "19",
        ("flash4",),
        lambda q: _has_fa4_on_blackwell(q) and q.dq == q.dv == 256 and q.sq != q.skv,
        lambda q: f"{_dims(q)} on {q.device} with {q.lengths}, which must be equal",
        since="2.16",
    ),
    Rule(
        "20",
        ("flash4",),
        lambda q: (
            _has_fa4_on_blackwell(q)
            and q.is_training
            and q.dq != q.dv
            and q.dq >= 128
            and fa4_backward_misaligned(q.dq, q.dv)
        ),
        lambda q: f"{_dims(q)} in training on {q.device}; the backward stores dV in steps that do not divide it",
    ),
)

PACKED_SEQUENCES: tuple[Rule, ...] = (
    Rule("21", ("unfused",), lambda q: q.fmt == "thd", lambda q: "thd is not supported", until="2.10"),
    Rule("21", ("flash",), _is_padded, _padding_reason, asked_while=any_installed_version_on, until="2.15"),
    Rule("21", ("flash2",), _is_padded, _padding_reason, since="2.19"),
    Rule(
        "21",
        ("flash2", "flash4"),
        _is_padded,
        _padding_reason,
        subject="FlashAttention 2 and 4",
        since="2.16",
        until="2.18",
    ),
    Rule("21", ("unfused",), _is_padded, _padding_reason, since="2.16"),
    Rule("21", ("flash2", "unfused"), _is_padded_beside_a_cache, _padding_reason, since="2.20"),
    Rule(
        "22",
        ("fused",),
        lambda q: q.fmt == "thd" and q.cc == (12, 0) and q.cudnn < (9, 18, 1),
        lambda q: f"thd on {q.device} needs cuDNN 9.18.1, found {q.cudnn_text}",
    ),
    Rule(
        "22",
        ("fused",),
        lambda q: q.layout in ("t3hd", "th3d") and q.cc == (12, 0),
        lambda q: f"layout {q.layout} on {q.device}",
    ),
    Rule(
        "22",
        ("fused",),
        lambda q: q.fmt == "thd" and q.cc == (12, 0),
        lambda q: f"thd on {q.device}",
        until="2.13",
    ),
)

RULES: tuple[Rule, ...] = KV_CACHE + HEAD_DIMS + PACKED_SEQUENCES
