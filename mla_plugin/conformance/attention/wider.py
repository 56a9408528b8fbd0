"""More hand-written cases: sizes beyond those of the other edges, each beside what a kernel for such sizes has to know.

The dtypes come by turns, so that a size that one of them lacks has a case in ``drawn`` at least.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from mla_plugin.conformance.attention.case import DTYPE_NAMES, Case

_NARROW: dict[str, Any] = {"head_dim_qk": 24, "head_dim_v": 16}
_ONE: dict[str, Any] = {"num_heads": 1, "num_kv_heads": 1}
_TINY: dict[str, Any] = {"head_dim_qk": 8, "head_dim_v": 8}


def wider() -> Iterator[Case]:
    """All of them, with their dtypes in their names."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    families = (_sequences, _keys, _heads, _latents)
    for index, case in enumerate(case for family in families for case in family()):
        dtype = dtypes[index % 3] if case.dtype == torch.float32 else case.dtype
        yield replace(case, name=f"{case.name}-{DTYPE_NAMES[dtype]}", dtype=dtype)


def _sequences() -> Iterator[Case]:
    """As many sequences as a warp has threads, or one less; dozens with several tiles, with gaps, deterministic."""
    packed: dict[str, Any] = {"qkv_format": "thd", "attn_mask_type": "padding", **_NARROW}
    yield Case("batch_31-thd", seqlens_q=(5,) * 31, seqlens_kv=(9,) * 31, **packed, **_ONE)
    yield Case("batch_32-thd", seqlens_q=(5, 3) * 16, seqlens_kv=(9, 7) * 16, return_lse=True, **packed, **_ONE)
    yield Case("batch_32-bhsd", "bhsd", seqlens_q=(5,) * 32, seqlens_kv=(9,) * 32, **_NARROW, **_ONE)
    tiles: dict[str, Any] = packed | _TINY | _ONE | {"attn_mask_type": "padding_causal"}
    yield Case("batch_40-tiles-thd", seqlens_q=(70, 1, 130, 9) * 10, seqlens_kv=(70, 3, 130, 40) * 10, **tiles)
    grouped: dict[str, Any] = packed | {
        "attn_mask_type": "padding_causal_bottom_right",
        "num_heads": 4,
        "num_kv_heads": 2,
    }
    grouped |= {"seqlens_q": (9, 31), "seqlens_kv": (40, 50), "rows_q": (12, 33), "rows_kv": (41, 55)}
    yield Case("heads_4_2-causal_bottom_right-between", **grouped)
    gaps: dict[str, Any] = {"rows_q": (4, 1, 2) * 4, "rows_kv": (5, 2, 6) * 4}
    yield Case("batch_12-between", seqlens_q=(3, 0, 2) * 4, seqlens_kv=(5, 1, 2) * 4, **gaps, **packed)
    for qkv_format, mask in (("bshd", "no_mask"), ("thd", "padding")):
        many: dict[str, Any] = {"seqlens_q": (5,) * 18, "seqlens_kv": (9,) * 18, "attn_mask_type": mask, **_NARROW}
        yield Case(f"batch_18-deterministic-{qkv_format}", qkv_format, deterministic=True, **many)


def _keys() -> Iterator[Case]:
    """More keys than a tile beside gaps, biases, masks, wide windows and heads that share one of the keys'."""
    packed: dict[str, Any] = {"qkv_format": "thd", "attn_mask_type": "padding", **_NARROW}
    rows: dict[str, Any] = {"rows_q": (33, 9), "rows_kv": (610, 41)}
    yield Case("keys_600-between", seqlens_q=(30, 9), seqlens_kv=(600, 40), **rows, **packed)
    yield Case("window_1100-thd", window_size=(1100, 3), seqlens_q=(20,), seqlens_kv=(2300,), **packed, **_ONE)
    yield Case("window_1100", window_size=(1100, 3), seqlens_q=(20,), seqlens_kv=(1500,), **_NARROW, **_ONE)
    longer: dict[str, Any] = {"seqlens_q": (20,), "seqlens_kv": (600,), **_NARROW}
    yield Case("keys_600-sbhd-bias", "sbhd", bias_type="post_scale_bias", bias_requires_grad=True, **longer)
    yield Case("keys_600-mask", dtype=torch.float16, attn_mask_type="arbitrary", mask_shape="bhss", **longer)
    yield Case("keys_1100-thd", seqlens_q=(20,), seqlens_kv=(1100,), **packed)
    square: dict[str, Any] = {"attn_mask_type": "causal", "seqlens_q": (600,), "seqlens_kv": (600,)}
    yield Case("lengths_600_600", **square, **_TINY, **_ONE)
    shared: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 1, "attn_mask_type": "causal_bottom_right", **_TINY}
    yield Case("heads_8_1-lengths_130_200", seqlens_q=(130,), seqlens_kv=(200,), **shared)


def _heads() -> Iterator[Case]:
    """Numbers of heads, of a group and widths that models have and the other edges do not."""
    short: dict[str, Any] = {"seqlens_q": (9, 9), "seqlens_kv": (33, 33)}
    for heads, kv_heads in ((32, 8), (7, 7), (12, 2), (14, 2), (96, 96), (10, 2)):
        yield Case(f"heads_{heads}_{kv_heads}", num_heads=heads, num_kv_heads=kv_heads, **short, **_NARROW)
    for dim_qk, dim_v in ((64, 64), (192, 192), (32, 32), (96, 96), (160, 128), (128, 64)):
        dims: dict[str, Any] = {"head_dim_qk": dim_qk, "head_dim_v": dim_v, "seqlens_q": (19,), "seqlens_kv": (35,)}
        yield Case(f"head_dims_{dim_qk}_{dim_v}", **dims)
    mla: dict[str, Any] = {"qkv_format": "thd", "attn_mask_type": "padding_causal_bottom_right", **_ONE}
    yield Case("keys_1100-head_dims_192_128-thd", seqlens_q=(9,), seqlens_kv=(1100,), **mla)


def _latents() -> Iterator[Case]:
    """Attention over latents, of the widest heads: causal, packed, with a window, in each dtype."""
    wide: dict[str, Any] = {"head_dim_qk": 576, "head_dim_v": 512, "num_heads": 2, "num_kv_heads": 1}
    causal: dict[str, Any] = {"qkv_format": "thd", "attn_mask_type": "padding_causal", **wide}
    yield Case("latents-causal-thd", seqlens_q=(9, 5), seqlens_kv=(20, 5), **causal)
    yield Case("latents-window", window_size=(5, 3), seqlens_q=(9,), seqlens_kv=(20,), **wide)
    yield Case("latents", seqlens_q=(9,), seqlens_kv=(20,), return_lse=True, **wide)
    yield Case("latents-causal", "bhsd", attn_mask_type="causal", seqlens_q=(9,), seqlens_kv=(20,), **wide)
    yield Case("latents-window-thd", window_size=(4, 0), seqlens_q=(9, 5), seqlens_kv=(20, 5), **causal)
