"""Queries of the wide decode kernel: from bfloat16, as TMA copies them, to two terms in e4m3.

bfloat16 has 8 significant bits and e4m3 has 4, so an element is the sum of its e4m3 rounding and of the rest in e4m3,
exactly if its last bit is at least 2^-9, e4m3's smallest positive number. ``row_factor`` brings a row's largest number
to at least 2^E4M3_TOP, 2^7: elements down to 2^-9 of it are exact, and no error exceeds 2^-17 of it. The lower terms
are not scaled as those of the transposed kernel: the products by both terms are added in one accumulator.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mla_plugin.kernels.decode.hopper.common import nonzero_scale, row_factor
from mla_plugin.kernels.decode.transposed.common import E4M3, E4M3_TOP, PANEL, PANELS, ROPE, panel_layout
from mla_plugin.kernels.decode.wide.common import BLOCK, BLOCKS, QUERY_COLUMNS, SCALE, STAGES, VECTOR, query_layout
from mla_plugin.kernels.hopper.common import synchronize
from mla_plugin.kernels.hopper.latent import HALF

_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_ROWS = gl.constexpr(gl.SliceLayout(1, _LAYOUT))


@gluon.jit
def _pair(copied, slot, pair: gl.constexpr, block):
    """BLOCK rows of two panels of queries, [BLOCK, 2 * QUERY_COLUMNS] in float32."""
    panels = copied.index(0)._reinterpret(
        gl.bfloat16, [STAGES * PANELS * BLOCKS, BLOCK, QUERY_COLUMNS], query_layout(QUERY_COLUMNS, 2)
    )
    first = (slot * PANELS + 2 * pair) * BLOCKS + block
    x = gl.join(panels.index(first).load(_LAYOUT), panels.index(first + BLOCKS).load(_LAYOUT))
    return x.permute((0, 2, 1)).reshape([BLOCK, 2 * QUERY_COLUMNS]).to(gl.float32)


@gluon.jit
def _rope(copied, first_slot, second_slot, block):
    """BLOCK rows of the queries' rope columns, half of which are in each slot: [BLOCK, ROPE] in float32."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    halves = copied.index(0)._reinterpret(gl.bfloat16, [STAGES * BLOCKS, BLOCK, ROPE // 2], query_layout(ROPE // 2, 2))
    first = halves.index(first_slot * BLOCKS + block).load(layout)
    x = gl.join(first, halves.index(second_slot * BLOCKS + block).load(layout))
    return x.permute((0, 2, 1)).reshape([BLOCK, ROPE]).to(gl.float32)


@gluon.jit
def _largest(x):
    return gl.convert_layout(gl.max(gl.abs(x), 1), _ROWS)


@gluon.jit
def _store_terms(panels, panel, distance, x, factor, block):
    """Both terms of x, times the rows' factor, to BLOCK rows of a panel and of the one ``distance`` panels on."""
    COLUMNS: gl.constexpr = panels.shape[2]
    x *= gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None]
    blocks = panels.index(0)._reinterpret(E4M3, [panels.shape[0] * BLOCKS, BLOCK, COLUMNS], panel_layout(COLUMNS))
    high = x.to(E4M3)
    blocks.index(panel * BLOCKS + block).store(high)
    blocks.index((panel + distance) * BLOCKS + block).store((x - high.to(gl.float32)).to(E4M3))


@gluon.jit
def convert_queries(tiles, barriers, used, scale_log2, which: gl.constexpr):
    """Convert the queries of a piece, which the slots ``used`` and ``used + 1`` hold, and release these.

    Each warpgroup converts its half of the columns, warpgroup 1 those of q_rope too. Warpgroup 0 writes the factor of
    the scores of each row to ``vectors[SCALE]`` when both have written ``largest``, so that the other one has read that
    of the previous piece.
    """
    q_tiles, r_tiles_q, c_tiles, r_tiles, _p_tiles, vectors, largest, _sums = tiles
    full, empty, _published, _taken, converted, _finished = barriers
    first, second = used % STAGES, (used + 1) % STAGES
    own = second if which == 1 else first
    mbarrier.wait(full.index(first), used // STAGES & 1)
    mbarrier.wait(full.index(second), (used + 1) // STAGES & 1)
    for block in range(BLOCKS):
        found = gl.maximum(_largest(_pair(c_tiles, own, 0, block)), _largest(_pair(c_tiles, own, 1, block)))
        if which == 1:
            found = gl.maximum(found, _largest(_rope(r_tiles, first, second, block)))
        largest.index(which * BLOCKS + block).store(found)
    synchronize()
    mbarrier.arrive(converted.index(0))
    mbarrier.wait(converted.index(0), 0)
    for block in range(BLOCKS):
        found = largest.index(block).load(_ROWS)
        found = gl.maximum(found, largest.index(BLOCKS + block).load(_ROWS))
        factor, inverse = row_factor(found, E4M3_TOP)
        if which == 0:
            scales = vectors.index(SCALE)._reinterpret(gl.float32, [BLOCKS, BLOCK], VECTOR)
            scales.index(block).store(nonzero_scale(inverse * scale_log2))
        for pair in gl.static_range(HALF // PANEL):
            panel = which * (HALF // PANEL) + pair
            _store_terms(q_tiles, panel, PANELS, _pair(c_tiles, own, pair, block), factor, block)
        if which == 1:
            _store_terms(r_tiles_q, 0, 1, _rope(r_tiles, first, second, block), factor, block)
    fence_async_shared()
    synchronize()
    mbarrier.arrive(empty.index(first))
    mbarrier.arrive(empty.index(second))
    mbarrier.arrive(converted.index(0))
    mbarrier.wait(converted.index(0), 1)
