"""Rules 23 to 41: dropout, softmax, context parallelism, masks, windows, bias, cuDNN's own answer, determinism."""

from __future__ import annotations

from mla_plugin.resolver.transformer_engine.cudnn import fused_kernels, why_not_fused
from mla_plugin.resolver.transformer_engine.query import FLASH_VERSIONS, Query
from mla_plugin.resolver.transformer_engine.rule import (
    Rule,
    always,
    any_installed_version_on,
    any_version_on,
    installed_fa2_on,
    while_on,
)


def _dropout(q: Query) -> str:
    return f"dropout {q.dropout}, expected 0"


def _cp_obstacle(q: Query) -> str | None:
    """The first property that neither FlashAttention (26) nor, in every release, cuDNN (27) supports with it."""
    if "bottom_right" in q.mask:
        return f"mask {q.mask}"
    if "causal" in q.mask and q.sq != q.skv:
        return f"mask {q.mask} and {q.lengths}"
    if q.bias_type not in ("no_bias", "post_scale_bias"):
        return f"bias {q.bias_type}"
    if q.fmt == "thd" and q.bias_type != "no_bias":
        return f"thd and bias {q.bias_type}"
    return None


_SCORES_BELOW = 2**30


def _scores(q: Query) -> int:
    """The size of the score matrix, which determines cuDNN's workspace."""
    return q.batch_size * q.num_heads * q.sq * q.skv


def _is_deterministic_backward(q: Query) -> bool:
    return q.deterministic and q.is_training and fused_kernels(q) == "any length"


def _has_bias_gradient(q: Query) -> bool:
    return q.bias_type == "post_scale_bias" and q.bias_requires_grad


def _is_another_shape_too(q: Query) -> bool:
    """With one sequence, one head or one query (1, 1, 1, s) is also one of the larger shapes."""
    return 1 in (q.batch_size, q.num_heads, q.sq)


def _bias_gradient(q: Query) -> str:
    return f"no gradient of a post_scale_bias of shape {q.bias_shape}"


def _window_alignment(q: Query) -> str:
    return f"sliding window {q.window} is aligned top-left, with {q.lengths}; it aligns windows bottom-right"


SOFTMAX: tuple[Rule, ...] = (
    Rule(
        "23",
        ("flash3",),
        lambda q: not q.has("flash3") and q.dropout != 0.0,
        _dropout,
        asked_while=while_on("flash3"),
        until="2.14",
    ),
    Rule("23", ("flash3",), lambda q: q.has("flash3") and q.dropout != 0.0, _dropout),
    Rule("23", ("flash4",), lambda q: q.has("flash4") and q.dropout != 0.0, _dropout),
    Rule(
        "24",
        ("flash",),
        lambda q: q.softmax_type != "vanilla",
        lambda q: f"softmax {q.softmax_type}, expected vanilla",
        asked_while=always,
    ),
    Rule(
        "24",
        ("fused",),
        lambda q: q.softmax_type != "vanilla" and q.fmt == "thd" and q.cudnn < (9, 18, 0),
        lambda q: f"softmax {q.softmax_type} with thd needs cuDNN 9.18.0, found {q.cudnn_text}",
        asked_while=always,
    ),
    Rule(
        "24",
        ("fused",),
        lambda q: q.softmax_type != "vanilla" and q.fmt == "thd" and q.cudnn >= (9, 18, 0),
        lambda q: f"softmax {q.softmax_type} with thd",
        asked_while=always,
        until="2.11",
    ),
    Rule(
        "24",
        ("unfused",),
        lambda q: q.softmax_type != "vanilla" and q.fmt == "thd",
        lambda q: f"softmax {q.softmax_type} with thd",
        asked_while=always,
        until="2.11",
    ),
    Rule(
        "24",
        ("unfused",),
        lambda q: q.softmax_type != "vanilla" and q.context_parallel,
        lambda q: f"softmax {q.softmax_type} with context parallelism",
        asked_while=always,
        until="2.11",
    ),
    Rule(
        "24",
        ("fused",),
        lambda q: q.softmax_type != "vanilla" and q.context_parallel and q.cp_comm_type != "a2a",
        lambda q: f"softmax {q.softmax_type} with context parallelism needs cp_comm_type=a2a, found {q.cp_comm_type}",
        asked_while=always,
    ),
)

CONTEXT_PARALLEL: tuple[Rule, ...] = (
    Rule("25", ("unfused",), lambda q: q.context_parallel, lambda q: "context parallelism is not supported"),
    Rule(
        "25",
        ("flash4",),
        lambda q: q.has("flash4") and q.context_parallel,
        lambda q: "context parallelism is not supported",
        until="2.18",
    ),
    Rule(
        "25",
        ("flash4",),
        lambda q: q.context_parallel and q.cp_comm_type not in ("p2p", "all_gather", "a2a"),
        lambda q: f"context parallelism with cp_comm_type={q.cp_comm_type}, expected p2p, all_gather and a2a",
        asked_while=while_on("flash4"),
        since="2.19",
    ),
    # gives no reason if no version is installed
    Rule(
        "26",
        ("flash",),
        lambda q: q.context_parallel and len(q.absent) < len(FLASH_VERSIONS) and _cp_obstacle(q) is not None,
        lambda q: f"context parallelism with {_cp_obstacle(q)}",
        asked_while=any_version_on,
    ),
    Rule(
        "27",
        ("fused",),
        lambda q: q.context_parallel and _cp_obstacle(q) is not None,
        lambda q: f"context parallelism with {_cp_obstacle(q)}",
    ),
    Rule(
        "27",
        ("fused",),
        lambda q: q.context_parallel and q.bias_type != "no_bias" and q.cp_comm_type != "p2p",
        lambda q: f"context parallelism with cp_comm_type={q.cp_comm_type} and bias {q.bias_type}, which needs p2p",
        since="2.15",
    ),
    Rule(
        "27",
        ("fused",),
        lambda q: q.context_parallel and q.fmt == "thd" and q.cp_comm_type == "all_gather",
        lambda q: "context parallelism with cp_comm_type=all_gather and thd",
        since="2.15",
        until="2.17",
    ),
    Rule(
        "27",
        ("fused",),
        lambda q: q.context_parallel and q.fmt == "thd" and q.cp_comm_type == "a2a+p2p",
        lambda q: "context parallelism with cp_comm_type=a2a+p2p and thd",
        since="2.15",
        until="2.18",
    ),
    Rule(
        "27",
        ("fused",),
        lambda q: q.context_parallel and q.swa and q.cp_comm_type in ("p2p", "a2a+p2p"),
        lambda q: f"context parallelism with cp_comm_type={q.cp_comm_type} and sliding window {q.window}",
        since="2.15",
    ),
    # the number of ranks does not matter
    Rule(
        "27",
        ("fused",),
        lambda q: (
            q.context_parallel
            and q.cp_comm_type in ("a2a", "a2a+p2p")
            and (q.num_heads % 2 != 0 or q.num_kv_heads % 2 != 0)
        ),
        lambda q: (
            f"context parallelism with cp_comm_type={q.cp_comm_type}, {q.num_heads} heads and {q.num_kv_heads} groups, "
            "which must be even"
        ),
        since="2.15",
    ),
)

MASK_AND_WINDOW: tuple[Rule, ...] = (
    Rule(
        "28",
        ("flash",),
        lambda q: q.mask == "arbitrary",
        lambda q: "mask arbitrary",
        asked_while=any_installed_version_on,
    ),
    Rule("28", ("fused",), lambda q: q.mask == "arbitrary", lambda q: "mask arbitrary"),
    Rule(
        "29",
        ("flash",),
        lambda q: q.mask in ("causal", "padding_causal") and q.sq != q.skv,
        lambda q: f"mask {q.mask} is aligned top-left, with {q.lengths}; it aligns causal masks bottom-right",
        asked_while=any_version_on,
    ),
    Rule(
        "31",
        ("flash4",),
        lambda q: q.is_blackwell_datacenter and q.dq == q.dv == 256 and q.swa,
        lambda q: f"sliding window {q.window} with head dimension 256 on {q.device}",
        asked_while=while_on("flash4"),
        since="2.18",
    ),
    Rule(
        "32",
        ("fused",),
        lambda q: q.swa and q.full_window[1] != 0,
        lambda q: f"sliding window {q.window}, expected (left, 0)",
        until="2.11",
    ),
    Rule(
        "32",
        ("fused",),
        lambda q: q.swa and q.dropout != 0.0,
        lambda q: f"sliding window {q.window} with dropout {q.dropout}",
    ),
    Rule(
        "32",
        ("fused",),
        lambda q: q.swa and q.sq > q.skv,
        lambda q: f"sliding window {q.window} with {q.lengths}; queries must not outnumber keys",
    ),
    Rule(
        "33",
        ("flash2",),
        lambda q: q.swa and not q.fa2_at_least("2.3"),
        lambda q: f"sliding window needs flash-attn 2.3, found {q.flash_versions['flash2']}",
        subject="FlashAttention",
    ),
    # up to 2.19 evaluated only while FlashAttention 2 could run, although it removes every version: defect 3 in
    # docs/te_selection.md
    Rule(
        "33",
        ("flash",),
        lambda q: q.swa and q.is_top_left_cross,
        _window_alignment,
        asked_while=installed_fa2_on,
        since="2.12",
        until="2.19",
    ),
    Rule(
        "33",
        ("flash",),
        # rule 28 has turned it off, silently where no version is left
        lambda q: q.swa and q.is_top_left_cross and q.mask != "arbitrary",
        _window_alignment,
        asked_while=while_on("flash"),
        since="2.20",
    ),
)

BIAS: tuple[Rule, ...] = (
    Rule("34", ("flash3",), lambda q: q.bias_type == "alibi", lambda q: "ALiBi is not supported"),
    Rule(
        "34",
        ("flash2",),
        lambda q: q.bias_type == "alibi" and not q.fa2_at_least("2.4"),
        lambda q: f"ALiBi needs flash-attn 2.4, found {q.flash_versions['flash2']}",
        subject="FlashAttention",
    ),
    Rule(
        "34",
        ("flash",),
        lambda q: q.bias_type == "alibi" and q.is_top_left_cross,
        lambda q: f"ALiBi is aligned top-left, with {q.lengths}; it aligns ALiBi bottom-right",
        asked_while=installed_fa2_on,
        since="2.12",
    ),
    Rule("34", ("flash4",), lambda q: q.bias_type == "alibi", lambda q: "ALiBi is not supported"),
    Rule(
        "35",
        ("flash",),
        lambda q: q.bias_type not in ("no_bias", "alibi") or q.bias_shape is not None,
        lambda q: f"bias {q.bias_type} of shape {q.bias_shape}; expected no_bias and alibi, without a shape",
        asked_while=any_installed_version_on,
    ),
    Rule(
        "37",
        ("fused",),
        lambda q: _has_bias_gradient(q) and q.bias_shape == "111s" and not _is_another_shape_too(q),
        _bias_gradient,
    ),
    # From 2.20 on the shape is in numbers, and one that could have another name has it.
    Rule(
        "37",
        ("fused",),
        lambda q: _has_bias_gradient(q) and q.bias_shape == "111s" and _is_another_shape_too(q),
        _bias_gradient,
        until="2.19",
    ),
    Rule(
        "37",
        ("fused",),
        lambda q: _has_bias_gradient(q) and q.bias_shape not in ("1hss", "111s"),
        _bias_gradient,
        until="2.12",
    ),
)

CUDNN: tuple[Rule, ...] = (
    Rule("38", ("fused",), lambda q: why_not_fused(q) is not None, lambda q: f"{why_not_fused(q)}"),
)

DETERMINISM: tuple[Rule, ...] = (
    Rule(
        "39",
        ("flash2",),
        lambda q: q.deterministic and not q.fa2_at_least("2.4.1"),
        lambda q: f"determinism needs flash-attn 2.4.1, found {q.flash_versions['flash2']}",
        subject="FlashAttention",
    ),
    Rule(
        "40",
        ("flash3",),
        lambda q: q.has("flash3") and q.deterministic and q.dq >= 256,
        lambda q: f"head_dim_qk={q.dq}; determinism needs it below 256",
        since="2.15",
        until="2.15",
    ),
    Rule(
        "40",
        ("flash3",),
        lambda q: q.has("flash3") and q.deterministic and q.is_training and max(q.dq, q.dv) >= 256,
        lambda q: f"head_dim_qk={q.dq}, head_dim_v={q.dv}; a deterministic backward needs both below 256",
        since="2.16",
    ),
    Rule(
        "41",
        ("fused",),
        lambda q: q.deterministic and q.softmax_type != "vanilla",
        lambda q: f"softmax {q.softmax_type} is not deterministic",
        since="2.12",
    ),
    Rule(
        "41",
        ("fused",),
        lambda q: _is_deterministic_backward(q) and (q.cc < (9, 0) or q.bias_requires_grad),
        lambda q: (
            f"a deterministic backward needs compute capability 9.0 (found {q.cc[0]}.{q.cc[1]}) and no gradient of the "
            f"bias ({'asked for' if q.bias_requires_grad else 'not asked for'})"
        ),
    ),
    Rule(
        "41",
        ("fused",),
        lambda q: _is_deterministic_backward(q) and q.cudnn < (8, 9, 5),
        lambda q: f"a deterministic backward needs cuDNN 8.9.5, found {q.cudnn_text}",
        until="2.19",
    ),
    Rule(
        "41",
        ("fused",),
        lambda q: q.deterministic and q.is_training and q.cc >= (10, 0),
        lambda q: f"a deterministic backward on {q.device}, from 10.0 on",
        until="2.11",
    ),
    Rule(
        "41",
        ("fused",),
        lambda q: _is_deterministic_backward(q) and q.fmt == "thd" and q.cc == (9, 0) and _scores(q) >= _SCORES_BELOW,
        lambda q: f"a deterministic thd backward on {q.device} with {_scores(q)} scores, {_SCORES_BELOW} or more",
        since="2.19",
    ),
)

RULES: tuple[Rule, ...] = SOFTMAX + CONTEXT_PARALLEL + MASK_AND_WINDOW + BIAS + CUDNN + DETERMINISM
