"""More hand-written cases: what kernels get wrong at the borders of tiles, packed sequences and widths.

Windows of W keys are (W - 1, 0), so that W is a multiple of a tile, not the side. Runs of empty sequences test
schedulers that look up a sequence by its tiles, and gaps test shortcuts for equal lengths. Widths are just above a
multiple of 16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from mla_plugin.conformance.attention.case import DTYPE_NAMES, Case

NARROW: dict[str, Any] = {"head_dim_qk": 24, "head_dim_v": 16}


def borders() -> Iterator[Case]:
    """All edge cases, with their dtypes in their names."""
    families = (
        _windows,
        _runs_of_empty_sequences,
        _equal_lengths,
        _widths,
        _many_programs,
        _no_sequences,
        _wide_tiles,
        _many_keys,
        _equal_sizes,
        _sums_over_tiles,
        _narrow_windows,
        _equal_offsets,
    )
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for index, case in enumerate(case for family in families for case in family()):
        dtype = dtypes[index % 3]
        yield _in_dtype(case, dtype)
    yield from _sums_of_many()


def _in_dtype(case: Case, dtype: torch.dtype) -> Case:
    return replace(case, name=f"{case.name}-{DTYPE_NAMES[dtype]}", dtype=dtype)


def _windows() -> Iterator[Case]:
    """Windows of whole tiles, and what is hidden or seen from a tile's border on."""
    few: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, **NARROW}
    tiles: dict[str, Any] = {"seqlens_q": (256,), "seqlens_kv": (384,), **few}
    for left, right, mask in ((63, 0, "causal_bottom_right"), (127, 63, "no_mask")):
        yield Case(f"window_{left}_{right}-whole_tiles", window_size=(left, right), attn_mask_type=mask, **tiles)
    packed: dict[str, Any] = {"qkv_format": "thd", "seqlens_q": (256, 64), "seqlens_kv": (256, 128), **few}
    yield Case("window_127-whole_tiles-thd", window_size=(127, 0), attn_mask_type="padding_causal", **packed)
    for mask in ("causal", "causal_bottom_right"):
        more: dict[str, Any] = {"seqlens_q": (256,), "seqlens_kv": (128,), "return_lse": True, **few}
        yield Case(f"lengths_256_128-{mask}", attn_mask_type=mask, **more)
    yield Case("lengths_384_128-window", window_size=(63, 64), **(more | {"seqlens_q": (384,)}))
    packed |= {"seqlens_q": (130, 9), "seqlens_kv": (600, 30), "attn_mask_type": "padding_causal_bottom_right"}
    yield Case("long-thd-deterministic", **packed, deterministic=True)
    yield Case("long-bhsd-deterministic", "bhsd", seqlens_q=(130,), seqlens_kv=(600,), deterministic=True, **few)
    widest: dict[str, Any] = {"window_size": (2**31 - 2, 5), "seqlens_q": (83,), "seqlens_kv": (41,)}
    yield Case("window_beyond_int32", **widest, **few)
    yield Case("window_beyond_int32-right", **(widest | {"window_size": (5, 2**31 - 2), "seqlens_kv": (141,)}), **few)


def _runs_of_empty_sequences() -> Iterator[Case]:
    """Empty sequences one after another, at the beginning and at the end too, of queries, of keys and of both."""
    lengths: dict[str, Any] = {"seqlens_q": (0, 0, 7, 0, 0, 70, 3, 0, 0), "seqlens_kv": (0, 0, 5, 0, 0, 66, 0, 0, 4)}
    for mask in ("padding", "padding_causal_bottom_right"):
        yield Case(f"thd-empty_runs-{mask}", "thd", attn_mask_type=mask, return_lse=True, **lengths, **NARROW)
    shared = {"seqlens_q": lengths["seqlens_q"], "seqlens_kv": lengths["seqlens_q"]}
    yield Case("thd-empty_runs-self", "thd", attn_mask_type="padding_causal", **shared, **NARROW)
    rows: dict[str, Any] = {"rows_q": (72,) * 9, "rows_kv": (70,) * 9}
    yield Case("bshd-empty_runs", attn_mask_type="padding", return_lse=True, **rows, **lengths, **NARROW)


def _equal_lengths() -> Iterator[Case]:
    """What shortcuts for sequences of one length, or for one tensor of offsets on both sides, must not take."""
    packed: dict[str, Any] = {"qkv_format": "thd", "attn_mask_type": "padding", **NARROW}
    one: dict[str, Any] = {"seqlens_q": (9,) * 3, "seqlens_kv": (9,) * 3}
    unlike: dict[str, Any] = {"rows_q": (12, 9, 14), "rows_kv": (9, 16, 10)}  # as many rows, so only the starts differ
    yield Case("thd-one_length-between", **packed, **one, **unlike)
    yield Case("thd-one_length-lead", **packed, **one, rows_q=(9,) * 3, rows_kv=(9,) * 3, lead=9, lead_kv=4, tail=9)
    some: dict[str, Any] = {"seqlens_q": (9, 5, 7), "seqlens_kv": (9, 5, 7)}
    yield Case("thd-one_tensor_of_lengths-between", **(packed | {"attn_mask_type": "padding_causal"}), **some, **unlike)
    yield Case("thd-rows_of_the_longest", **packed, **some, rows_q=(9,) * 3, rows_kv=(9,) * 3)
    longest: dict[str, Any] = {"seqlens_q": (9, 5, 7), "seqlens_kv": (3, 16, 8)}
    yield Case("thd-rows_of_the_longest-unequal", **packed, **longest, rows_q=(9,) * 3, rows_kv=(16,) * 3)


def _widths() -> Iterator[Case]:
    """Widths that no tile of 16, 32 or 64 columns ends with, above one of them."""
    short: dict[str, Any] = {"seqlens_q": (19, 19), "seqlens_kv": (35, 35), "return_lse": True}
    for dim_qk, dim_v in ((40, 24), (24, 40), (72, 104), (136, 200)):
        yield Case(f"head_dims_{dim_qk}_{dim_v}", head_dim_qk=dim_qk, head_dim_v=dim_v, **short)


def _many_programs() -> Iterator[Case]:
    """Sequences times heads by the thousand, and a bias whose gradient sums over all of them."""
    many: dict[str, Any] = {"seqlens_q": (2,) * 40, "seqlens_kv": (3,) * 40, "num_heads": 128, "num_kv_heads": 128}
    yield Case("batch_40-heads_128", head_dim_qk=8, head_dim_v=8, **many)
    for shape in ("11ss", "1hss"):
        summed: dict[str, Any] = {"bias_type": "post_scale_bias", "bias_shape": shape, "bias_requires_grad": True}
        summed |= {"seqlens_q": (9,) * 140, "seqlens_kv": (21,) * 140, "num_heads": 6, "num_kv_heads": 3}
        yield Case(f"bias_{shape}-batch_140", **summed, head_dim_qk=8, head_dim_v=8)


def _no_sequences() -> Iterator[Case]:
    """An empty batch, as the last part of a divided batch may be."""
    none: dict[str, Any] = {"seqlens_q": (), "seqlens_kv": (), "return_lse": True, **NARROW}
    for qkv_format, mask in (("bshd", "causal"), ("sbhd", "padding"), ("bhsd", "no_mask"), ("thd", "padding_causal")):
        yield Case(f"no_sequences-{qkv_format}", qkv_format, attn_mask_type=mask, **none)


def _wide_tiles() -> Iterator[Case]:
    """V wider than 256 over several tiles of keys: an accumulator in two parts, both of which are rescaled."""
    yield Case("head_dims_320_272-long", head_dim_qk=320, head_dim_v=272, seqlens_q=(9,), seqlens_kv=(333,))


def _many_keys() -> Iterator[Case]:
    """So many tiles of keys that sums over them in 16 bits show, in out and in dq."""
    many: dict[str, Any] = {"seqlens_q": (31,), "seqlens_kv": (33_000,), "num_heads": 1, "num_kv_heads": 1}
    for _ in range(3):  # in each dtype
        yield Case("keys_33000", head_dim_qk=16, head_dim_v=16, **many)


def _equal_sizes() -> Iterator[Case]:
    """As many sequences as heads, queries and keys, so that no size tells one dimension from another."""
    sizes: dict[str, Any] = {"seqlens_q": (8,) * 8, "seqlens_kv": (8,) * 8, "num_heads": 8, "num_kv_heads": 8}
    sizes |= {"return_lse": True, **NARROW}
    bias: dict[str, Any] = {"bias_requires_grad": True, **sizes}
    yield Case("equal_sizes-bias_ss", bias_type="post_scale_bias", bias_shape="ss", **bias)
    yield Case("equal_sizes-bias_hss", "sbhd", bias_type="pre_scale_bias", bias_shape="hss", **bias)
    yield Case("equal_sizes-bias_s", "bhsd", bias_type="post_scale_bias", bias_shape="s", **bias)
    for qkv_format, shape in (("bshd", "ss"), ("sbhd", "hss"), ("bhsd", "s"), ("bshd", "b1ss")):
        yield Case(f"equal_sizes-mask_{shape}", qkv_format, attn_mask_type="arbitrary", mask_shape=shape, **sizes)
    for qkv_format, mask in (("sbhd", "causal"), ("bhsd", "no_mask"), ("thd", "padding_causal")):
        yield Case(f"equal_sizes-{qkv_format}", qkv_format, attn_mask_type=mask, **sizes)


def _sums_over_tiles() -> Iterator[Case]:
    """Biases whose gradients sum over more queries, or keys, than a tile holds."""
    long: dict[str, Any] = {"seqlens_q": (290, 290), "seqlens_kv": (310, 310), "num_heads": 2, "num_kv_heads": 1}
    for bias_type, shape in (("post_scale_bias", "111s"), ("pre_scale_bias", "bh1s"), ("post_scale_bias", "1hs1")):
        bias: dict[str, Any] = {"bias_type": bias_type, "bias_shape": shape, "bias_requires_grad": True}
        yield Case(f"bias_{shape}-long", **bias, **long, **NARROW)


def _narrow_windows() -> Iterator[Case]:
    """Windows that reach one key beyond the border of a tile, whatever power of two that is, on either side."""
    few: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "return_lse": True, **NARROW}
    long: dict[str, Any] = {"seqlens_q": (290,), "seqlens_kv": (290,), **few}
    yield Case("window_1_0-long", attn_mask_type="causal", window_size=(1, 0), **long)
    yield Case("window_0_1-long", "sbhd", window_size=(0, 1), **long)
    yield Case("window_129_1-long", "bhsd", window_size=(129, 1), **long)
    packed: dict[str, Any] = {"seqlens_q": (70, 200, 9), "seqlens_kv": (70, 328, 9), **few}
    yield Case("window_1_0-long-thd", "thd", attn_mask_type="padding_causal_bottom_right", window_size=(1, 0), **packed)
    yield Case("window_1_1-long-thd", "thd", attn_mask_type="padding", window_size=(1, 1), **packed)


def _equal_offsets() -> Iterator[Case]:
    """Offsets that are equal are one tensor: of queries, of keys, of the rows of both, of all but the keys."""
    packed: dict[str, Any] = {"qkv_format": "thd", "attn_mask_type": "padding", **NARROW}
    for name, lengths_q, rows_q, rows_kv in (
        ("every_row", (9, 9), (9, 9), (9, 9)),
        ("queries", (9, 9), (9, 9), (9, 8)),
        ("keys", (9, 4), (12, 9), (5, 7)),
        ("rows", (7, 9), (9, 9), (9, 9)),
    ):
        given: dict[str, Any] = {"seqlens_q": lengths_q, "seqlens_kv": (5, 7), "rows_q": rows_q, "rows_kv": rows_kv}
        yield Case(f"thd-one_tensor_of_{name}", **packed, **given)


def _sums_of_many() -> Iterator[Case]:
    """Sums whose roundings, small terms or order show in many of them alone, each in the dtype where it shows best."""
    few: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1}
    batch: dict[str, Any] = {"seqlens_q": (8,) * 520, "seqlens_kv": (9,) * 520, "head_dim_qk": 8, "head_dim_v": 8}
    batch |= {"bias_type": "post_scale_bias", "bias_shape": "11ss", "bias_requires_grad": True}
    yield _in_dtype(Case("bias_11ss-batch_520", **batch, **few), torch.bfloat16)
    few |= NARROW
    falling: dict[str, Any] = {"scores": "falling", "seqlens_q": (4,), "seqlens_kv": (2048,), "return_lse": True, **few}
    yield _in_dtype(Case("scores_falling", **falling), torch.float32)
    order: dict[str, Any] = {"deterministic": True, "seqlens_q": (700,), "seqlens_kv": (100,), **few}
    yield _in_dtype(Case("deterministic-queries_700", **order), torch.float32)
