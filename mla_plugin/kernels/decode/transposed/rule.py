"""Which decode calls the transposed kernel takes. Does not import Triton."""

from __future__ import annotations

import torch

from mla_plugin.arguments.cache_format import FP8
from mla_plugin.kernels.decode.hopper.rule import DTYPES, RANK, ROPE, TILE, lies_in_several_pages
from mla_plugin.kernels.decode.tiles import DecodeTile

MAX_ROWS = 32
FEW_ROWS = 16
"""With more rows the accumulators are twice as large, registers are spilled, and a tile takes longer.

So the other kernels are faster where TMA cannot load the pages, and in small batches (kernels/README.md).
"""
TILES_OF_A_PART = 3
"""A call with more rows than ``FEW_ROWS`` must have at least so many."""
TILES = DecodeTile(
    block_m=MAX_ROWS,
    block_n=TILE,
    num_warps=4,
    num_stages=2,
    paged_stages=2,
    gathered_stages=2,
    programs=2,
)
"""How work is divided. The kernel has two stages, and a multiprocessor runs two programs at a time."""


def tile_rows(rows: int) -> int:
    """Rows of the kernel's tile: those of a sequence, rounded up."""
    return FEW_ROWS if rows <= FEW_ROWS else MAX_ROWS


def other_kernel_because(
    dtype: torch.dtype,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    rows: int,
    page_size: int | None,
    *,
    kv_cache_format: str,
    has_leftpad_kv: bool,
    has_aligned_rows: bool,
    batch_invariant: bool,
) -> str | None:
    """Why another kernel computes such calls on a device that Gluon kernels run on; None: see ``takes``.

    Args:
        rows: (query, head) pairs of a sequence.
        dtype, kv_lora_rank and the others: as in ``DecodeRequest``.
    """
    if dtype not in DTYPES:
        return f"{dtype}, the transposed kernel needs bfloat16 or float16"
    if rows > MAX_ROWS:
        return f"{rows} (query, head) pairs of a sequence, the transposed kernel needs at most {MAX_ROWS}"
    if rows > FEW_ROWS and lies_in_several_pages(page_size):
        return (
            f"{rows} (query, head) pairs of a sequence with {page_size=}, the transposed kernel needs at most "
            f"{FEW_ROWS} or pages of a multiple of {TILE}"
        )
    # fmt: off
    return cache_reason(
        "transposed", kv_lora_rank, qk_rope_head_dim, kv_cache_format, has_leftpad_kv=has_leftpad_kv,
        has_aligned_rows=has_aligned_rows, batch_invariant=batch_invariant,
    )
    # fmt: on


def cache_reason(
    kernel: str,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    kv_cache_format: str,
    *,
    has_leftpad_kv: bool,
    has_aligned_rows: bool,
    batch_invariant: bool,
) -> str | None:
    """What the transposed and the wide ``kernel`` need alike: why it does not compute such calls, or None."""
    if kv_cache_format != FP8:
        return f"{kv_cache_format=}, the {kernel} kernel needs {FP8!r}"
    if (kv_lora_rank, qk_rope_head_dim) != (RANK, ROPE):
        widths = f"kv_lora_rank={kv_lora_rank}, qk_rope_head_dim={qk_rope_head_dim}"
        return f"{widths}, the {kernel} kernel needs {RANK} and {ROPE}"
    if has_leftpad_kv:
        return f"leftpad_kv, which the {kernel} kernel does not take"
    if batch_invariant:
        return f"batch_invariant=True, which the {kernel} kernel does not take"
    if not has_aligned_rows:
        return f"rows of the cache that do not start on 16 bytes, the {kernel} kernel needs them to"
    return None


def few_tiles_because(rows: int, tiles: int, processors: int) -> str | None:
    """Why another kernel computes calls of at most ``tiles`` key tiles; None: it does not."""
    parts = TILES.programs * processors
    if rows > FEW_ROWS and tiles < parts * TILES_OF_A_PART:
        return (
            f"{tiles} tiles of {TILE} keys in {parts} parts, the transposed kernel needs {TILES_OF_A_PART} in each "
            f"with more than {FEW_ROWS} (query, head) pairs of a sequence"
        )
    return None
