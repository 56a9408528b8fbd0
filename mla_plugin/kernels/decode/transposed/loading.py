"""The loading warp of the transposed decode kernel, and its copy of a key tile, which the wide kernel shares."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from mla_plugin.kernels.decode.hopper.common import piece_of, share_of_tiles
from mla_plugin.kernels.decode.transposed.common import KEYS, PANEL, PANELS, RANK, ROPE, STAGES


@gluon.jit
def begin_slot(full, empty, used, SLOTS: gl.constexpr):
    """Wait for the slot after ``used`` others to be free, let its barrier expect the bytes of a tile; returns it."""
    slot = used % SLOTS
    mbarrier.wait(empty.index(slot), (used // SLOTS & 1) ^ 1)
    mbarrier.expect(full.index(slot), KEYS * (RANK + ROPE))
    return slot


@gluon.jit
def load_tile(
    desc_c,
    desc_k,
    page_table,
    b,
    key,
    stride_pt,
    c_tiles,
    r_tiles,
    full,
    empty,
    used,
    PAGE_SIZE: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """Start to copy the tile of sequence ``b`` from ``key`` on to the slot after ``used`` others."""
    block, row = b, key
    if PAGE_SIZE > 0:
        block = gl.load(page_table + gl.cast(b, gl.int64) * stride_pt + key // PAGE_SIZE)
        row = key % PAGE_SIZE
    slot = begin_slot(full, empty, used, SLOTS)
    tma.async_copy_global_to_shared(desc_k, [block, row, 0], full.index(slot), r_tiles.index(slot))
    for panel in gl.static_range(PANELS):
        target = c_tiles.index(slot * PANELS + panel)
        tma.async_copy_global_to_shared(desc_c, [block, row, panel * PANEL], full.index(slot), target)


@gluon.jit
def load(
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
    PLANNED: gl.constexpr,
):
    """The loading warp: the key tiles of every piece of this program's part, in the order of the computing warps."""
    _q_tile, _r_tile, c_tiles, r_tiles, _p_tile = tiles
    full, empty = barriers
    part = gl.program_id(0)
    first_b, last_b, at, size = share_of_tiles(Plan, seqlens_kv, part, batch, capacity, num_parts, overhead, PLANNED)
    used = 0
    for b in range(first_b, last_b):
        at += overhead
        _, sequence_tiles, low, _, steps = piece_of(
            seqlens_kv, b, 0, at, size, part, batch, capacity, num_heads, seqlen_q, CAUSAL
        )
        for n in range(steps):
            # fmt: off
            load_tile(
                desc_c, desc_k, page_table, b, (low + n) * KEYS, stride_pt, c_tiles, r_tiles, full, empty, used,
                PAGE_SIZE, STAGES,
            )
            # fmt: on
            used += 1
        at += sequence_tiles
