"""The catalogue of conformance cases: small ones for every device, and large ones with real sizes for CUDA devices.

Most cases stand in it twice: in float32, where an error of one key shows sharply, and in bfloat16, which is all that
many fused kernels take. Lengths are 1, primes, and the neighbours of 64 and 128, so that no tile size divides them all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from mla_plugin.conformance.attention.case import DTYPE_NAMES, Case, DoutStorage, Storage

HEAD_DIMS = ((192, 128), (128, 128), (256, 256), (192, 256), (96, 64), (64, 32), (128, 64), (24, 16), (13, 7))
DENSE_FORMATS = ("bshd", "sbhd", "bhsd")
LENGTHS = ((1, 1), (1, 67), (67, 1), (2, 3), (17, 131), (131, 17), (64, 64), (129, 127))
PADDING_MASKS = ("padding", "padding_causal", "padding_causal_bottom_right")
STORAGES: tuple[Storage, ...] = ("transposed", "sliced_heads", "packed", "expanded_heads")
DOUT_STORAGES: tuple[DoutStorage, ...] = ("transposed", "expanded")
BIAS_SHAPES = ("1hss", "b1ss", "11ss", "bhss", "111s")

# Five sequences that meet each mask in both ways, queries outnumbering keys and the reverse.
VARLEN_Q, VARLEN_KV = (1, 17, 67, 5, 31), (3, 17, 29, 5, 64)


def cases(*tags: str) -> tuple[Case, ...]:
    """The cases that have every one of the tags, in the catalogue's order; large ones only for the tag ``large``.

    Raises:
        ValueError: no case of the catalogue has the tag.
    """
    known = frozenset().union(*(case.tags for case in _catalogue()))
    for tag in tags:
        if tag not in known:
            raise ValueError(f"no conformance case has the tag {tag!r}; tags: {', '.join(sorted(known))}")
    wanted = {"small", *tags} if "large" not in tags else set(tags)
    return tuple(case for case in _catalogue() if wanted <= case.tags)


@functools.cache
def _catalogue() -> tuple[Case, ...]:
    geometry = (_head_dims, _layouts, _lengths, _packed, _padded_rows, _groups, _strides)
    features = (_windows, _biases, _arbitrary_masks, _lse_gradients, _repeatable)
    small = [
        replace(case, name=f"{case.name}-{DTYPE_NAMES[dtype]}", dtype=dtype)
        for family in (*geometry, *features)
        for case in family()
        for dtype in (torch.float32, torch.bfloat16)
    ]
    return (*small, *_other_dtypes(), *_large())


def _head_dims() -> Iterator[Case]:
    for head_dim_qk, head_dim_v in HEAD_DIMS:
        name = f"head_dims_{head_dim_qk}_{head_dim_v}"
        yield Case(name, head_dim_qk=head_dim_qk, head_dim_v=head_dim_v, attn_mask_type="causal")
    yield Case("softmax_scale", softmax_scale=0.1353)  # DeepSeek-V3: YaRN multiplies 192 ** -0.5 by 1.87


def _layouts() -> Iterator[Case]:
    for qkv_format in DENSE_FORMATS:
        for mask in ("no_mask", "causal"):
            yield Case(f"{qkv_format}-{mask}", qkv_format, attn_mask_type=mask)
        bottom_right = Case(f"{qkv_format}-causal_bottom_right", qkv_format, attn_mask_type="causal_bottom_right")
        yield replace(bottom_right, seqlens_kv=(131, 131))


def _lengths() -> Iterator[Case]:
    for seqlen_q, seqlen_kv in LENGTHS:
        # Few rows have few errors to take the largest of; more heads keep the error budget from being a matter of luck.
        heads = 16 if min(seqlen_q, seqlen_kv) < 16 else 3
        for mask in ("causal", "causal_bottom_right"):
            lengths: dict[str, Any] = {"seqlens_q": (seqlen_q,) * 2, "seqlens_kv": (seqlen_kv,) * 2}
            lengths |= {"num_heads": heads, "num_kv_heads": heads}
            yield Case(f"lengths_{seqlen_q}_{seqlen_kv}-{mask}", **lengths, attn_mask_type=mask)
    yield Case("one_head", num_heads=1, num_kv_heads=1, seqlens_q=(37,), seqlens_kv=(41,))


def _packed() -> Iterator[Case]:
    """``thd``: sequences of different lengths, empty ones, rows between them and behind the last."""
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
    for qkv_format in DENSE_FORMATS:
        for mask in PADDING_MASKS:
            dense = Case("", qkv_format, attn_mask_type=mask, rows_q=(71,) * 4, rows_kv=(67,) * 4)
            yield replace(dense, name=f"{qkv_format}-{mask}", **lengths)
    same = (5, 71, 37, 1)
    dense = Case("", seqlens_q=same, seqlens_kv=same, rows_q=(71,) * 4, rows_kv=(71,) * 4)
    for mask in ("padding", "padding_causal"):
        yield replace(dense, name=f"bshd-{mask}-self", attn_mask_type=mask)


def _windows() -> Iterator[Case]:
    """A window alone and with a causal mask; both diagonals; lengths that differ both ways."""
    for seqlen_q, seqlen_kv in ((67, 67), (37, 71), (71, 37)):
        lengths: dict[str, Any] = {"seqlens_q": (seqlen_q,) * 2, "seqlens_kv": (seqlen_kv,) * 2}
        suffix = f"{seqlen_q}_{seqlen_kv}"
        yield Case(f"window_left-{suffix}", window_size=(7, -1), **lengths)
        yield Case(f"window_both-{suffix}", window_size=(5, 3), **lengths)
        for mask in ("causal", "causal_bottom_right"):
            yield Case(f"window-{mask}-{suffix}", window_size=(7, 0), attn_mask_type=mask, **lengths)
        yield Case(f"window_top_left-{suffix}", window_size=(5, 3), bottom_right_diagonal=False, **lengths)
        yield Case(f"window_is_causal-{suffix}", window_size=(-1, 0), **lengths)
    yield Case("window_right", window_size=(-1, 5))
    yield Case("window_diagonal", window_size=(0, 0))
    yield Case("window_unlimited-causal", window_size=(-1, 0), attn_mask_type="causal")
    yield Case("window_is_causal_top_left", window_size=(-1, 0), bottom_right_diagonal=False, seqlens_kv=(41, 41))
    for mask in PADDING_MASKS:
        right = 0 if "causal" in mask else 3
        window = Case("", window_size=(5, right), attn_mask_type=mask, seqlens_q=(1, 17, 31), seqlens_kv=(3, 29, 7))
        yield replace(window, name=f"window-thd-{mask}", qkv_format="thd")
        yield replace(window, name=f"window-bshd-{mask}", rows_q=(37,) * 3, rows_kv=(31,) * 3)


def _groups() -> Iterator[Case]:
    for qkv_format in DENSE_FORMATS:
        yield Case(f"{qkv_format}-gqa", qkv_format, num_heads=4, num_kv_heads=2, attn_mask_type="causal")
    yield Case("gqa_of_three", num_heads=6, num_kv_heads=2, seqlens_q=(31,) * 2)
    yield Case("mqa", num_heads=5, num_kv_heads=1, attn_mask_type="causal")
    thd = Case("", "thd", seqlens_q=VARLEN_Q, seqlens_kv=VARLEN_KV, num_heads=4, num_kv_heads=2)
    yield replace(thd, name="thd-gqa", attn_mask_type="padding_causal_bottom_right")


def _biases() -> Iterator[Case]:
    for bias_type in ("post_scale_bias", "pre_scale_bias"):
        for shape in BIAS_SHAPES:
            bias = Case(f"{bias_type}-{shape}", bias_type=bias_type, bias_shape=shape, seqlens_kv=(37, 37))
            yield bias
            yield replace(bias, name=f"{bias.name}-grad", bias_requires_grad=True)
    bias = Case("", bias_type="post_scale_bias", bias_requires_grad=True)
    yield replace(bias, name="bias-causal", attn_mask_type="causal")
    yield replace(bias, name="bias-gqa", num_heads=4, num_kv_heads=2)
    padded = replace(bias, seqlens_q=(5, 37), seqlens_kv=(31, 7), rows_q=(41, 41), rows_kv=(31, 31))
    yield replace(padded, name="bias-padding", attn_mask_type="padding")


def _arbitrary_masks() -> Iterator[Case]:
    for shape in ("b1ss", "11ss", "bhss"):
        yield Case(f"arbitrary-{shape}", attn_mask_type="arbitrary", mask_shape=shape, seqlens_kv=(37, 37))
    yield Case("arbitrary-sbhd-gqa", "sbhd", attn_mask_type="arbitrary", num_heads=4, num_kv_heads=2)


def _strides() -> Iterator[Case]:
    for qkv_format in DENSE_FORMATS:
        dense = Case("", qkv_format, attn_mask_type="causal", seqlens_q=(37, 37), seqlens_kv=(37, 37))
        for storage in STORAGES:
            yield replace(dense, name=f"{qkv_format}-{storage}", storage=storage)
        for dout_storage in DOUT_STORAGES:
            yield replace(dense, name=f"{qkv_format}-dout_{dout_storage}", dout_storage=dout_storage)
    thd = Case("", "thd", attn_mask_type="padding_causal", seqlens_q=(17, 5, 31), seqlens_kv=(17, 5, 31))
    for storage in STORAGES:
        yield replace(thd, name=f"thd-{storage}", storage=storage)
    for dout_storage in DOUT_STORAGES:
        yield replace(thd, name=f"thd-dout_{dout_storage}", dout_storage=dout_storage)
    yield Case("gqa-transposed", storage="transposed", num_heads=4, num_kv_heads=2)


def _lse_gradients() -> Iterator[Case]:
    lse = Case("", return_lse=True)
    for qkv_format in DENSE_FORMATS:
        yield replace(lse, name=f"lse-{qkv_format}", qkv_format=qkv_format, attn_mask_type="causal")
    yield replace(lse, name="lse-rows_without_keys", attn_mask_type="causal_bottom_right", seqlens_kv=(17, 17))
    yield replace(lse, name="lse-gqa", num_heads=4, num_kv_heads=2)
    varlen = replace(lse, attn_mask_type="padding_causal", seqlens_q=VARLEN_Q, seqlens_kv=VARLEN_KV)
    yield replace(varlen, name="lse-thd", qkv_format="thd")
    yield replace(varlen, name="lse-bshd-padding", rows_q=(67,) * 5, rows_kv=(64,) * 5)


def _repeatable() -> Iterator[Case]:
    same = Case("", deterministic=True, seqlens_q=(131, 131), seqlens_kv=(131, 131))
    yield replace(same, name="deterministic-causal", attn_mask_type="causal")
    yield replace(same, name="deterministic-gqa", num_heads=4, num_kv_heads=1)
    thd = replace(same, qkv_format="thd", seqlens_q=VARLEN_Q, seqlens_kv=VARLEN_KV)
    yield replace(thd, name="deterministic-thd", attn_mask_type="padding_causal")


def _other_dtypes() -> Iterator[Case]:
    for dtype in (torch.float16, torch.float64):
        name = DTYPE_NAMES[dtype]
        yield Case(f"bshd-causal-{name}", dtype=dtype, attn_mask_type="causal", return_lse=True)
        yield Case(f"sbhd-no_mask-{name}", "sbhd", dtype, seqlens_kv=(37, 37))
        lengths: dict[str, Any] = {"seqlens_q": VARLEN_Q, "seqlens_kv": VARLEN_KV}
        yield Case(f"thd-padding_causal-{name}", "thd", dtype, attn_mask_type="padding_causal", **lengths)
        yield Case(f"gqa-128_128-{name}", dtype=dtype, head_dim_qk=128, num_heads=4, num_kv_heads=2)


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
    chunk: dict[str, Any] = {"seqlens_q": (511,), "seqlens_kv": (4099,)}
    yield replace(large, name="large-chunked_prefill", attn_mask_type="causal_bottom_right", **chunk)
    thd = replace(large, qkv_format="thd", seqlens_q=(1, 1021, 2048, 127, 0), seqlens_kv=(1, 1021, 2048, 127, 0))
    yield replace(thd, name="large-thd", attn_mask_type="padding_causal")
    between = replace(thd, rows_q=(64, 1024, 2048, 128, 0), rows_kv=(64, 1024, 2048, 128, 0), tail=64)
    yield replace(between, name="large-thd-between", attn_mask_type="padding_causal")
