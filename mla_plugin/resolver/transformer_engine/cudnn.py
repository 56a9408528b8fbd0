"""Rules 38 and 42: does cuDNN have a fused kernel for the query?

TransformerEngine asks its C++ library. Where that cannot be asked, ``REQUIREMENTS`` gives the same answer for 16-bit
types, except that it leaves out the 64-bit offsets that very long packed sequences need before cuDNN 9.5.

Source: ``nvte_get_fused_attn_backend`` of TransformerEngine 2.20, ``common/fused_attn/fused_attn.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mla_plugin.arguments.attention import BIAS_TYPES
from mla_plugin.arguments.mask import ATTN_MASK_TYPES
from mla_plugin.hooks.attention import SOFTMAX_TYPES
from mla_plugin.resolver.transformer_engine.query import HALF_TYPES, Query

MASKS = tuple(mask for mask in ATTN_MASK_TYPES if mask != "arbitrary")
DENSE = ("bshd", "sbhd")
_SEPARATE = ("bshd_bshd_bshd", "sbhd_sbhd_sbhd", "thd_thd_thd", "bhsd_bhsd_bhsd")
_CACHED = ("sbhd_bshd_bshd", "bshd_sbhd_sbhd", "thd_sbhd_sbhd", "thd_bshd_bshd")
_PACKED = tuple(
    layout.format(f=f) for f in ("sb", "bs", "t") for layout in ("{f}3hd", "{f}h3d", "{f}hd_{f}2hd", "{f}hd_{f}h2d")
)
_PAGED = tuple(f"paged_kv_{q}_{kv}_{kv}" for q in ("bshd", "sbhd", "thd") for kv in ("bshd", "sbhd"))
LAYOUTS = _SEPARATE + _CACHED + _PACKED + _PAGED


def why_not_fused(q: Query) -> str | None:
    """Rule 38: why cuDNN does not run the query; None when it does.

    Raises:
        ValueError: a mask, bias type, softmax type or layout that cuDNN's query has no name for.
    """
    for field, value, accepted in (
        ("qkv_layout", q.layout, LAYOUTS),
        ("core_attention_bias_type", q.fused_bias_type, BIAS_TYPES),
        ("attn_mask_type", q.mask, MASKS),
        ("softmax_type", q.softmax_type, SOFTMAX_TYPES),
    ):
        if value not in accepted:
            raise ValueError(f"{field}={value!r}: accepted are {', '.join(accepted)}")
    if q.fused_supported is not None:
        return None if q.fused_supported else "cuDNN has no kernel for this, says the platform"
    unmet = [requirement.found(q) for requirement in REQUIREMENTS if not requirement.holds(q)]
    return f"cuDNN {q.cudnn_text} on {q.device} does not take {'; '.join(unmet)}" if unmet else None


def _architecture(q: Query) -> bool:
    if q.cc >= (10, 0):
        return q.cudnn >= (9, 7, 0)
    return q.cc >= (8, 0) if q.cudnn >= (8, 9, 3) else q.cc in ((8, 0), (9, 0))


def _sequence_lengths(q: Query) -> bool:
    return q.cudnn >= (9, 0, 0) or _multiples_of_64(q)


def _multiples_of_64(q: Query) -> bool:
    return q.sq % 64 == 0 and q.skv % 64 == 0


def _heads(q: Query) -> bool:
    return q.cudnn >= (8, 9, 7) or q.num_heads == q.num_kv_heads


def _head_dims(q: Query) -> bool:
    """Rule 42, (a) to (f)."""
    if q.dq % 8 or q.dv % 8:
        return False
    small = q.dq <= 128 and q.dv <= 128
    return small or (_training_head_dims(q) if q.is_training else _inference_head_dims(q))


def _inference_head_dims(q: Query) -> bool:
    hopper = q.cc == (9, 0) and q.cudnn >= (9, 1, 0) and max(q.dq, q.dv) <= 256
    blackwell = q.cc >= (10, 0) and q.cudnn >= (9, 9, 0) and q.sq > 1 and not q.is_paged_layout
    top_left = q.mask in ("causal", "padding_causal")
    any_device = q.cudnn >= (9, 10, 2) and (q.is_paged_layout or q.sq > 1 or not top_left)
    return hopper or blackwell or any_device


def _training_head_dims(q: Query) -> bool:
    if q.cc == (9, 0):
        mla_bug = q.cudnn >= (9, 11, 0) and q.dq != q.dv and min(q.dq, q.dv) >= 128 and (q.dq, q.dv) != (192, 128)
        return q.cudnn >= (9, 5, 0) and max(q.dq, q.dv) <= 256 and not mla_bug
    if (q.dq, q.dv) == (192, 128):
        return q.cc >= (10, 0) and q.cudnn >= (9, 11, 0)
    return (q.dq, q.dv) == (256, 256) and _training_at_256(q)


def _training_at_256(q: Query) -> bool:
    """Rule 42 (f): this backward is the deterministic one, which has neither bias, dropout nor sink."""
    thd = "thd" in q.layout_formats
    causal = "causal" in q.mask and q.full_window[1] in (-1, 0)
    return (
        (10, 0) <= q.cc < (11, 0)
        and q.cudnn >= ((9, 25, 0) if thd else (9, 23, 0))
        and not q.is_paged_layout
        and _plain(q)
        and q.softmax_type == "vanilla"
        and (q.full_window == (-1, -1) or causal)
    )


def _plain(q: Query) -> bool:
    return q.fused_bias_type == "no_bias" and q.dropout == 0.0


def _bias(q: Query) -> bool:
    if q.fused_bias_type == "no_bias":
        return True
    if q.fused_bias_type == "post_scale_bias":
        supported = q.cudnn >= (9, 0, 0) if q.cc < (9, 0) else q.cudnn >= (8, 9, 6)
        return supported and q.mask not in ("padding", "padding_causal")
    alibi = q.fused_bias_type == "alibi" and q.mask in ("causal", "causal_bottom_right")
    return alibi and q.cudnn >= (8, 9, 6) and q.cc >= (9, 0)


def _mask(q: Query) -> bool:
    dense = q.layout_format in DENSE
    if q.mask == "no_mask":
        return q.cudnn >= (9, 7, 0) or (q.cudnn >= (8, 9, 6) and dense)
    if q.mask == "causal":
        return q.cudnn < (8, 9, 6) or q.cudnn >= (9, 7, 0) or dense
    if q.mask in ("padding", "padding_causal"):
        uniform = (q.cudnn >= (8, 9, 6) and dense) or q.layout_format == "thd"
        return uniform or (q.cudnn >= (9, 7, 0) and _plain(q))
    return _bottom_right_mask(q, dense)


def _bottom_right_mask(q: Query, dense: bool) -> bool:
    within_keys = q.sq <= q.skv
    padded = q.mask == "padding_causal_bottom_right"
    if q.cudnn >= (9, 7, 0):
        return within_keys or (padded and _plain(q))
    known = q.cudnn >= (9, 6, 0) if padded else q.cudnn >= (9, 3, 0) and dense
    return known and within_keys and _multiples_of_64(q) and _plain(q)


def _format(q: Query) -> bool:
    if q.layout_format in (*DENSE, "bhsd"):
        return True
    if q.layout_format == "thd":
        equal_heads = q.num_heads == q.num_kv_heads
        return q.cc >= (9, 0) and q.cudnn >= ((9, 1, 0) if equal_heads else (9, 6, 0))
    # Q and the cache in two formats: at least one of them is dense.
    return q.cudnn >= (9, 7, 0)


def _window(q: Query) -> bool:
    left, right = q.full_window
    if left == -1 and right in (-1, 0) and (q.cudnn < (9, 2, 0) or q.cudnn >= (9, 6, 0)):
        return True
    return _window_since_9_2(q) or _window_since_9_6(q)


def _window_since_9_2(q: Query) -> bool:
    left, right = q.full_window
    if q.cudnn < (9, 2, 0):
        return False
    if (left, right) == (-1, -1) and q.mask == "no_mask":
        return True
    aligned = q.mask in ("no_mask", "causal") or (q.mask == "causal_bottom_right" and q.sq == q.skv)
    return right == 0 and aligned and q.sq <= q.skv and _plain(q) and q.layout_format in DENSE


def _window_since_9_6(q: Query) -> bool:
    if q.cudnn < (9, 6, 0) or q.mask == "causal":
        return False
    bottom_right_bug = "bottom_right" in q.mask and q.cc >= (10, 0) and q.cudnn <= (9, 7, 0) and q.sq != q.skv
    return not bottom_right_bug and q.sq <= q.skv and _plain(q)


def _release(q: Query) -> bool:
    """Releases with known faults."""
    if q.cudnn < (8, 9, 0) or q.cudnn in ((9, 10, 0), (9, 10, 1)):
        return False
    long_window = q.skv > 1024 and q.full_window[0] != -1 and q.mask not in ("causal", "causal_bottom_right")
    if q.cudnn == (9, 14, 0) and long_window:
        return False
    captured_backward = q.is_training and q.cuda_graph and q.layout_format in DENSE
    unaligned = q.skv % 128 != 0 and "padding" not in q.mask
    return not (q.cudnn <= (9, 15, 0) and captured_backward and unaligned)


def _softmax(q: Query) -> bool:
    return q.softmax_type == "vanilla" or q.cudnn >= (9, 13, 1)


def _max_logit(q: Query) -> bool:
    return not q.return_max_logit or q.cudnn >= (9, 21, 0)


def _determinism(q: Query) -> bool:
    if q.cc < (10, 0) or not q.is_training:
        return True
    if q.deterministic:
        return q.cudnn >= (9, 18, 1) and _plain(q)
    return q.dropout == 0.0 or q.fused_bias_type == "no_bias"


def _sm120(q: Query) -> bool:
    if q.cc != (12, 0):
        return True
    return q.cudnn >= (9, 18, 1) and not (q.deterministic and q.is_training) and q.layout not in ("t3hd", "th3d")


@dataclass(frozen=True)
class Requirement:
    """One condition of cuDNN; ``found`` says what does not meet it."""

    holds: Callable[[Query], bool]
    found: Callable[[Query], str]


REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(lambda q: q.dtype in HALF_TYPES, lambda q: f"dtype {q.dtype}"),
    Requirement(_architecture, lambda q: "this architecture"),
    Requirement(_sequence_lengths, lambda q: f"max_seqlen_q={q.sq}, max_seqlen_kv={q.skv}"),
    Requirement(_heads, lambda q: f"{q.num_heads} heads in {q.num_kv_heads} groups"),
    Requirement(
        _head_dims, lambda q: f"head_dim_qk={q.dq}, head_dim_v={q.dv} in {'training' if q.is_training else 'inference'}"
    ),
    Requirement(_bias, lambda q: f"bias {q.fused_bias_type} with mask {q.mask}"),
    Requirement(_mask, lambda q: f"mask {q.mask} with layout {q.layout}"),
    Requirement(_format, lambda q: f"layout {q.layout}"),
    Requirement(_window, lambda q: f"window {q.full_window} with mask {q.mask}"),
    Requirement(_release, lambda q: "what is faulty in this release"),
    Requirement(_softmax, lambda q: f"softmax {q.softmax_type}"),
    Requirement(_max_logit, lambda q: "return_max_logit"),
    Requirement(_determinism, lambda q: f"deterministic={q.deterministic} in training"),
    Requirement(_sm120, lambda q: "12.0 before cuDNN 9.18.1, or with determinism in training, t3hd or th3d there"),
)
