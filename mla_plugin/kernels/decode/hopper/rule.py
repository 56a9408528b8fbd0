"""Which decode calls the Hopper kernel takes; all others run on the plain one. Does not import Triton."""

from __future__ import annotations

import torch

from mla_plugin.arguments.cache_format import FP8_DS_MLA, PLAIN
from mla_plugin.kernels.decode.tiles import tile_for

DTYPES = (torch.bfloat16, torch.float16)
RANK, ROPE = 512, 64
"""Columns of c_kv and of k_rope."""
TILE = 64
"""Keys of a tile, and rows of one."""


def lies_in_several_pages(page_size: int | None) -> bool:
    """Whether a key tile lies in several pages, so that TMA cannot load it."""
    return page_size is not None and page_size % TILE != 0


def must_gather(kv_cache_format: str, page_size: int | None) -> bool:
    """Whether TMA cannot load the key tiles: their bytes are converted, or they lie in several pages."""
    return kv_cache_format != PLAIN or lies_in_several_pages(page_size)


def plain_kernel_because(
    dtype: torch.dtype,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    rows: int,
    page_size: int | None,
    *,
    kv_cache_format: str = PLAIN,
    has_leftpad_kv: bool = False,
    has_aligned_rows: bool = True,
    batch_invariant: bool = False,
) -> str | None:
    """Why the plain kernel computes such calls on a device that Gluon kernels run on; None: see ``takes``.

    Args:
        rows: (query, head) pairs of a sequence; no matter with ``batch_invariant``.
        dtype, kv_lora_rank and the others: as in ``DecodeRequest``.
    """
    if dtype not in DTYPES:
        return f"{dtype}, the Hopper kernel needs bfloat16 or float16"
    if (kv_lora_rank, qk_rope_head_dim) != (RANK, ROPE):
        widths = f"kv_lora_rank={kv_lora_rank}, qk_rope_head_dim={qk_rope_head_dim}"
        return f"{widths}, the Hopper kernel needs {RANK} and {ROPE}"
    if has_leftpad_kv and not batch_invariant:
        return "leftpad_kv, which the Hopper kernel takes with batch_invariant=True alone"
    if kv_cache_format == FP8_DS_MLA and batch_invariant:
        return (
            f"batch_invariant=True with {kv_cache_format=}: for some page sizes the Hopper kernel is slower, and the "
            "page size must not decide about the kernel"
        )
    if kv_cache_format == FP8_DS_MLA and not lies_in_several_pages(page_size):
        return f"{kv_cache_format=} with {page_size=}, where the Hopper kernel is slower"
    if not has_aligned_rows:
        return "rows of the cache that do not start on 16 bytes, the Hopper kernel needs them to"
    tile = tile_for("Hopper", dtype.itemsize, RANK + ROPE, rows)
    if tile.block_m < TILE and not batch_invariant:
        return f"{rows} (query, head) pairs of a sequence, the Hopper kernel needs more than {tile.block_m}"
    return None
