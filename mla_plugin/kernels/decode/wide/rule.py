"""Which decode calls the wide kernel takes. Does not import Triton."""

from __future__ import annotations

import torch

from mla_plugin.arguments.cache_format import FP8
from mla_plugin.kernels.decode.hopper.rule import RANK, ROPE, TILE, lies_in_several_pages
from mla_plugin.kernels.decode.tiles import DecodeTile
from mla_plugin.kernels.decode.transposed.rule import MAX_ROWS

DTYPE = torch.bfloat16
"""Of queries. An element of float16 has more bits than two numbers of e4m3."""
TILES_OF_A_PART = 6
"""A call must have at least so many: converting a piece's queries takes as long as four tiles gain."""
TILES = DecodeTile(
    block_m=TILE,
    block_n=TILE,
    num_warps=8,
    num_stages=3,
    paged_stages=3,
    gathered_stages=3,
    programs=1,
)
"""How work is divided. The kernel has three slots for tiles, and a multiprocessor runs one program."""


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
    return_lse: bool,
) -> str | None:
    """Why another kernel computes such calls on a device that Gluon kernels run on; None: see ``takes``.

    Args:
        rows: (query, head) pairs of a sequence.
        dtype, kv_lora_rank and the others: as in ``DecodeRequest``.
    """
    if kv_cache_format != FP8:
        return f"{kv_cache_format=}, the wide kernel needs {FP8!r}"
    if dtype != DTYPE:
        return f"{dtype}, the wide kernel needs bfloat16"
    if (kv_lora_rank, qk_rope_head_dim) != (RANK, ROPE):
        widths = f"kv_lora_rank={kv_lora_rank}, qk_rope_head_dim={qk_rope_head_dim}"
        return f"{widths}, the wide kernel needs {RANK} and {ROPE}"
    if rows <= MAX_ROWS:
        return f"{rows} (query, head) pairs of a sequence, the wide kernel needs more than {MAX_ROWS}"
    if lies_in_several_pages(page_size):
        return f"{page_size=}, the wide kernel needs pages of a multiple of {TILE}"
    if has_leftpad_kv:
        return "leftpad_kv, which the wide kernel does not take"
    if batch_invariant:
        return "batch_invariant=True, which the wide kernel does not take"
    if return_lse:
        return "return_lse=True, the wide kernel multiplies in e4m3, which is too inexact for the log-sum-exp"
    if not has_aligned_rows:
        return "rows of the cache that do not start on 16 bytes, the wide kernel needs them to"
    return None


def few_tiles_because(rows: int, tiles: int, processors: int) -> str | None:
    """Why another kernel computes calls of at most ``tiles`` key tiles; None: it does not."""
    row_tiles = -(-rows // TILES.block_m)
    if tiles * row_tiles < processors * TILES_OF_A_PART:
        return (
            f"{tiles} tiles of {TILE} keys for {row_tiles} tiles of {TILES.block_m} (query, head) pairs, the wide "
            f"kernel needs {TILES_OF_A_PART} key tiles for each of {processors} multiprocessors"
        )
    return None
