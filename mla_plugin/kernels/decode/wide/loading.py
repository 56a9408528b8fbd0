"""The loading warp of the wide decode kernel: the queries of each piece, then its key tiles, slot after slot."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from mla_plugin.kernels.decode.hopper.common import piece_of, share_of_tiles
from mla_plugin.kernels.decode.transposed.common import KEYS, PANEL, PANELS, RANK, ROPE
from mla_plugin.kernels.decode.wide.common import ROWS, STAGES
from mla_plugin.kernels.hopper.common import gdc_wait

_COLUMNS = gl.constexpr(64)
"""Of a panel of queries in bfloat16, which takes as many bytes as one of a key tile; half as many of q_rope's."""


@gluon.jit
def _begin(full, empty, used):
    """Wait until a slot is free; returns it and its barrier, which expects as many bytes for queries as for keys."""
    slot = used % STAGES
    mbarrier.wait(empty.index(slot), (used // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(slot), KEYS * (RANK + ROPE))
    return slot


@gluon.jit
def _load_queries(desc_q, desc_r, c_tiles, r_tiles, full, empty, used, b, row):
    """Half of the columns in each of two slots."""
    of_c: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    of_r: gl.constexpr = gl.NVMMASharedLayout(64, 16, 3)
    for half in gl.static_range(2):
        slot = _begin(full, empty, used + half)
        for i in gl.static_range(PANELS):
            target = c_tiles.index(slot * PANELS + i)._reinterpret(gl.bfloat16, [1, ROWS, _COLUMNS], of_c)
            at = [b, row, (half * PANELS + i) * _COLUMNS]
            tma.async_copy_global_to_shared(desc_q, at, full.index(slot), target)
        target = r_tiles.index(slot)._reinterpret(gl.bfloat16, [1, ROWS, _COLUMNS // 2], of_r)
        tma.async_copy_global_to_shared(desc_r, [b, row, half * (_COLUMNS // 2)], full.index(slot), target)


@gluon.jit
def load(
    desc_q,
    desc_r,
    desc_c,
    desc_k,
    page_table,
    seqlens_kv,
    Parts,
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
    first_b, last_b, at, size = share_of_tiles(
        Parts, seqlens_kv, part, batch, capacity, num_parts, overhead, num_rows, RANK, PLANNED
    )
    used = 0
    for b in range(first_b, last_b):
        at += overhead
        _, sequence_tiles, low, _, steps = piece_of(
            seqlens_kv, b, tile, at, size, part, batch, capacity, num_heads, seqlen_q, CAUSAL
        )
        if steps > 0:
            _load_queries(desc_q, desc_r, c_tiles, r_tiles, full, empty, used, b, tile * ROWS)
            used += 2
        for n in range(steps):
            key = (low + n) * KEYS
            block, row = b, key
            if PAGE_SIZE > 0:
                block = gl.load(page_table + gl.cast(b, gl.int64) * stride_pt + key // PAGE_SIZE)
                row = key % PAGE_SIZE
            slot = _begin(full, empty, used)
            tma.async_copy_global_to_shared(desc_k, [block, row, 0], full.index(slot), r_tiles.index(slot))
            for panel in gl.static_range(PANELS):
                target = c_tiles.index(slot * PANELS + panel)
                tma.async_copy_global_to_shared(desc_c, [block, row, panel * PANEL], full.index(slot), target)
            used += 1
        at += sequence_tiles
