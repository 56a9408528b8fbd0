"""The loading warp (producer) of the Hopper decode: the queries of each piece, and its key tiles, by TMA."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from mla_plugin.kernels.decode.hopper.common import copy_rows
from mla_plugin.kernels.decode.hopper.pieces import next_piece, share_of
from mla_plugin.kernels.hopper.common import PANEL, ROWS
from mla_plugin.kernels.hopper.latent import KEYS, PANELS, PANELS_OF_HALF


@gluon.jit
def _load_half(desc_c, desc_k, k_tiles, k_full, k_empty, block, row, free, stage: gl.constexpr, half: gl.constexpr):
    """Half of the columns of a key tile; the half with the stage's number comes with k_rope."""
    full = k_full.index(2 * stage + half)
    mbarrier.wait(k_empty.index(2 * stage + half), free)
    panels: gl.constexpr = PANELS_OF_HALF + 1 if half == stage else PANELS_OF_HALF
    mbarrier.expect(full, panels * KEYS * PANEL * 2)
    first: gl.constexpr = half * PANELS_OF_HALF
    for i in gl.static_range(PANELS_OF_HALF):
        target = k_tiles.index(stage * PANELS + first + i)
        tma.async_copy_global_to_shared(desc_c, [block, row, (first + i) * PANEL], full, target)
    if half == stage:
        target = k_tiles.index(stage * PANELS + PANELS - 1)
        tma.async_copy_global_to_shared(desc_k, [block, row, 0], full, target)


@gluon.jit
def _load_tile(desc_c, desc_k, k_tiles, k_full, k_empty, block, row, free, stage: gl.constexpr):
    """One key tile. The half of the stage's number first: the scores of the tile begin with it."""
    _load_half(desc_c, desc_k, k_tiles, k_full, k_empty, block, row, free, stage, stage)
    _load_half(desc_c, desc_k, k_tiles, k_full, k_empty, block, row, free, stage, 1 - stage)


@gluon.jit
def _place(pages, b, key, PAGE_SIZE: gl.constexpr):
    """(page, row in the page) of a tile; without pages (sequence, key)."""
    if PAGE_SIZE == 0:
        return b, key
    else:
        return gl.load(pages + key // PAGE_SIZE), key % PAGE_SIZE


@gluon.jit
def load_queries(desc_q, desc_r, q_tiles, q_full, q_empty, b, tile, num_heads, pieces):
    """The queries of a piece, after those of ``pieces`` others."""
    mbarrier.wait(q_empty.index(0), (pieces & 1) ^ 1)
    mbarrier.expect(q_full.index(0), PANELS * ROWS * PANEL * 2)
    for panel in gl.static_range(PANELS - 1):
        copy_rows(desc_q, b, tile * ROWS, panel * PANEL, num_heads, q_full.index(0), q_tiles.index(panel))
    copy_rows(desc_r, b, tile * ROWS, 0, num_heads, q_full.index(0), q_tiles.index(PANELS - 1))


@gluon.jit
def load(
    desc_q,
    desc_r,
    desc_c,
    desc_k,
    page_table,
    seqlens_kv,
    leftpad_kv,
    Plan,
    tiles,
    barriers,
    batch,
    num_heads,
    seqlen_q,
    capacity,
    num_parts,
    overhead,
    stride_pt,
    PAGE_SIZE: gl.constexpr,
    CAUSAL: gl.constexpr,
    CHUNK: gl.constexpr,
    PLANNED: gl.constexpr,
):
    """Loads the queries and key tiles of every piece of this program's part, in the order of the computing warps."""
    q_tiles, k_tiles, _p_tile, _maxima, _sums = tiles
    q_full, q_empty, k_full, k_empty, _published, _finished = barriers
    row_tiles = gl.cdiv(seqlen_q * num_heads, ROWS)
    tile = gl.program_id(0) % row_tiles
    part = gl.program_id(0) // row_tiles
    first_b, last_b, at, start, end = share_of(
        Plan, seqlens_kv, leftpad_kv, part, tile == 0, batch, capacity, num_parts, overhead, CHUNK, PLANNED
    )
    pieces = 0
    even = 0
    odd = 0
    for b in range(first_b, last_b):
        # fmt: off
        _, first, steps, at = next_piece(
            seqlens_kv, leftpad_kv, b, tile, at, start, end, part, batch, capacity, num_heads, seqlen_q, overhead,
            CAUSAL, CHUNK,
        )
        # fmt: on
        if steps > 0:
            load_queries(desc_q, desc_r, q_tiles, q_full, q_empty, b, tile, num_heads, pieces)
            pieces += 1
            pages = page_table
            if PAGE_SIZE > 0:
                pages = page_table + gl.cast(b, gl.int64) * stride_pt
            for pair in range((steps + 1) // 2):
                key = first + 2 * pair * KEYS
                block, row = _place(pages, b, key, PAGE_SIZE)
                _load_tile(desc_c, desc_k, k_tiles, k_full, k_empty, block, row, (even & 1) ^ 1, 0)
                even += 1
                if 2 * pair + 1 < steps:
                    block, row = _place(pages, b, key + KEYS, PAGE_SIZE)
                    _load_tile(desc_c, desc_k, k_tiles, k_full, k_empty, block, row, (odd & 1) ^ 1, 1)
                    odd += 1
