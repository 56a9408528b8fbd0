"""The computing warpgroups (consumers) of the Hopper kernel of dK and dV: 64 keys each."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from mla_plugin.kernels.hopper.common import (
    FIELDS,
    PANEL,
    RECORDS,
    ROWS,
    STAGES,
    columns_of,
    panels_of,
    product_layout,
    query_tiles,
    read_record,
    scalar_layout,
)
from mla_plugin.kernels.hopper.panels import add_transposed, operand, packed, store, unpacked, zero_rows
from mla_plugin.kernels.tile_math import LOG2_E


@gluon.jit
def read_values(values, stage):
    """One float32 per query: [1, 64]."""
    return values.index(stage).load(gl.SliceLayout(0, product_layout(PANEL)))[None, :]


@gluon.jit
def _mask_values(values, stage, low, high, other):
    """Write ``other`` to the values of rows below ``low`` and from ``high`` on. Both warpgroups write the same."""
    layout: gl.constexpr = scalar_layout(4)
    rows = gl.arange(0, ROWS, layout)
    x = values.index(stage).load(layout)
    values.index(stage).store(gl.where((rows >= low) & (rows < high), x, other))


@gluon.jit
def weights(
    s, first_row, last_row, scale_log2, start_m, MASKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr
):
    """P^T [64 keys, 64 queries]; MASKED: a key is seen by the queries from ``first_row`` to ``last_row``."""
    p = gl.exp2(s * scale_log2)
    if MASKED:
        queries = gl.arange(0, ROWS, gl.SliceLayout(0, s.type.layout))[None, :]
        if HAS_RIGHT:
            p = gl.where(queries >= (first_row - start_m)[:, None], p, 0.0)
        if HAS_LEFT:
            p = gl.where(queries <= (last_row - start_m)[:, None], p, 0.0)
    return p


@gluon.jit
def _finish(p, dv, stage, which, tiles, V_PANELS: gl.constexpr):
    """Issue dP^T - delta and dV + P^T dO, without waiting for them."""
    _, d_tiles, _, v_tiles, _, delta_tiles, _ = tiles
    layout: gl.constexpr = product_layout(PANEL)
    dp = gl.zeros([ROWS, ROWS], gl.float32, layout) - read_values(delta_tiles, stage)
    dp = add_transposed(dp, v_tiles, which * V_PANELS, d_tiles, stage * V_PANELS, V_PANELS * PANEL, False)
    dv = warpgroup_mma(operand(p, p.dtype), columns_of(d_tiles, stage * V_PANELS, V_PANELS * PANEL), dv, is_async=True)
    return dp, dv


@gluon.jit
def _attend(
    dk0,
    dk1,
    dv,
    ds,
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
    which: gl.constexpr,
    QK0: gl.constexpr,
    QK1: gl.constexpr,
    V_PANELS: gl.constexpr,
    MASKED: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """Query tiles first to last - 1. ``ds``: dS of the previous tile, whose product with Q overlaps the scores.

    Computing P overlaps that product, computing dS overlaps P^T dO. No WGMMA is in flight at the end of a step.
    """
    q_tiles, _, k_tiles, _, lse_tiles, _, _ = tiles
    _, _, _, _, q_full, q_empty, d_full, d_empty = barriers
    panels: gl.constexpr = panels_of(QK0 + QK1)
    layout: gl.constexpr = product_layout(PANEL)
    inverse = 1.0 / scale_log2
    for m in range(first, last):
        before = step % STAGES
        step += 1
        stage = step % STAGES
        phase = step // STAGES & 1
        mbarrier.wait(q_full.index(stage), phase)
        if MASKED:
            mask_ends(m * ROWS, stage, phase, lowest, highest, tiles, barriers, panels, V_PANELS)
        s = gl.zeros([ROWS, ROWS], gl.float32, layout) - read_values(lse_tiles, stage) * inverse
        s = add_transposed(s, k_tiles, which * panels, q_tiles, stage * panels, QK0 + QK1, False)
        a = operand(ds, q_tiles.dtype)
        dk0 = warpgroup_mma(a, columns_of(q_tiles, before * panels, QK0), dk0, is_async=True)
        if QK1 > 0:
            dk1 = warpgroup_mma(a, columns_of(q_tiles, before * panels + QK0 // PANEL, QK1), dk1, is_async=True)
            s = warpgroup_mma_wait(2, [s])
        else:
            s = warpgroup_mma_wait(1, [s])
        p = weights(s, first_row, last_row, scale_log2, m * ROWS, MASKED, HAS_LEFT, HAS_RIGHT)
        p = packed(p, q_tiles.dtype)
        mbarrier.wait(d_full.index(stage), phase)
        if QK1 > 0:
            dk0, dk1, p = warpgroup_mma_wait(0, [dk0, dk1, p])
        else:
            dk0, p = warpgroup_mma_wait(0, [dk0, p])
        mbarrier.arrive(q_empty.index(before))
        dp, dv = _finish(p, dv, stage, which, tiles, V_PANELS)
        dp = warpgroup_mma_wait(1, [dp])
        ds = unpacked(p) * dp
        dv = warpgroup_mma_wait(0, [dv])
        mbarrier.arrive(d_empty.index(stage))
    return dk0, dk1, dv, ds, step


@gluon.jit
def mask_ends(start_m, stage, phase, lowest, highest, tiles, barriers, QK_PANELS: gl.constexpr, V_PANELS: gl.constexpr):
    """Mask the rows of a query tile that see no key or belong to another sequence; its Q must have arrived."""
    q_tiles, d_tiles, _, _, lse_tiles, delta_tiles, _ = tiles
    if (start_m < lowest) | (start_m + ROWS > highest):
        mbarrier.wait(barriers[6].index(stage), phase)
        _mask_values(lse_tiles, stage, lowest - start_m, highest - start_m, float("inf"))
        _mask_values(delta_tiles, stage, lowest - start_m, highest - start_m, 0.0)
        zero_rows(q_tiles, stage * QK_PANELS, lowest - start_m, highest - start_m, QK_PANELS)
        zero_rows(d_tiles, stage * V_PANELS, lowest - start_m, highest - start_m, V_PANELS)


@gluon.jit
def compute_kv(
    tiles,
    barriers,
    arguments,
    which: gl.constexpr,
    QK0: gl.constexpr,
    QK1: gl.constexpr,
    V_PANELS: gl.constexpr,
    PACKED: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """A computing warpgroup: the first 64 keys of every key tile with ``which`` 0, the second 64 with 1."""
    q_tiles, _, k_tiles, _, lse_tiles, _, records = tiles
    r_full, r_empty, kv_full, kv_empty, q_full, q_empty, d_full, d_empty = barriers
    # fmt: off
    (DK, DV, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn, group, max_seqlen_kv,
     window_left, window_right, softmax_scale) = arguments
    # fmt: on
    panels: gl.constexpr = panels_of(QK0 + QK1)
    layout: gl.constexpr = product_layout(PANEL)
    scale_log2 = softmax_scale * LOG2_E
    inverse = 1.0 / scale_log2
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
            start_n, seqlen_q, seqlen_kv, window_left, window_right, 2 * ROWS, BOTTOM_RIGHT, HAS_LEFT, HAS_RIGHT
        )
        start_n += which * ROWS
        keys = start_n + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        diagonal = 0
        if BOTTOM_RIGHT:
            diagonal = seqlen_kv - seqlen_q
        first_row = keys - (diagonal + window_right)
        last_row = keys - (diagonal - window_left)
        dk0 = gl.zeros([ROWS, QK0], gl.float32, product_layout(QK0))
        dk1 = 0
        if QK1 > 0:
            dk1 = gl.zeros([ROWS, QK1], gl.float32, product_layout(QK1))
        dv = gl.zeros([ROWS, V_PANELS * PANEL], gl.float32, product_layout(V_PANELS * PANEL))
        if last > first:
            stage = step % STAGES
            phase = step // STAGES & 1
            mbarrier.wait(kv_full.index(which), tile & 1)
            tile += 1
            mbarrier.wait(q_full.index(stage), phase)
            mask_ends(first * ROWS, stage, phase, lowest, highest, tiles, barriers, panels, V_PANELS)
            s = gl.zeros([ROWS, ROWS], gl.float32, layout) - read_values(lse_tiles, stage) * inverse
            s = add_transposed(s, k_tiles, which * panels, q_tiles, stage * panels, QK0 + QK1, False)
            s = warpgroup_mma_wait(0, [s])
            p = weights(s, first_row, last_row, scale_log2, first * ROWS, True, HAS_LEFT, HAS_RIGHT)
            p = packed(p, q_tiles.dtype)
            mbarrier.wait(d_full.index(stage), phase)
            dp, dv = _finish(p, dv, stage, which, tiles, V_PANELS)
            dp = warpgroup_mma_wait(1, [dp])
            ds = unpacked(p) * dp
            dv = warpgroup_mma_wait(0, [dv])
            mbarrier.arrive(d_empty.index(stage))
            begin = first + 1
            for _head in range(group):
                # fmt: off
                dk0, dk1, dv, ds, step = _attend(
                    dk0, dk1, dv, ds, step, begin, whole_first, lowest, highest, first_row, last_row, scale_log2,
                    tiles, barriers, which, QK0, QK1, V_PANELS, True, HAS_LEFT, HAS_RIGHT,
                )
                dk0, dk1, dv, ds, step = _attend(
                    dk0, dk1, dv, ds, step, whole_first, whole_last, lowest, highest, first_row, last_row, scale_log2,
                    tiles, barriers, which, QK0, QK1, V_PANELS, False, HAS_LEFT, HAS_RIGHT,
                )
                dk0, dk1, dv, ds, step = _attend(
                    dk0, dk1, dv, ds, step, whole_last, last, lowest, highest, first_row, last_row, scale_log2,
                    tiles, barriers, which, QK0, QK1, V_PANELS, True, HAS_LEFT, HAS_RIGHT,
                )
                # fmt: on
                begin = first
            mbarrier.arrive(kv_empty.index(which))
            stage = step % STAGES
            a = operand(ds, q_tiles.dtype)
            dk0 = warpgroup_mma(a, columns_of(q_tiles, stage * panels, QK0), dk0, is_async=True)
            if QK1 > 0:
                dk1 = warpgroup_mma(a, columns_of(q_tiles, stage * panels + QK0 // PANEL, QK1), dk1, is_async=True)
                dk0, dk1 = warpgroup_mma_wait(0, [dk0, dk1])
            else:
                dk0 = warpgroup_mma_wait(0, [dk0])
            mbarrier.arrive(q_empty.index(stage))
            step += 1
        num_keys = max_seqlen_kv
        if PACKED:
            num_keys = seqlen_kv
        dk_base = DK + b.to(gl.int64) * stride_dkb + head.to(gl.int64) * stride_dkh + start_kv.to(gl.int64) * stride_dkn
        dv_base = DV + b.to(gl.int64) * stride_dvb + head.to(gl.int64) * stride_dvh + start_kv.to(gl.int64) * stride_dvn
        store_keys(dv_base, dv, 1.0, start_n, seqlen_kv, num_keys, stride_dvn, PACKED)
        store_keys(dk_base, dk0, softmax_scale, start_n, seqlen_kv, num_keys, stride_dkn, PACKED)
        if QK1 > 0:
            store_keys(dk_base + QK0, dk1, softmax_scale, start_n, seqlen_kv, num_keys, stride_dkn, PACKED)
        record += 1
        mbarrier.wait(r_full.index(record % RECORDS), record // RECORDS & 1)
        start_n = read_record(records, record % RECORDS * FIELDS)


@gluon.jit
def store_keys(base, x, scale, start_n, seqlen_kv, num_keys, stride, PACKED: gl.constexpr):
    """Store scale * x; in a dense batch the keys past the end of their sequence get 0."""
    x = x * scale
    if not PACKED:
        keys = start_n + gl.arange(0, ROWS, gl.SliceLayout(1, x.type.layout))
        x = gl.where((keys < seqlen_kv)[:, None], x, 0.0)
    store(base, x, start_n, num_keys, stride)
