"""Rules 38 and 42: does cuDNN have a fused kernel for the query?

TransformerEngine calls its C++ library. Without that library, ``REQUIREMENTS`` gives the same answer for 16-bit types,
except that it ignores the 64-bit offsets that very long packed sequences need before cuDNN 9.5. From 2.20 on the
library builds cuDNN's graph and asks cuDNN itself; the conditions of 2.19 are used for these releases.

Source: ``nvte_get_fused_attn_backend`` of TransformerEngine 2.10 to 2.19, ``common/fused_attn/fused_attn.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mla_plugin.arguments.attention import BIAS_TYPES
from mla_plugin.arguments.mask import ATTN_MASK_TYPES
from mla_plugin.hooks.attention import SOFTMAX_TYPES
from mla_plugin.resolver.transformer_engine.query import HALF_TYPES, Query
from mla_plugin.resolver.transformer_engine.release import Span

MASKS = tuple(mask for mask in ATTN_MASK_TYPES if mask != "arbitrary")
DENSE = ("bshd", "sbhd")
_SEPARATE = ("bshd_bshd_bshd", "sbhd_sbhd_sbhd", "thd_thd_thd", "bhsd_bhsd_bhsd")
_CACHED = ("sbhd_bshd_bshd", "bshd_sbhd_sbhd", "thd_sbhd_sbhd", "thd_bshd_bshd")
_PACKED = tuple(
    layout.format(f=f) for f in ("sb", "bs", "t") for layout in ("{f}3hd", "{f}h3d", "{f}hd_{f}2hd", "{f}hd_{f}h2d")
)
_PAGED = tuple(f"paged_kv_{q}_{kv}_{kv}" for q in ("bshd", "sbhd", "thd") for kv in ("bshd", "sbhd"))
LAYOUTS = _SEPARATE + _CACHED + _PACKED + _PAGED


@dataclass(frozen=True)
class LaterLayout(Span):
    """A layout that older releases do not have."""

    layout: str


LATER_LAYOUTS: tuple[LaterLayout, ...] = (LaterLayout("bhsd_bhsd_bhsd", since="2.15"),)
UP_TO_512 = Span(until="2.15")
"""The releases that have kernels for short sequences besides the general ones."""


def why_not_fused(q: Query) -> str | None:
    """Rule 38: why cuDNN does not run the query; None when it does.

    Raises:
        ValueError: a mask, bias type, softmax type or layout that cuDNN's query does not know.
    """
    unknown = {later.layout for later in LATER_LAYOUTS if not later.holds_in(q.release)}
    layouts = [layout for layout in LAYOUTS if layout not in unknown]
    for field, value, accepted in (
        ("qkv_layout", q.layout, layouts),
        ("core_attention_bias_type", q.fused_bias_type, BIAS_TYPES),
        ("attn_mask_type", q.mask, MASKS),
        ("softmax_type", q.softmax_type, SOFTMAX_TYPES),
    ):
        if value not in accepted:
            raise ValueError(f"{field}={value!r}: expected {', '.join(accepted)}")
    if fused_kernels(q) is not None:
        return None
    if q.fused_supported is not None:
        return "cuDNN has no kernel for this, says the platform"
    return f"cuDNN {q.cudnn_text} on {q.device} does not take {'; '.join(_unmet(q))}"


def fused_kernels(q: Query) -> str | None:
    """Which of TransformerEngine's two sets of cuDNN kernels runs the query; None if neither does.

    ``"any length"``, also if ``fused_supported`` is True; up to 2.15 ``"up to 512"`` where the first set cannot, or
    where both can and NVTE_FUSED_ATTN_BACKEND is 0.
    """
    if q.fused_supported is not None:
        return "any length" if q.fused_supported else None
    is_any, is_short = not _unmet(q), UP_TO_512.holds_in(q.release) and _up_to_512(q)
    if is_short and (q.short_first or not is_any):
        return "up to 512"
    return "any length" if is_any else None


def _unmet(q: Query) -> list[str]:
    held = [requirement for requirement in REQUIREMENTS if requirement.holds_in(q.release)]
    return [requirement.found(q) for requirement in held if not requirement.holds(q)]


def _up_to_512(q: Query) -> bool:
    """The kernels for short sequences with head dimension 64. ALiBi with explicit slopes is not considered."""
    biases = {"no_bias": True, "post_scale_bias": q.bias_shape == "1hss", "alibi": not q.has_alibi_slopes}
    return (
        q.dtype in HALF_TYPES
        and q.cudnn >= (8, 9, 1)
        and q.cc in ((8, 0), (9, 0))
        and max(q.sq, q.skv) <= 512
        and _multiples_of_64(q)
        and q.dq == q.dv == 64
        and q.num_heads == q.num_kv_heads
        and q.fused_bias_type in ("no_bias", "post_scale_bias")
        and biases[q.bias_type]
        and "bottom_right" not in q.mask
        and (q.mask != "padding_causal" or q.sq == q.skv)
        and q.layout in ("sb3hd", "sbhd_sb2hd", "bs3hd", "bshd_bs2hd", "bshd_bshd_bshd")
        and q.full_window in ((-1, -1), (-1, 0))
        and q.softmax_type == "vanilla"
        and not q.return_max_logit
        and not _is_faulty(q)
    )


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


@dataclass(frozen=True)
class HeadDims(Span):
    """Head dimensions (multiples of 8) that cuDNN has a kernel for: rule 42, (a) to (f)."""

    letter: str
    takes: Callable[[Query], bool]


def _at_most(q: Query, limit: int) -> bool:
    return max(q.dq, q.dv) <= limit


def _inference_anywhere(q: Query) -> bool:
    top_left = q.mask in ("causal", "padding_causal")
    return q.cudnn >= (9, 10, 2) and (q.is_paged_layout or q.sq > 1 or not top_left)


def _training_at_256(q: Query) -> bool:
    """This backward is the deterministic one, which supports neither bias, dropout nor sink."""
    thd = "thd" in q.layout_formats
    causal = "causal" in q.mask and q.full_window[1] in (-1, 0)
    return (
        (q.dq, q.dv) == (256, 256)
        and (10, 0) <= q.cc < (11, 0)
        and q.cudnn >= ((9, 25, 0) if thd else (9, 23, 0))
        and not q.is_paged_layout
        and _plain(q)
        and q.softmax_type == "vanilla"
        and (q.full_window == (-1, -1) or causal)
    )


HEAD_DIMS: tuple[HeadDims, ...] = (
    HeadDims("a", lambda q: _at_most(q, 128)),
    HeadDims(
        "b", lambda q: _at_most(q, 256) and q.cc == (9, 0) and q.cudnn >= ((9, 5, 0) if q.is_training else (9, 1, 0))
    ),
    HeadDims(
        "c",
        lambda q: not q.is_training and q.cc >= (10, 0) and q.cudnn >= (9, 9, 0) and q.sq > 1 and not q.is_paged_layout,
    ),
    HeadDims("d", lambda q: not q.is_training and _inference_anywhere(q)),
    HeadDims(
        "e",
        lambda q: q.is_training and (q.dq, q.dv) == (192, 128) and q.cc >= (10, 0) and q.cudnn >= (9, 11, 0),
    ),
    HeadDims("f", lambda q: q.is_training and _training_at_256(q), since="2.18"),
)


def _head_dims(q: Query) -> bool:
    if q.dq % 8 or q.dv % 8 or _has_mla_bug(q):
        return False
    return any(dims.takes(q) for dims in HEAD_DIMS if dims.holds_in(q.release))


def _has_mla_bug(q: Query) -> bool:
    on_hopper = q.is_training and q.cc == (9, 0) and q.cudnn >= (9, 11, 0)
    return on_hopper and q.dq != q.dv and min(q.dq, q.dv) >= 128 and (q.dq, q.dv) != (192, 128)


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
    # Q and the cache have different formats: at least one of them is dense
    return q.cudnn >= (9, 7, 0)


def _is_full(q: Query) -> bool:
    left, right = q.full_window
    return left == -1 and right in (-1, 0) and (q.cudnn < (9, 2, 0) or q.cudnn >= (9, 6, 0))


def _is_local_and_plain(q: Query) -> bool:
    return q.sq <= q.skv and _plain(q)


def _causal_square(q: Query) -> bool:
    return q.mask == "causal" or (q.mask == "causal_bottom_right" and q.sq == q.skv)


def _bottom_right_bug(q: Query) -> bool:
    return "bottom_right" in q.mask and q.cc >= (10, 0) and q.cudnn <= (9, 7, 0) and q.sq != q.skv


def _left_window(q: Query) -> bool:
    """Up to 2.11: windows (left, 0) under causal masks."""
    if q.full_window in ((-1, -1), (-1, 0)):
        return True
    if q.cudnn < (9, 2, 0) or q.full_window[1] != 0 or not _is_local_and_plain(q):
        return False
    causal = q.mask in ("causal_bottom_right", "padding_causal", "padding_causal_bottom_right")
    since_9_6 = q.cudnn >= (9, 6, 0) and causal and not _bottom_right_bug(q)
    return since_9_6 or (_causal_square(q) and q.layout_format in DENSE)


def _window(q: Query) -> bool:
    """From 2.12 on: windows to both sides."""
    left, right = q.full_window
    if _is_full(q):
        return True
    if q.cudnn >= (9, 2, 0) and (left, right) == (-1, -1) and q.mask == "no_mask":
        return True
    if not _is_local_and_plain(q):
        return False
    aligned = q.cudnn >= (9, 2, 0) and (q.mask == "no_mask" or _causal_square(q))
    from_the_left = right == 0 and aligned and q.layout_format in DENSE
    return from_the_left or (q.cudnn >= (9, 6, 0) and q.mask != "causal" and not _bottom_right_bug(q))


def _window_without_mask(q: Query) -> bool:
    """Up to 2.15 a window without a mask reaches to the left alone, in dense layouts."""
    left, right = q.full_window
    return q.mask != "no_mask" or left == -1 or (right == 0 and q.layout_format in DENSE)


def _release(q: Query) -> bool:
    """Releases of cuDNN with known bugs."""
    return q.cudnn >= (8, 9, 0) and q.cudnn not in ((9, 10, 0), (9, 10, 1)) and not _is_faulty(q)


def _is_faulty(q: Query) -> bool:
    long_window = q.skv > 1024 and q.full_window[0] != -1 and q.mask not in ("causal", "causal_bottom_right")
    if q.cudnn == (9, 14, 0) and long_window:
        return True
    captured_backward = q.is_training and q.cuda_graph and q.layout_format in DENSE
    unaligned = q.skv % 128 != 0 and "padding" not in q.mask
    return q.cudnn <= (9, 15, 0) and captured_backward and unaligned


def _window_found(q: Query) -> str:
    return f"window {q.full_window} with mask {q.mask}"


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
class Requirement(Span):
    """One condition of cuDNN, or of TransformerEngine for cuDNN.

    Attributes:
        about: its subject, as in ``docs/te_selection.md``.
        holds: whether the query meets it.
        found: describes what violates it.
    """

    about: str
    holds: Callable[[Query], bool]
    found: Callable[[Query], str]


REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement("dtype", lambda q: q.dtype in HALF_TYPES, lambda q: f"dtype {q.dtype}"),
    Requirement("architecture", _architecture, lambda q: "this architecture"),
    Requirement("lengths", _sequence_lengths, lambda q: f"max_seqlen_q={q.sq}, max_seqlen_kv={q.skv}"),
    Requirement("heads", _heads, lambda q: f"{q.num_heads} heads in {q.num_kv_heads} groups"),
    Requirement(
        "head dimensions",
        _head_dims,
        lambda q: f"head_dim_qk={q.dq}, head_dim_v={q.dv} in {'training' if q.is_training else 'inference'}",
    ),
    Requirement("bias", _bias, lambda q: f"bias {q.fused_bias_type} with mask {q.mask}"),
    Requirement("mask", _mask, lambda q: f"mask {q.mask} with layout {q.layout}"),
    Requirement("layout", _format, lambda q: f"layout {q.layout}"),
    Requirement("windows", _left_window, _window_found, until="2.11"),
    Requirement("windows", _window, _window_found, since="2.12"),
    Requirement("windows", _window_without_mask, _window_found, until="2.15"),
    Requirement("faults", _release, lambda q: "what is faulty in this release"),
    Requirement("softmax", _softmax, lambda q: f"softmax {q.softmax_type}"),
    Requirement("return_max_logit", _max_logit, lambda q: "return_max_logit", since="2.17"),
    Requirement("deterministic", _determinism, lambda q: f"deterministic={q.deterministic} in training", since="2.12"),
    Requirement(
        "compute capability 12.0",
        _sm120,
        lambda q: "12.0 before cuDNN 9.18.1, or with determinism in training, t3hd or th3d there",
        since="2.14",
    ),
)
