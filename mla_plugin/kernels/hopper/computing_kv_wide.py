"""The computing warpgroups of the Hopper kernel of dK and dV where dK and dV do not fit one warpgroup's registers.

Both have the same 64 keys: the first computes P and dV and sends P, the second receives P and computes dS and dK.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from mla_plugin.kernels.hopper.common import (
    FIELDS,
    PANEL,
    RECORDS,
    ROWS,
    WIDE_STAGES,
    columns_of,
    product_layout,
    query_tiles,
    read_record,
    synchronize,
)
from mla_plugin.kernels.hopper.computing_kv import mask_ends, read_values, store_keys, weights
from mla_plugin.kernels.hopper.panels import add_transposed, operand
from mla_plugin.kernels.tile_math import LOG2_E


@gluon.jit
def _send(p, exchange, step):
    """Send P of a step to the other warpgroup."""
    p_tiles, p_full, p_empty = exchange
    slot = step % WIDE_STAGES
    mbarrier.wait(p_empty.index(slot), (step // WIDE_STAGES & 1) ^ 1)
    p_tiles.index(slot).store(p)
    synchronize()
    mbarrier.arrive(p_full.index(slot))


@gluon.jit
def _receive(exchange, step):
    """Receive P of a step from the other warpgroup."""
    p_tiles, p_full, p_empty = exchange
    slot = step % WIDE_STAGES
    mbarrier.wait(p_full.index(slot), step // WIDE_STAGES & 1)
    p = p_tiles.index(slot).load(product_layout(PANEL))
    synchronize()
    mbarrier.arrive(p_empty.index(slot))
    return p.to(gl.float32)


@gluon.jit
def _scores(stage, tiles, inverse, PANELS: gl.constexpr):
    """Issue S^T - lse, without waiting for it; Q and lse must have arrived."""
    s = gl.zeros([ROWS, ROWS], gl.float32, product_layout(PANEL)) - read_values(tiles[4], stage) * inverse
    return add_transposed(s, tiles[2], 0, tiles[0], stage * PANELS, PANELS * PANEL, False)


@gluon.jit
def _gradients(stage, tiles, PANELS: gl.constexpr):
    """Issue dP^T - delta, without waiting for it; dO and delta must have arrived."""
    dp = gl.zeros([ROWS, ROWS], gl.float32, product_layout(PANEL)) - read_values(tiles[5], stage)
    return add_transposed(dp, tiles[3], 0, tiles[1], stage * PANELS, PANELS * PANEL, False)


@gluon.jit
def _attend(
    acc,
    x,
    step,
    first,
    last,
    lowest,
    highest,
    first_row,
    last_row,
    scale_log2,
    tiles,
    barriers,
    exchange,
    which: gl.constexpr,
    PANELS: gl.constexpr,
    MASKED: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """Query tiles first to last - 1. ``x``: P or dS of the previous tile, whose product overlaps this tile's.

    No WGMMA is in flight at the end of a step.
    """
    q_tiles, d_tiles = tiles[0], tiles[1]
    q_full, q_empty, d_full, d_empty = barriers[4], barriers[5], barriers[6], barriers[7]
    columns: gl.constexpr = PANELS * PANEL
    for m in range(first, last):
        before = step % WIDE_STAGES
        phase_before = step // WIDE_STAGES & 1
        step += 1
        stage = step % WIDE_STAGES
        phase = step // WIDE_STAGES & 1
        mbarrier.wait(q_full.index(stage), phase)
        if MASKED:
            mask_ends(m * ROWS, stage, phase, lowest, highest, tiles, barriers, PANELS, PANELS)
        a = operand(x, q_tiles.dtype)
        if which == 0:
            s = _scores(stage, tiles, 1.0 / scale_log2, PANELS)
            mbarrier.wait(d_full.index(before), phase_before)
            acc = warpgroup_mma(a, columns_of(d_tiles, before * PANELS, columns), acc, is_async=True)
            s = warpgroup_mma_wait(1, [s])
            mbarrier.arrive(q_empty.index(stage))
            p = weights(s, first_row, last_row, scale_log2, m * ROWS, MASKED, HAS_LEFT, HAS_RIGHT)
            x = p.to(q_tiles.dtype)
            _send(x, exchange, step)
            acc, x = warpgroup_mma_wait(0, [acc, x])
            mbarrier.arrive(d_empty.index(before))
        else:
            mbarrier.wait(d_full.index(stage), phase)
            dp = _gradients(stage, tiles, PANELS)
            acc = warpgroup_mma(a, columns_of(q_tiles, before * PANELS, columns), acc, is_async=True)
            dp = warpgroup_mma_wait(1, [dp])
            mbarrier.arrive(d_empty.index(stage))
            x = (_receive(exchange, step) * dp).to(q_tiles.dtype)
            acc, x = warpgroup_mma_wait(0, [acc, x])
            mbarrier.arrive(q_empty.index(before))
    return acc, x, step


@gluon.jit
def compute_kv_wide(
    tiles,
    barriers,
    exchange,
    arguments,
    which: gl.constexpr,
    PANELS: gl.constexpr,
    PACKED: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """A computing warpgroup: dV of every key tile with ``which`` 0, dK with 1."""
    q_tiles, d_tiles, _, _, _, _, records = tiles
    r_full, r_empty, kv_full, kv_empty, q_full, q_empty, d_full, d_empty = barriers
    # fmt: off
    (DK, DV, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn, group, max_seqlen_kv,
     window_left, window_right, softmax_scale) = arguments
    # fmt: on
    columns: gl.constexpr = PANELS * PANEL
    scale_log2 = softmax_scale * LOG2_E
    record = 0
    tile = 0
    step = 0
    mbarrier.wait(r_full.index(0), 0)
    start_n = read_record(records, 0)
    while start_n >= 0:
        at = record % RECORDS * FIELDS
        b = read_record(records, at + 1)
        head = read_record(records, at + 2)
        start_kv = read_record(records, at + 3)
        seqlen_q = read_record(records, at + 4)
        seqlen_kv = read_record(records, at + 5)
        mbarrier.arrive(r_empty.index(record % RECORDS))
        first, whole_first, whole_last, last, lowest, highest = query_tiles(
            start_n, seqlen_q, seqlen_kv, window_left, window_right, ROWS, BOTTOM_RIGHT, HAS_LEFT, HAS_RIGHT
        )
        keys = start_n + gl.arange(0, ROWS, gl.SliceLayout(1, product_layout(PANEL)))
        diagonal = 0
        if BOTTOM_RIGHT:
            diagonal = seqlen_kv - seqlen_q
        first_row = keys - (diagonal + window_right)
        last_row = keys - (diagonal - window_left)
        acc = gl.zeros([ROWS, columns], gl.float32, product_layout(columns))
        if last > first:
            stage = step % WIDE_STAGES
            phase = step // WIDE_STAGES & 1
            mbarrier.wait(kv_full.index(which), tile & 1)
            tile += 1
            mbarrier.wait(q_full.index(stage), phase)
            mask_ends(first * ROWS, stage, phase, lowest, highest, tiles, barriers, PANELS, PANELS)
            if which == 0:
                s = _scores(stage, tiles, 1.0 / scale_log2, PANELS)
                s = warpgroup_mma_wait(0, [s])
                mbarrier.arrive(q_empty.index(stage))
                p = weights(s, first_row, last_row, scale_log2, first * ROWS, True, HAS_LEFT, HAS_RIGHT)
                x = p.to(q_tiles.dtype)
                _send(x, exchange, step)
            else:
                mbarrier.wait(d_full.index(stage), phase)
                dp = _gradients(stage, tiles, PANELS)
                dp = warpgroup_mma_wait(0, [dp])
                mbarrier.arrive(d_empty.index(stage))
                x = (_receive(exchange, step) * dp).to(q_tiles.dtype)
            begin = first + 1
            for _head in range(group):
                # fmt: off
                acc, x, step = _attend(
                    acc, x, step, begin, whole_first, lowest, highest, first_row, last_row, scale_log2, tiles, barriers,
                    exchange, which, PANELS, True, HAS_LEFT, HAS_RIGHT,
                )
                acc, x, step = _attend(
                    acc, x, step, whole_first, whole_last, lowest, highest, first_row, last_row, scale_log2, tiles,
                    barriers, exchange, which, PANELS, False, HAS_LEFT, HAS_RIGHT,
                )
                acc, x, step = _attend(
                    acc, x, step, whole_last, last, lowest, highest, first_row, last_row, scale_log2, tiles, barriers,
                    exchange, which, PANELS, True, HAS_LEFT, HAS_RIGHT,
                )
                # fmt: on
                begin = first
            mbarrier.arrive(kv_empty.index(which))
            stage = step % WIDE_STAGES
            a = operand(x, q_tiles.dtype)
            if which == 0:
                mbarrier.wait(d_full.index(stage), step // WIDE_STAGES & 1)
                acc = warpgroup_mma(a, columns_of(d_tiles, stage * PANELS, columns), acc, is_async=True)
                acc = warpgroup_mma_wait(0, [acc])
                mbarrier.arrive(d_empty.index(stage))
            else:
                acc = warpgroup_mma(a, columns_of(q_tiles, stage * PANELS, columns), acc, is_async=True)
                acc = warpgroup_mma_wait(0, [acc])
                mbarrier.arrive(q_empty.index(stage))
            step += 1
        num_keys = max_seqlen_kv
        if PACKED:
            num_keys = seqlen_kv
        if which == 0:
            base = DV + b.to(gl.int64) * stride_dvb + head.to(gl.int64) * stride_dvh
            base += start_kv.to(gl.int64) * stride_dvn
            store_keys(base, acc, 1.0, start_n, seqlen_kv, num_keys, stride_dvn, PACKED)
        else:
            base = DK + b.to(gl.int64) * stride_dkb + head.to(gl.int64) * stride_dkh
            base += start_kv.to(gl.int64) * stride_dkn
            store_keys(base, acc, softmax_scale, start_n, seqlen_kv, num_keys, stride_dkn, PACKED)
        record += 1
        mbarrier.wait(r_full.index(record % RECORDS), record // RECORDS & 1)
        start_n = read_record(records, record % RECORDS * FIELDS)
