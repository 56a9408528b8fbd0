"""The catalogue of conformance cases: edges by hand, pairs by ``factors``, ``sizes``
and ``extremes``, real sizes for CUDA devices.

The hand-written cases are the plainest calls and the sizes at the edges: lengths of 1, primes and the neighbours of 64
and 128, so that no tile size divides them all, sequences without tokens, the narrowest and the widest heads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from mla_plugin.conformance.attention import extremes, sizes, windows
from mla_plugin.conformance.attention.borders import borders
from mla_plugin.conformance.attention.case import DTYPE_NAMES, Case
from mla_plugin.conformance.attention.factors import SPACE
from mla_plugin.conformance.attention.scores import FAINT
from mla_plugin.conformance.attention.wider import wider
from mla_plugin.conformance.selection import Catalogue

DENSE_FORMATS = ("bshd", "sbhd", "bhsd")
LENGTHS = ((1, 1), (1, 67), (67, 1), (2, 3), (17, 131), (131, 17), (64, 64), (128, 256), (129, 127))
PADDING_MASKS = ("padding", "padding_causal", "padding_causal_bottom_right")
EDGE_HEAD_DIMS = ((13, 7), (320, 272), (576, 512), (8, 8))
BIAS_SHAPES = ("1hss", "b1ss", "11ss", "bhss", "111s")

# Five sequences that meet each mask in both ways, queries outnumbering keys and the reverse.
VARLEN_Q, VARLEN_KV = (1, 17, 67, 5, 31), (3, 17, 29, 5, 64)


def cases(*tags: str) -> tuple[Case, ...]:
    """The cases that have every one of the tags, in the catalogue's order; large ones only for the tag ``large``.

    They are those of a backend that accepts everything; ``BackendConformance.cases`` makes them for one that does not.

    Raises:
        ValueError: no case of the catalogue has the tag.
    """
    known = frozenset().union(*(its for _, its in _catalogue()))
    for tag in tags:
        if tag not in known:
            raise ValueError(f"no conformance case has the tag {tag!r}; tags: {', '.join(sorted(known))}")
    wanted = {"small", *tags} if "large" not in tags else set(tags)
    return tuple(case for case, its in _catalogue() if wanted <= its)


def catalogue_for(accepts: Callable[[Case], bool]) -> Catalogue[Case]:
    """The small cases for a backend that accepts some calls: pairs are covered by those that it accepts."""
    every = whole_catalogue()
    if all(map(accepts, every.all())):
        return every
    return Catalogue(
        edges=every.edges,
        pairs=SPACE.cases(accepts),
        of_sizes=(*sizes.SPACE.cases(accepts), *windows.SPACE.cases(accepts)),
        of_extremes=extremes.SPACE.cases(accepts),
    )


def whole_catalogue() -> Catalogue[Case]:
    """The small cases for a backend that accepts every call."""
    return Catalogue(_edges(), _every_pair(), _every_size(), _every_extreme())


@functools.cache
def _every_pair() -> tuple[Case, ...]:
    return SPACE.cases()


@functools.cache
def _every_size() -> tuple[Case, ...]:
    return (*sizes.SPACE.cases(), *windows.SPACE.cases())


@functools.cache
def _every_extreme() -> tuple[Case, ...]:
    return extremes.SPACE.cases()


@functools.cache
def _edges() -> tuple[Case, ...]:
    families = (_layouts, _sizes, _lengths, _packed, _padded_rows, _windows, _biases, _repeatable, _together, _further)
    later = (_long, _many, _rare_strides, _longer)
    plain = [case for family in (*families, *later) for case in family()]
    dtypes = (torch.float32, torch.bfloat16)
    named = [
        replace(case, name=f"{case.name}-{DTYPE_NAMES[dtype]}", dtype=dtype)
        for index, case in enumerate(plain)
        for dtype in (dtypes if index < 9 else dtypes[index % 2 : index % 2 + 1])
    ]
    return (*named, *_other_dtypes(), *_in_float64(), *borders(), *wider())


@functools.cache
def _catalogue() -> tuple[tuple[Case, frozenset[str]], ...]:
    """Every case, and its tags."""
    return tuple((case, case.tags) for case in (*whole_catalogue().all(), *_large()))


def _layouts() -> Iterator[Case]:
    for qkv_format in DENSE_FORMATS:
        for mask in ("no_mask", "causal"):
            yield Case(f"{qkv_format}-{mask}", qkv_format, attn_mask_type=mask)
        bottom_right = Case(f"{qkv_format}-causal_bottom_right", qkv_format, attn_mask_type="causal_bottom_right")
        yield replace(bottom_right, seqlens_kv=(131, 131))


def _sizes() -> Iterator[Case]:
    for head_dim_qk, head_dim_v in EDGE_HEAD_DIMS:
        name = f"head_dims_{head_dim_qk}_{head_dim_v}"
        dims: dict[str, Any] = {"head_dim_qk": head_dim_qk, "head_dim_v": head_dim_v}
        dims |= {"seqlens_q": (19, 19), "seqlens_kv": (35, 35)}
        yield Case(name, **dims, attn_mask_type="causal_bottom_right")
    yield Case("softmax_scale", softmax_scale=0.1353)  # DeepSeek-V3: YaRN multiplies 192 ** -0.5 by 1.87
    yield Case("one_head", num_heads=1, num_kv_heads=1, seqlens_q=(37,), seqlens_kv=(41,))
    yield Case("packed", storage="packed", attn_mask_type="causal", seqlens_q=(37,) * 2, seqlens_kv=(37,) * 2)
    widths: dict[str, Any] = {"head_dim_qk": 24, "head_dim_v": 16}
    yield Case("heads_40_5", num_heads=40, num_kv_heads=5, seqlens_q=(9,) * 2, seqlens_kv=(33,) * 2, **widths)
    yield Case("heads_128", num_heads=128, num_kv_heads=128, seqlens_q=(7,), seqlens_kv=(18,), **widths)
    yield Case("batch_17", seqlens_q=(5,) * 17, seqlens_kv=(12,) * 17, **widths)
    yield Case("keys_1030", seqlens_q=(5,), seqlens_kv=(1030,), attn_mask_type="causal_bottom_right", **widths)


def _lengths() -> Iterator[Case]:
    for seqlen_q, seqlen_kv in LENGTHS:
        heads = 16 if min(seqlen_q, seqlen_kv) < 16 else 3
        for mask in ("causal", "causal_bottom_right"):
            lengths: dict[str, Any] = {"seqlens_q": (seqlen_q,) * 2, "seqlens_kv": (seqlen_kv,) * 2}
            lengths |= {"num_heads": heads, "num_kv_heads": heads}
            yield Case(f"lengths_{seqlen_q}_{seqlen_kv}-{mask}", **lengths, attn_mask_type=mask)


def _packed() -> Iterator[Case]:
    """``thd``: sequences of different lengths, empty ones, rows between them and after the last."""
    for mask in PADDING_MASKS:
        thd = Case("", "thd", attn_mask_type=mask)
        yield replace(thd, name=f"thd-{mask}-self", seqlens_q=VARLEN_Q, seqlens_kv=VARLEN_Q)
        yield replace(thd, name=f"thd-{mask}", seqlens_q=VARLEN_Q, seqlens_kv=VARLEN_KV)
        yield replace(thd, name=f"thd-{mask}-empty", seqlens_q=(0, 7, 0, 19, 3), seqlens_kv=(5, 0, 0, 23, 7))
        between = replace(thd, rows_q=(8, 24, 72, 5, 0), rows_kv=(8, 17, 32, 16, 3))
        yield replace(
            between, name=f"thd-{mask}-between", seqlens_q=(1, 17, 67, 5, 0), seqlens_kv=(3, 17, 29, 5, 3), tail=9
        )
    padding = Case("", "thd", attn_mask_type="padding")
    yield replace(padding, name="thd-tail", seqlens_q=(11, 13), seqlens_kv=(11, 13), tail=17)
    yield replace(padding, name="thd-no_keys", seqlens_q=(11, 13), seqlens_kv=(0, 0))
    yield replace(padding, name="thd-no_queries", seqlens_q=(0, 0), seqlens_kv=(11, 13))


def _padded_rows() -> Iterator[Case]:
    """Dense layouts with padding masks: true lengths below the extent, zero included."""
    lengths: dict[str, Any] = {"seqlens_q": (1, 17, 0, 67), "seqlens_kv": (29, 17, 5, 0)}
    for qkv_format, mask in zip(DENSE_FORMATS, PADDING_MASKS, strict=True):
        dense = Case("", qkv_format, attn_mask_type=mask, rows_q=(71,) * 4, rows_kv=(67,) * 4)
        yield replace(dense, name=f"{qkv_format}-{mask}", **lengths)


def _windows() -> Iterator[Case]:
    """Windows that equal a causal mask, or hide nothing."""
    yield Case("window_is_causal", window_size=(-1, 0), seqlens_q=(37, 37), seqlens_kv=(71, 71))
    yield Case("window_is_causal_top_left", window_size=(-1, 0), bottom_right_diagonal=False, seqlens_kv=(41, 41))
    yield Case("window_of_everything", window_size=(2**31 - 1, 2**31 - 1), seqlens_kv=(41, 41))
    yield Case("window_one_side_of_everything", window_size=(2**31 - 1, 2), seqlens_kv=(83, 83))


def _biases() -> Iterator[Case]:
    for index, shape in enumerate(BIAS_SHAPES):
        bias_type = ("post_scale_bias", "pre_scale_bias")[index % 2]
        bias = Case(f"{bias_type}-{shape}", bias_type=bias_type, bias_shape=shape, seqlens_kv=(37, 37))
        yield replace(bias, bias_requires_grad=True)


def _repeatable() -> Iterator[Case]:
    same = Case("", deterministic=True, seqlens_q=(131, 131), seqlens_kv=(131, 131))
    yield replace(same, name="deterministic-causal", attn_mask_type="causal")
    yield replace(same, name="deterministic-gqa", num_heads=4, num_kv_heads=1)
    thd = replace(same, qkv_format="thd", seqlens_q=VARLEN_Q, seqlens_kv=VARLEN_KV)
    yield replace(thd, name="deterministic-thd", attn_mask_type="padding_causal")


def _together() -> Iterator[Case]:
    """Edges of two things at once, and what is no edge of a size: a scale of 1, a first row of the keys alone."""
    widths: dict[str, Any] = {"head_dim_qk": 24, "head_dim_v": 16}
    packed: dict[str, Any] = {"qkv_format": "thd", "attn_mask_type": "padding", **widths}
    yield Case("heads_40_5-thd", num_heads=40, num_kv_heads=5, seqlens_q=(9, 5), seqlens_kv=(33, 40), **packed)
    yield Case("batch_17-thd", seqlens_q=(*((5, 3) * 8), 4), seqlens_kv=(*((12, 9) * 8), 7), **packed)
    yield Case("heads_128-bhsd", "bhsd", num_heads=128, num_kv_heads=16, seqlens_q=(5,), seqlens_kv=(9,), **widths)
    for qkv_format, mask in (("sbhd", "no_mask"), ("bhsd", "no_mask"), ("thd", "padding")):
        wide: dict[str, Any] = {"seqlens_q": (7, 7), "seqlens_kv": (18, 18), "num_heads": 2, "num_kv_heads": 1}
        wide |= {"head_dim_qk": 576, "head_dim_v": 512, "attn_mask_type": mask}
        yield Case(f"head_dims_576_512-{qkv_format}", qkv_format, **wide)
    for gaps in ({"lead_kv": 5}, {"lead": 6, "lead_kv": 0}):
        first: dict[str, Any] = {"seqlens_q": VARLEN_Q, "seqlens_kv": VARLEN_KV, "return_lse": True, **gaps}
        rows: dict[str, Any] = {"rows_q": VARLEN_Q, "rows_kv": VARLEN_KV}
        yield Case(f"thd-lead_{gaps.get('lead', 0)}_{gaps['lead_kv']}", **(packed | first | rows))
    yield Case("softmax_scale_1", softmax_scale=1.0, attn_mask_type="causal", **widths)
    yield Case("softmax_scale_1-thd", softmax_scale=1.0, seqlens_q=VARLEN_Q, seqlens_kv=VARLEN_KV, **packed)
    yield Case("window_of_65536", window_size=(65536, 3), seqlens_kv=(83, 83))
    yield Case("keys_8200", num_heads=2, num_kv_heads=2, seqlens_q=(40,), seqlens_kv=(8200,), **widths)
    yield Case("keys_700", seqlens_q=(140,), seqlens_kv=(700,), attn_mask_type="causal_bottom_right", **widths)


def _further() -> Iterator[Case]:
    """Biases and masks of fewer dimensions, windows that end at the diagonal, whole tiles, other rare strides."""
    widths: dict[str, Any] = {"head_dim_qk": 24, "head_dim_v": 16}
    for shape in ("1hss", "111s", "ss"):
        yield Case(f"mask_{shape}", attn_mask_type="arbitrary", mask_shape=shape, seqlens_kv=(37, 37), **widths)
    for bias_type, shape in (("post_scale_bias", "ss"), ("pre_scale_bias", "hss"), ("post_scale_bias", "bhs1")):
        bias: dict[str, Any] = {"bias_type": bias_type, "bias_shape": shape, "bias_requires_grad": True}
        yield Case(f"{bias_type}-{shape}", seqlens_kv=(37, 37), **bias, **widths)
    yield Case("window_0_3", window_size=(0, 3), seqlens_kv=(83, 83), **widths)
    yield Case("window_4_0", window_size=(4, 0), seqlens_kv=(83, 83), **widths)
    tiles: dict[str, Any] = {"seqlens_q": (128, 64, 65), "seqlens_kv": (128, 64, 65), "num_heads": 2, "num_kv_heads": 1}
    yield Case("whole_tiles-thd", "thd", attn_mask_type="padding_causal", **tiles, **widths)
    square: dict[str, Any] = {"seqlens_q": (512,), "seqlens_kv": (512,), "num_heads": 1, "num_kv_heads": 1}
    yield Case("lengths_512_512", attn_mask_type="causal", **square, **widths)
    yield Case("queries_4100", seqlens_q=(4100,), seqlens_kv=(19,), num_heads=2, num_kv_heads=2, **widths)
    yield Case("batch_70", seqlens_q=(3,) * 70, seqlens_kv=(5,) * 70, **widths)
    short: dict[str, Any] = {"seqlens_q": (19, 19), "seqlens_kv": (35, 35)}
    yield Case("head_dims_64_512", head_dim_qk=64, head_dim_v=512, **short)
    yield Case("head_dims_1_1", head_dim_qk=1, head_dim_v=1, **short)
    strides: dict[str, Any] = {"storage_q": "expanded_batch", "storage_v": "expanded_heads"}
    yield Case("expanded_q_and_v", **strides, dout_storage="sliced_heads", num_heads=4, num_kv_heads=2)
    strides = {"storage_q": "expanded_heads", "storage_v": "odd_rows", "dout_storage": "odd_rows"}
    yield Case("expanded_q-odd_v", "bhsd", attn_mask_type="causal", **strides)
    yield Case("sliced_v", "sbhd", storage_v="sliced_tokens", dout_storage="sliced_heads", attn_mask_type="causal")


def _long() -> Iterator[Case]:
    """More queries and keys than any tile, with what makes a kernel leave tiles out, in each layout."""
    few: dict[str, Any] = {"head_dim_qk": 24, "head_dim_v": 16, "num_heads": 2, "num_kv_heads": 1}
    square: dict[str, Any] = {"seqlens_q": (280,), "seqlens_kv": (560,), **few}
    yield Case("long-window", window_size=(100, 0), return_lse=True, **square)
    yield Case("long-bhsd-window", "bhsd", window_size=(30, 200), bottom_right_diagonal=False, **square)
    yield Case("long-sbhd", "sbhd", attn_mask_type="causal_bottom_right", scores="large", **square)
    yield Case("longer-bhsd", "bhsd", **(square | {"seqlens_q": (520,), "seqlens_kv": (1000,)}))
    yield Case("long-mask", attn_mask_type="arbitrary", mask_shape="bhss", **square)
    yield Case("long-bias", bias_type="post_scale_bias", bias_requires_grad=True, **square)
    dense: dict[str, Any] = {"rows_q": (290,) * 2, "rows_kv": (560,) * 2}
    dense |= {"seqlens_q": (280, 9), "seqlens_kv": (350, 560), "return_lse": True, **few}
    yield Case("long-bshd-padding", attn_mask_type="padding", window_size=(-1, 40), **dense)
    yield Case("long-sbhd-padding", "sbhd", attn_mask_type="padding_causal_bottom_right", window_size=(260, 0), **dense)
    yield Case("long-bhsd-padding", "bhsd", attn_mask_type="padding_causal", scores="large", **dense)
    packed: dict[str, Any] = {"seqlens_q": (270, 3, 300), "seqlens_kv": (530, 130, 230), "return_lse": True, **few}
    for mask, window in (("padding_causal", (-1, -1)), ("padding", (70, 300)), ("padding_causal_bottom_right", (9, 0))):
        yield Case(f"long-thd-{mask}", "thd", attn_mask_type=mask, window_size=window, **packed)


def _longer() -> Iterator[Case]:
    """Thousands of keys or queries with what makes a kernel leave tiles out, and windows that end where tiles do."""
    few: dict[str, Any] = {"head_dim_qk": 24, "head_dim_v": 16, "num_heads": 2, "num_kv_heads": 1}
    keys: dict[str, Any] = {"seqlens_q": (37,), "seqlens_kv": (2300,), **few}
    for qkv_format in ("bshd", "bhsd"):
        longer = Case(f"longer-{qkv_format}-causal", qkv_format, attn_mask_type="causal_bottom_right", **keys)
        yield replace(longer, return_lse=True, deterministic=qkv_format == "bshd")
    yield Case("longer-window", "sbhd", window_size=(2100, 3), **keys)
    yield Case("longer-bias", bias_type="post_scale_bias", bias_requires_grad=True, **keys)
    yield Case("longer-mask", "bhsd", attn_mask_type="arbitrary", mask_shape="bhss", **keys)
    yield Case("longer-queries", seqlens_q=(2300,), seqlens_kv=(37,), attn_mask_type="causal", return_lse=True, **few)
    packed: dict[str, Any] = {"seqlens_q": (33, 2, 1100), "seqlens_kv": (1900, 40, 20), "return_lse": True, **few}
    for mask in ("padding", "padding_causal_bottom_right"):
        yield Case(f"longer-thd-{mask}", "thd", attn_mask_type=mask, **packed)
        dense: dict[str, Any] = {"rows_q": (1110,) * 3, "rows_kv": (1910,) * 3}
        yield Case(f"longer-{mask}", "bshd", attn_mask_type=mask, **(packed | dense))
    tiles: dict[str, Any] = {"seqlens_q": (256,), "seqlens_kv": (384,), **few}
    for left, right, mask in ((64, 64, "no_mask"), (128, 0, "causal_bottom_right"), (0, 128, "no_mask")):
        yield Case(f"window_{left}_{right}-whole_tiles", window_size=(left, right), attn_mask_type=mask, **tiles)
        thd: dict[str, Any] = tiles | {"seqlens_q": (256, 64), "seqlens_kv": (256, 128), "qkv_format": "thd"}
        yield Case(
            f"window_{left}_{right}-whole_tiles-thd", window_size=(left, right), attn_mask_type=_padded(mask), **thd
        )
    most: dict[str, Any] = {"seqlens_q": (66_000, 6, 2), "seqlens_kv": (3, 66_000, 7)}
    most |= {"num_heads": 1, "num_kv_heads": 1, "head_dim_qk": 8, "head_dim_v": 8}
    yield Case("tokens_66000-thd", "thd", attn_mask_type="padding", **most)
    nothing: dict[str, Any] = {"seqlens_q": (0, 0), "seqlens_kv": (0, 0), "rows_q": (5, 5), "rows_kv": (7, 7)}
    yield Case("nothing_but_padding", attn_mask_type="padding", return_lse=True, **nothing, **few)


def _padded(mask: str) -> str:
    return "padding" if mask == "no_mask" else f"padding_{mask}"


def _many() -> Iterator[Case]:
    """Many sequences, heads, and heads that share one of the keys'."""
    widths: dict[str, Any] = {"head_dim_qk": 24, "head_dim_v": 16}
    lengths: dict[str, Any] = {"seqlens_q": (3,) * 140, "seqlens_kv": (5,) * 140, "num_heads": 1, "num_kv_heads": 1}
    yield Case("batch_140", "sbhd", **lengths, **widths)
    lengths = {"seqlens_q": (2, 0, 3) * 44, "seqlens_kv": (4, 1, 2) * 44, "num_heads": 1, "num_kv_heads": 1}
    yield Case("batch_132-thd", "thd", attn_mask_type="padding_causal", **lengths, **widths)
    short: dict[str, Any] = {"seqlens_q": (9, 9), "seqlens_kv": (33, 33)}
    for qkv_format in ("bhsd", "sbhd"):
        yield Case(f"heads_131-{qkv_format}", qkv_format, num_heads=131, num_kv_heads=131, **short, **widths)
    shared: dict[str, Any] = {"num_heads": 128, "num_kv_heads": 1, "attn_mask_type": "causal_bottom_right"}
    yield Case("heads_128_1", **shared, **short, **widths)
    packed: dict[str, Any] = {"qkv_format": "thd", "attn_mask_type": "padding", "max_seqlen": "beyond"}
    packed |= {"seqlens_q": (9, 5, 0), "seqlens_kv": (33, 2, 7), "return_lse": True}
    yield Case("heads_49_7-thd", num_heads=49, num_kv_heads=7, window_size=(5, 11), **packed, **widths)
    wide: dict[str, Any] = {"head_dim_qk": 320, "head_dim_v": 272}
    yield Case("heads_64_1-head_dims_320_272-thd", num_heads=64, num_kv_heads=1, **packed, **wide)
    for qkv_format, mask in (("thd", "padding"), ("bhsd", "no_mask")):
        odd: dict[str, Any] = {"seqlens_q": (19, 7), "seqlens_kv": (19, 7)} if qkv_format == "thd" else {}
        odd |= {"head_dim_qk": 13, "head_dim_v": 7, "return_lse": True, "softmax_scale": 0.3}
        yield Case(f"head_dims_13_7-{qkv_format}", qkv_format, attn_mask_type=mask, **odd)


def _rare_strides() -> Iterator[Case]:
    """Tensors that begin off 16 bytes, and what broadcasting leaves: learned queries, sums of out over an axis."""
    unaligned: dict[str, Any] = {"storage_k": "offset", "dlse_storage": "offset", "offsets_storage": "offset"}
    packed: dict[str, Any] = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "return_lse": True}
    yield Case("unaligned-thd", seqlens_q=VARLEN_Q, seqlens_kv=VARLEN_KV, **unaligned, **packed)
    bias: dict[str, Any] = {"bias_type": "post_scale_bias", "bias_requires_grad": True, "seqlens_kv": (37, 37)}
    yield Case("unaligned_bias", bias_storage="offset", bias_shape="bhss", storage_k="offset", **bias)
    yield Case("only_bias_needs_gradient", bias_shape="1hss", needs_gradient="", **bias)
    yield Case("expanded_bias", bias_storage="expanded", bias_shape="bhss", **bias)
    yield Case("bias_of_one_dimension", bias_shape="s", **bias)
    yield Case("mask_of_one_dimension", attn_mask_type="arbitrary", mask_shape="s", seqlens_kv=(37, 37))
    for index, axis in enumerate(("tokens", "batch", "dims", "heads")):
        qkv_format = ("bshd", "sbhd", "bhsd", "bshd")[index]
        strides: dict[str, Any] = {"dout_storage": f"expanded_{axis}", "attn_mask_type": "causal"}
        if axis in ("tokens", "heads"):
            strides |= {"storage_q": "expanded_tokens", "num_heads": 4, "num_kv_heads": 2}
        yield Case(f"expanded_{axis}_of_dout", qkv_format, return_lse=index % 2 == 0, **strides)
    yield Case("expanded_tokens_of_v", storage_v="expanded_tokens", storage_k="expanded_tokens", seqlens_kv=(37, 37))
    for axis, layout in (("batch", "bshd"), ("heads", "sbhd"), ("tokens", "bhsd")):
        full: dict[str, Any] = {"bias_storage": f"expanded_{axis}", "seqlens_kv": (37, 37)}
        yield Case(f"expanded_{axis}_of_mask", layout, attn_mask_type="arbitrary", mask_shape="bhss", **full)
        full |= {"bias_type": "pre_scale_bias", "bias_shape": "bhss", "bias_requires_grad": axis != "heads"}
        yield Case(f"expanded_{axis}_of_bias", layout, **full)


def _in_float64() -> Iterator[Case]:
    """float64, in which gradients are checked by differences, with the features that a kernel treats apart."""
    both: dict[str, Any] = {"dtype": torch.float64, "num_heads": 4, "num_kv_heads": 2, "return_lse": True}
    both |= {"head_dim_qk": 24, "head_dim_v": 16}
    yield Case("fp64-window", seqlens_kv=(83, 83), window_size=(5, 11), softmax_scale=0.1353, **both)
    between: dict[str, Any] = {"rows_q": (8, 24, 72, 5, 0), "rows_kv": (8, 17, 32, 16, 3), "tail": 9}
    between |= {"seqlens_q": (1, 17, 67, 5, 0), "seqlens_kv": (3, 17, 29, 5, 3), "qkv_format": "thd"}
    yield Case("fp64-thd-between", attn_mask_type="padding_causal", window_size=(7, 0), **between, **both)
    bias: dict[str, Any] = {"bias_type": "pre_scale_bias", "bias_requires_grad": True, "bias_shape": "bhss"}
    dense: dict[str, Any] = {"seqlens_q": (1, 17, 0), "seqlens_kv": (29, 17, 5)}
    dense |= {"rows_q": (19,) * 3, "rows_kv": (31,) * 3}
    yield Case("fp64-sbhd-padding-bias", "sbhd", attn_mask_type="padding", **bias, **dense, **both)
    yield Case("fp64-bhsd-mask", "bhsd", attn_mask_type="arbitrary", mask_shape="bhss", seqlens_kv=(37, 37), **both)
    yield Case("fp64-large_scores", attn_mask_type="causal", scores="large", deterministic=True, **both)


def _other_dtypes() -> Iterator[Case]:
    for dtype in (torch.float16, torch.float64):
        name = DTYPE_NAMES[dtype]
        yield Case(f"bshd-causal-{name}", dtype=dtype, attn_mask_type="causal", return_lse=True)
        lengths: dict[str, Any] = {"seqlens_q": VARLEN_Q, "seqlens_kv": VARLEN_KV}
        yield Case(f"thd-padding_causal-{name}", "thd", dtype, attn_mask_type="padding_causal", **lengths)
        yield Case(f"gqa-128_128-{name}", dtype=dtype, head_dim_qk=128, num_heads=4, num_kv_heads=2)
    widths: dict[str, Any] = {"head_dim_qk": 24, "head_dim_v": 16, "seqlens_q": (9, 9), "seqlens_kv": (33, 33)}
    for dtype in (torch.bfloat16, torch.float16):  # the gradients of a group are a sum, not rounded after each head
        for qkv_format in ("bshd", "bhsd"):
            name = f"heads_128_1-{qkv_format}-{DTYPE_NAMES[dtype]}"
            yield Case(name, qkv_format, dtype, num_heads=128, num_kv_heads=1, **widths)
        odd: dict[str, Any] = {"head_dim_qk": 13, "head_dim_v": 7, "return_lse": True, "attn_mask_type": "causal"}
        yield Case(f"head_dims_13_7-causal-{DTYPE_NAMES[dtype]}", dtype=dtype, **odd)
    wide: dict[str, Any] = {"seqlens_q": (40,), "seqlens_kv": (700,), "head_dim_qk": 24, "head_dim_v": 16}
    many: dict[str, Any] = {"seqlens_q": (3,) * 260, "seqlens_kv": (9,) * 260, "head_dim_qk": 8, "head_dim_v": 8}
    bias: dict[str, Any] = {"bias_type": "post_scale_bias", "bias_shape": "1hss", "bias_requires_grad": True}
    yield Case("bias_of_260_sequences-bf16", dtype=torch.bfloat16, **many, **bias)
    faint: dict[str, Any] = {"scores": "faint_queries", "softmax_scale": FAINT, "head_dim_qk": 8, "head_dim_v": 8}
    one: dict[str, Any] = {"num_heads": 1, "num_kv_heads": 1, "seqlens_q": (5,), "seqlens_kv": (33_000,)}
    yield Case("faint_queries-fp16", dtype=torch.float16, **faint, **one)  # a score's gradient times the scale is 0
    yield Case("keys_700-fp16", dtype=torch.float16, window_size=(300, 9), return_lse=True, **wide)


def _large() -> Iterator[Case]:
    """Real sizes. Each keeps its scores below 2**26, half a GiB in float64, one sequence at a time."""
    large = Case("", dtype=torch.bfloat16, num_heads=16, num_kv_heads=16, is_large=True, attn_mask_type="causal")
    square = replace(large, seqlens_q=(2048, 2048), seqlens_kv=(2048, 2048))
    for head_dim_qk, head_dim_v in ((192, 128), (128, 128), (256, 256)):
        dims: dict[str, Any] = {"head_dim_qk": head_dim_qk, "head_dim_v": head_dim_v}
        yield replace(square, name=f"large-{head_dim_qk}_{head_dim_v}", **dims)
    yield replace(square, name="large-fp16", dtype=torch.float16)
    yield replace(square, name="large-sbhd", qkv_format="sbhd")
    yield replace(square, name="large-bhsd-no_mask", qkv_format="bhsd", attn_mask_type="no_mask", return_lse=True)
    yield replace(square, name="large-gqa", num_kv_heads=2)
    yield replace(square, name="large-deterministic", deterministic=True)
    heads: dict[str, Any] = {"num_heads": 128, "num_kv_heads": 128}
    yield replace(large, name="large-deepseek_v3", seqlens_q=(509,), seqlens_kv=(509,), **heads)
    heads = {"num_heads": 65_600, "num_kv_heads": 65_600, "head_dim_qk": 64, "head_dim_v": 64}
    yield replace(large, name="large-heads_65600", seqlens_q=(3,), seqlens_kv=(3,), **heads)  # no CUDA grid's y axis
    chunk: dict[str, Any] = {"seqlens_q": (511,), "seqlens_kv": (4099,)}
    yield replace(large, name="large-chunked_prefill", attn_mask_type="causal_bottom_right", **chunk)
    thd = replace(large, qkv_format="thd", seqlens_q=(1, 1021, 2048, 127, 0), seqlens_kv=(1, 1021, 2048, 127, 0))
    yield replace(thd, name="large-thd", attn_mask_type="padding_causal")
    between = replace(thd, rows_q=(64, 1024, 2048, 128, 0), rows_kv=(64, 1024, 2048, 128, 0), tail=64)
    yield replace(between, name="large-thd-between", attn_mask_type="padding_causal")
