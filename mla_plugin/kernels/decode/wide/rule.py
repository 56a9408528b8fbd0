"""Which decode calls the wide kernel takes. Does not import Triton."""

from __future__ import annotations

import torch

from mla_plugin.kernels.decode.hopper.rule import TILE, lies_in_several_pages
from mla_plugin.kernels.decode.tiles import DecodeTile
from mla_plugin.kernels.decode.transposed.rule import MAX_ROWS, cache_reason

DTYPE = torch.bfloat16
"""Of queries. An element of float16 has more bits than two numbers of e4m3."""
SLOTS = 3
"""Key tiles in shared memory."""
TILES_OF_A_PART = 6
"""Key tiles that a program must have on average: the start of a piece costs what they save (kernels/README.md)."""
TILES = DecodeTile(
    block_m=TILE,
    block_n=TILE,
    num_warps=4,
    num_stages=SLOTS,
    paged_stages=SLOTS,
    gathered_stages=SLOTS,
    programs=1,
)
"""How work is divided. A multiprocessor runs one program."""


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
    if dtype != DTYPE:
        return f"{dtype}, the wide kernel needs bfloat16"
    if rows <= MAX_ROWS:
        return f"{rows} (query, head) pairs of a sequence, the wide kernel needs more than {MAX_ROWS}"
    if lies_in_several_pages(page_size):
        return f"{page_size=}, the wide kernel needs pages of a multiple of {TILE}"
    if return_lse:
        return "return_lse=True, the wide kernel multiplies in e4m3, which is too inexact for the log-sum-exp"
    # fmt: off
    return cache_reason(
        "wide", kv_lora_rank, qk_rope_head_dim, kv_cache_format, has_leftpad_kv=has_leftpad_kv,
        has_aligned_rows=has_aligned_rows, batch_invariant=batch_invariant,
    )
    # fmt: on


def few_tiles_because(rows: int, tiles: int, processors: int) -> str | None:
    """Why another kernel computes calls whose caches have room for ``tiles`` key tiles in all; None: it does not.

    Args:
        rows: (query, head) pairs of a sequence.
        processors: of the GPU.
    """
    row_tiles = -(-rows // TILES.block_m)
    if tiles * row_tiles < processors * TILES_OF_A_PART:
        return (
            f"{tiles} tiles of {TILE} keys for {row_tiles} tiles of {TILES.block_m} (query, head) pairs, the wide "
            f"kernel needs {TILES_OF_A_PART} key tiles for each of {processors} multiprocessors"
        )
    return None
