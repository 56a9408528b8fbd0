"""The loading warps (producers) of the Hopper backward: take tickets, publish their records, load tiles by TMA."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mla_plugin.kernels.hopper.common import PANEL, ROWS, STAGES, WIDE_STAGES, kv_tiles, query_tiles
from mla_plugin.kernels.hopper.loading import next_ticket, publish, sequence_of, work_of
from mla_plugin.kernels.hopper.panels import copy_tile

LOADERS = gl.constexpr(33)
"""Arrivals at the barrier of a tile with lse or delta: one for TMA, and one of each thread of the loading warp."""


@gluon.jit
def _copy_values(values, first, num_rows, is_full, tile):
    """Copy 64 float32, except those from ``num_rows`` on; every thread of the warp arrives when its copies are done.

    Not by TMA, which needs addresses that are multiples of 16 bytes: a sequence may begin at any row.
    """
    rows = first + gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [1], [0]))
    async_copy.async_copy_global_to_shared(tile, values + rows, mask=rows < num_rows)
    async_copy.mbarrier_arrive(is_full, increment_count=False)


@gluon.jit
def load_kv(
    Q,
    K,
    V,
    DOut,
    Lse,
    Delta,
    tiles,
    barriers,
    Work,
    cu_seqlens_q,
    cu_seqlens_kv,
    cu_seqlens_q_padded,
    cu_seqlens_kv_padded,
    num_tiles,
    num_tickets,
    num_heads,
    group,
    together,
    stride_lb,
    stride_lh,
    max_seqlen_q,
    max_seqlen_kv,
    window_left,
    window_right,
    QK_PANELS: gl.constexpr,
    V_PANELS: gl.constexpr,
    WIDE: gl.constexpr,
    DYNAMIC: gl.constexpr,
    PACKED: gl.constexpr,
    HAS_LENGTHS: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """The loading warp: takes tickets, publishes their records and loads their tiles."""
    owners: gl.constexpr = 1 if WIDE else 2
    stages: gl.constexpr = WIDE_STAGES if WIDE else STAGES
    q_tiles, d_tiles, k_tiles, v_tiles, lse_tiles, delta_tiles, records = tiles
    r_full, r_empty, kv_full, kv_empty, q_full, q_empty, d_full, d_empty = barriers
    if PACKED:
        num_tickets = gl.load(Work + 1) * num_heads
    ticket = gl.program_id(0)
    record = 0
    tile = 0
    step = 0
    while ticket < num_tickets:
        n, b, kv_head = work_of(ticket, Work, num_tiles, num_heads, together, PACKED)
        start_q, seqlen_q = sequence_of(b, cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q, PACKED, HAS_LENGTHS)
        start_kv, seqlen_kv = sequence_of(b, cu_seqlens_kv, cu_seqlens_kv_padded, max_seqlen_kv, PACKED, HAS_LENGTHS)
        if PACKED:
            num_tiles = gl.cdiv(seqlen_kv, owners * ROWS)
        start_n = (num_tiles - 1 - n) * owners * ROWS  # under a causal mask the first keys are seen by most queries
        publish(records, record, r_full, r_empty, start_n, b, kv_head, start_kv, seqlen_q, seqlen_kv)
        record += 1
        first, _, _, last, _, _ = query_tiles(
            start_n, seqlen_q, seqlen_kv, window_left, window_right, owners * ROWS, BOTTOM_RIGHT, HAS_LEFT, HAS_RIGHT
        )
        row = b
        if PACKED:
            row = 0
        if last > first:
            if WIDE:  # K is the first warpgroup's, V the second's
                mbarrier.wait(kv_empty.index(0), (tile & 1) ^ 1)
                mbarrier.expect(kv_full.index(0), ROWS * QK_PANELS * PANEL * 2)
                copy_tile(K, row, kv_head, start_kv + start_n, kv_full.index(0), k_tiles, 0, QK_PANELS)
                mbarrier.wait(kv_empty.index(1), (tile & 1) ^ 1)
                mbarrier.expect(kv_full.index(1), ROWS * V_PANELS * PANEL * 2)
                copy_tile(V, row, kv_head, start_kv + start_n, kv_full.index(1), v_tiles, 0, V_PANELS)
            else:
                for w in gl.static_range(2):
                    mbarrier.wait(kv_empty.index(w), (tile & 1) ^ 1)
                    mbarrier.expect(kv_full.index(w), ROWS * (QK_PANELS + V_PANELS) * PANEL * 2)
                    at = start_kv + start_n + w * ROWS
                    copy_tile(K, row, kv_head, at, kv_full.index(w), k_tiles, w * QK_PANELS, QK_PANELS)
                    copy_tile(V, row, kv_head, at, kv_full.index(w), v_tiles, w * V_PANELS, V_PANELS)
            tile += 1
            for g in range(group):
                head = kv_head * group + g
                values = b.to(gl.int64) * stride_lb + head.to(gl.int64) * stride_lh + start_q
                for m in range(first, last):
                    stage = step % stages
                    is_free = (step // stages & 1) ^ 1
                    at = start_q + m * ROWS
                    mbarrier.wait(q_empty.index(stage), is_free)
                    mbarrier.expect(q_full.index(stage), ROWS * QK_PANELS * PANEL * 2)
                    copy_tile(Q, row, head, at, q_full.index(stage), q_tiles, stage * QK_PANELS, QK_PANELS)
                    _copy_values(Lse + values, m * ROWS, seqlen_q, q_full.index(stage), lse_tiles.index(stage))
                    mbarrier.wait(d_empty.index(stage), is_free)
                    mbarrier.expect(d_full.index(stage), ROWS * V_PANELS * PANEL * 2)
                    copy_tile(DOut, row, head, at, d_full.index(stage), d_tiles, stage * V_PANELS, V_PANELS)
                    _copy_values(Delta + values, m * ROWS, seqlen_q, d_full.index(stage), delta_tiles.index(stage))
                    step += 1
        ticket = next_ticket(ticket, Work, num_tickets, DYNAMIC)
    publish(records, record, r_full, r_empty, -1, 0, 0, 0, 0, 0)


@gluon.jit
def load_q(
    Q,
    K,
    V,
    DOut,
    tiles,
    barriers,
    Work,
    cu_seqlens_q,
    cu_seqlens_kv,
    cu_seqlens_q_padded,
    cu_seqlens_kv_padded,
    num_tiles,
    num_tickets,
    num_heads,
    group,
    together,
    max_seqlen_q,
    max_seqlen_kv,
    window_left,
    window_right,
    QK_PANELS: gl.constexpr,
    V_PANELS: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    DYNAMIC: gl.constexpr,
    PACKED: gl.constexpr,
    HAS_LENGTHS: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """The loading warp: takes tickets, publishes their records and loads their tiles."""
    q_tiles, d_tiles, k_tiles, v_tiles, records = tiles
    r_full, r_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    if PACKED:
        num_tickets = gl.load(Work + 1) * num_heads
    ticket = gl.program_id(0)
    record = 0
    tile = 0
    step = 0
    while ticket < num_tickets:
        m, b, head = work_of(ticket, Work, num_tiles, num_heads, together, PACKED)
        start_m = m * 2 * ROWS
        start_q, seqlen_q = sequence_of(b, cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q, PACKED, HAS_LENGTHS)
        start_kv, seqlen_kv = sequence_of(b, cu_seqlens_kv, cu_seqlens_kv_padded, max_seqlen_kv, PACKED, HAS_LENGTHS)
        publish(records, record, r_full, r_empty, start_m, b, head, start_q, seqlen_q, seqlen_kv)
        record += 1
        last, _, _, first = kv_tiles(
            start_m, seqlen_q, seqlen_kv, window_left, window_right, ROWS, BOTTOM_RIGHT, HAS_LEFT, HAS_RIGHT
        )
        row = b
        if PACKED:
            row = 0
        if last > first:
            for w in gl.static_range(2):
                mbarrier.wait(q_empty.index(w), (tile & 1) ^ 1)
                mbarrier.expect(q_full.index(w), ROWS * (QK_PANELS + V_PANELS) * PANEL * 2)
                at = start_q + start_m + w * ROWS
                copy_tile(Q, row, head, at, q_full.index(w), q_tiles, w * QK_PANELS, QK_PANELS)
                copy_tile(DOut, row, head, at, q_full.index(w), d_tiles, w * V_PANELS, V_PANELS)
            tile += 1
        kv_head = head // group
        for n in range(last - first):
            stage = step % K_STAGES
            at = start_kv + (last - 1 - n) * ROWS
            mbarrier.wait(k_empty.index(stage), (step // K_STAGES & 1) ^ 1)
            mbarrier.expect(k_full.index(stage), ROWS * QK_PANELS * PANEL * 2)
            copy_tile(K, row, kv_head, at, k_full.index(stage), k_tiles, stage * QK_PANELS, QK_PANELS)
            stage = step % V_STAGES
            mbarrier.wait(v_empty.index(stage), (step // V_STAGES & 1) ^ 1)
            mbarrier.expect(v_full.index(stage), ROWS * V_PANELS * PANEL * 2)
            copy_tile(V, row, kv_head, at, v_full.index(stage), v_tiles, stage * V_PANELS, V_PANELS)
            step += 1
        ticket = next_ticket(ticket, Work, num_tickets, DYNAMIC)
    publish(records, record, r_full, r_empty, -1, 0, 0, 0, 0, 0)
