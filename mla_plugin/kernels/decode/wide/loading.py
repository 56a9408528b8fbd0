"""The loading warp of the wide decode kernel: the queries of each piece, then its key tiles, slot after slot."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_plugin.kernels.decode.hopper.common import copy_rows, piece_of, share_of_tiles
from mla_plugin.kernels.decode.transposed.common import KEYS, PANELS, ROPE
from mla_plugin.kernels.decode.transposed.loading import begin_slot, load_tile
from mla_plugin.kernels.decode.wide.common import QUERY_COLUMNS, STAGES, query_layout
from mla_plugin.kernels.hopper.common import ROWS, gdc_wait


@gluon.jit
def _load_queries(desc_q, desc_r, c_tiles, r_tiles, full, empty, used, b, row, num_heads):
    """Half of the columns in each of two slots."""
    OF_ROPE: gl.constexpr = ROPE // 2
    for half in gl.static_range(2):
        slot = begin_slot(full, empty, used + half, STAGES)
        for i in gl.static_range(PANELS):
            target = c_tiles.index(slot * PANELS + i)._reinterpret(
                gl.bfloat16, [1, ROWS, QUERY_COLUMNS], query_layout(QUERY_COLUMNS, 3)
            )
            copy_rows(desc_q, b, row, (half * PANELS + i) * QUERY_COLUMNS, num_heads, full.index(slot), target)
        target = r_tiles.index(slot)._reinterpret(gl.bfloat16, [1, ROWS, OF_ROPE], query_layout(OF_ROPE, 3))
        copy_rows(desc_r, b, row, half * OF_ROPE, num_heads, full.index(slot), target)


@gluon.jit
def load(
    desc_q,
    desc_r,
    desc_c,
    desc_k,
    page_table,
    seqlens_kv,
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
    DEPENDENT: gl.constexpr,
    PLANNED: gl.constexpr,
):
    """Queries and key tiles of every piece of this program's part, in the order of the computing warpgroups."""
    if DEPENDENT:
        gdc_wait()
    _q_tiles, _r_tiles_q, c_tiles, r_tiles, _p_tiles, _vectors, _largest, _sums = tiles
    full, empty, _published, _taken, _converted, _finished = barriers
    num_rows = seqlen_q * num_heads
    row_tiles = gl.cdiv(num_rows, ROWS)
    tile = gl.program_id(0) % row_tiles
    part = gl.program_id(0) // row_tiles
    first_b, last_b, at, size = share_of_tiles(Plan, seqlens_kv, part, batch, capacity, num_parts, overhead, PLANNED)
    used = 0
    for b in range(first_b, last_b):
        at += overhead
        _, sequence_tiles, low, _, steps = piece_of(
            seqlens_kv, b, tile, at, size, part, batch, capacity, num_heads, seqlen_q, CAUSAL
        )
        if steps > 0:
            _load_queries(desc_q, desc_r, c_tiles, r_tiles, full, empty, used, b, tile * ROWS, num_heads)
            used += 2
        for n in range(steps):
            # fmt: off
            load_tile(
                desc_c, desc_k, page_table, b, (low + n) * KEYS, stride_pt, c_tiles, r_tiles, full, empty, used,
                PAGE_SIZE, STAGES,
            )
            # fmt: on
            used += 1
        at += sequence_tiles
