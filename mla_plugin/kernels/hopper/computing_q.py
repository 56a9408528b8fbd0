"""The computing warpgroups (consumers) of the Hopper kernel of dQ: 64 queries each."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from mla_plugin.kernels.hopper.common import (
    FIELDS,
    PANEL,
    RECORDS,
    ROWS,
    columns_of,
    is_wide,
    kv_tiles,
    panels_of,
    product_layout,
    read_record,
    rows_with_keys,
)
from mla_plugin.kernels.hopper.panels import add_transposed, operand, store, zero_rows
from mla_plugin.kernels.tile_math import LOG2_E


@gluon.jit
def _scores(which, step, tiles, D_QK: gl.constexpr, K_STAGES: gl.constexpr):
    """Issue Q K^T, without waiting for it; K must have arrived."""
    panels: gl.constexpr = panels_of(D_QK)
    s = gl.zeros([ROWS, ROWS], gl.float32, product_layout(ROWS))
    return add_transposed(s, tiles[0], which * panels, tiles[2], step % K_STAGES * panels, D_QK, True)


@gluon.jit
def _gradients(delta, which, step, tiles, v_full, V_PANELS: gl.constexpr, V_STAGES: gl.constexpr):
    """Issue dO V^T - delta, without waiting for it."""
    stage = step % V_STAGES
    mbarrier.wait(v_full.index(stage), step // V_STAGES & 1)
    dp = gl.zeros([ROWS, ROWS], gl.float32, product_layout(ROWS)) - delta[:, None]
    return add_transposed(dp, tiles[1], which * V_PANELS, tiles[3], stage * V_PANELS, V_PANELS * PANEL, False)


@gluon.jit
def _weighted(p, dp, start_n, limit, start, MASKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr):
    """dS; MASKED: a row sees the keys below its ``limit``, with HAS_LEFT from its ``start`` on."""
    ds = p * dp
    if MASKED:
        keys = gl.arange(0, ROWS, gl.SliceLayout(0, p.type.layout))[None, :]
        visible = keys < (limit - start_n)[:, None] if HAS_RIGHT else keys < limit - start_n
        if HAS_LEFT:
            visible = visible & (keys >= (start - start_n)[:, None])
        ds = gl.where(visible, ds, 0.0)
    return ds


@gluon.jit
def _attend(
    dq0,
    dq1,
    ds,
    step,
    high,
    low,
    lse,
    delta,
    limit,
    start,
    scale_log2,
    tiles,
    barriers,
    which: gl.constexpr,
    QK0: gl.constexpr,
    QK1: gl.constexpr,
    V_PANELS: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    MASKED: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """Key tiles high - 1 down to low. ``ds``: dS of the previous tile, whose product with K overlaps the scores.

    Computing dS overlaps that product, computing P overlaps dO V^T. No WGMMA is in flight at the end of a step.
    """
    k_tiles = tiles[2]
    k_full, k_empty, v_full, v_empty = barriers[4], barriers[5], barriers[6], barriers[7]
    panels: gl.constexpr = panels_of(QK0 + QK1)
    parts: gl.constexpr = 2 if QK1 > 0 else 1
    wide: gl.constexpr = is_wide(QK0)
    for n in range(high - low):
        before = step % K_STAGES
        step += 1
        mbarrier.wait(k_full.index(step % K_STAGES), step // K_STAGES & 1)
        s = _scores(which, step, tiles, QK0 + QK1, K_STAGES)
        if not wide:
            dp = _gradients(delta, which, step, tiles, v_full, V_PANELS, V_STAGES)
        a = operand(ds, k_tiles.dtype)
        dq0 = warpgroup_mma(a, columns_of(k_tiles, before * panels, QK0), dq0, is_async=True)
        if QK1 > 0:
            dq1 = warpgroup_mma(a, columns_of(k_tiles, before * panels + QK0 // PANEL, QK1), dq1, is_async=True)
        s = warpgroup_mma_wait(parts if wide else V_PANELS + parts, [s])
        p = gl.exp2(s * scale_log2 - lse[:, None])
        if wide:
            dq0, p = warpgroup_mma_wait(0, [dq0, p])
            mbarrier.arrive(k_empty.index(before))
            dp = _gradients(delta, which, step, tiles, v_full, V_PANELS, V_STAGES)
            dp = warpgroup_mma_wait(0, [dp])
            mbarrier.arrive(v_empty.index(step % V_STAGES))
            ds = _weighted(p, dp, (high - 1 - n) * ROWS, limit, start, MASKED, HAS_LEFT, HAS_RIGHT)
        else:
            dp = warpgroup_mma_wait(parts, [dp])
            mbarrier.arrive(v_empty.index(step % V_STAGES))
            ds = _weighted(p, dp, (high - 1 - n) * ROWS, limit, start, MASKED, HAS_LEFT, HAS_RIGHT)
            if QK1 > 0:
                dq0, dq1 = warpgroup_mma_wait(0, [dq0, dq1])
            else:
                dq0 = warpgroup_mma_wait(0, [dq0])
            mbarrier.arrive(k_empty.index(before))
    return dq0, dq1, ds, step


@gluon.jit
def compute_q(
    tiles,
    barriers,
    arguments,
    which: gl.constexpr,
    QK0: gl.constexpr,
    QK1: gl.constexpr,
    V_PANELS: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    PACKED: gl.constexpr,
    HAS_LENGTHS: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """A computing warpgroup: the first 64 queries of every query tile with ``which`` 0, the second 64 with 1."""
    _, _, k_tiles, _, records = tiles
    r_full, r_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    # fmt: off
    (Lse, Delta, DQ, stride_dqb, stride_dqh, stride_dqm, stride_lb, stride_lh, max_seqlen_q, window_left, window_right,
     softmax_scale) = arguments
    # fmt: on
    panels: gl.constexpr = panels_of(QK0 + QK1)
    layout: gl.constexpr = product_layout(ROWS)
    scale_log2 = softmax_scale * LOG2_E
    record = 0
    tile = 0
    step = 0
    mbarrier.wait(r_full.index(0), 0)
    start_m = read_record(records, 0)
    while start_m >= 0:
        at = record % RECORDS * FIELDS
        b = read_record(records, at + 1)
        head = read_record(records, at + 2)
        start_q = read_record(records, at + 3)
        seqlen_q = read_record(records, at + 4)
        seqlen_kv = read_record(records, at + 5)
        mbarrier.arrive(r_empty.index(record % RECORDS))
        last, whole_last, whole_first, first = kv_tiles(
            start_m, seqlen_q, seqlen_kv, window_left, window_right, ROWS, BOTTOM_RIGHT, HAS_LEFT, HAS_RIGHT
        )
        start_m += which * ROWS
        rows = start_m + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        at_rows = b.to(gl.int64) * stride_lb + head.to(gl.int64) * stride_lh + start_q
        lse = gl.load(Lse + at_rows + rows, mask=rows < seqlen_q, other=float("inf"))
        delta = gl.load(Delta + at_rows + rows, mask=rows < seqlen_q, other=0.0)
        diagonal = 0
        if BOTTOM_RIGHT:
            diagonal = seqlen_kv - seqlen_q
        limit = seqlen_kv
        if HAS_RIGHT:
            limit = gl.minimum(rows + (diagonal + window_right + 1), seqlen_kv)
        start = 0
        if HAS_LEFT:
            start = rows + (diagonal - window_left)
        dq0 = gl.zeros([ROWS, QK0], gl.float32, product_layout(QK0))
        dq1 = 0
        if QK1 > 0:
            dq1 = gl.zeros([ROWS, QK1], gl.float32, product_layout(QK1))
        if last > first:
            stage = step % K_STAGES
            mbarrier.wait(q_full.index(which), tile & 1)
            tile += 1
            mbarrier.wait(k_full.index(stage), step // K_STAGES & 1)
            if HAS_LENGTHS:
                if last * ROWS > seqlen_kv:
                    zero_rows(k_tiles, stage * panels, 0, seqlen_kv - (last - 1) * ROWS, panels)
            s = _scores(which, step, tiles, QK0 + QK1, K_STAGES)
            dp = _gradients(delta, which, step, tiles, v_full, V_PANELS, V_STAGES)
            s = warpgroup_mma_wait(V_PANELS, [s])
            p = gl.exp2(s * scale_log2 - lse[:, None])
            dp = warpgroup_mma_wait(0, [dp])
            mbarrier.arrive(v_empty.index(step % V_STAGES))
            ds = _weighted(p, dp, (last - 1) * ROWS, limit, start, True, HAS_LEFT, HAS_RIGHT)
            # fmt: off
            if HAS_RIGHT or HAS_LENGTHS:
                dq0, dq1, ds, step = _attend(
                    dq0, dq1, ds, step, last - 1, whole_last, lse, delta, limit, start, scale_log2, tiles, barriers,
                    which, QK0, QK1, V_PANELS, K_STAGES, V_STAGES, True, HAS_LEFT, HAS_RIGHT,
                )
            dq0, dq1, ds, step = _attend(
                dq0, dq1, ds, step, whole_last, whole_first, lse, delta, limit, start, scale_log2, tiles, barriers,
                which, QK0, QK1, V_PANELS, K_STAGES, V_STAGES, False, HAS_LEFT, HAS_RIGHT,
            )
            if HAS_LEFT:
                dq0, dq1, ds, step = _attend(
                    dq0, dq1, ds, step, whole_first, first, lse, delta, limit, start, scale_log2, tiles, barriers,
                    which, QK0, QK1, V_PANELS, K_STAGES, V_STAGES, True, HAS_LEFT, HAS_RIGHT,
                )
            # fmt: on
            mbarrier.arrive(q_empty.index(which))
            stage = step % K_STAGES
            a = operand(ds, k_tiles.dtype)
            dq0 = warpgroup_mma(a, columns_of(k_tiles, stage * panels, QK0), dq0, is_async=True)
            if QK1 > 0:
                dq1 = warpgroup_mma(a, columns_of(k_tiles, stage * panels + QK0 // PANEL, QK1), dq1, is_async=True)
                dq0, dq1 = warpgroup_mma_wait(0, [dq0, dq1])
            else:
                dq0 = warpgroup_mma_wait(0, [dq0])
            mbarrier.arrive(k_empty.index(stage))
            step += 1
        lowest, highest = rows_with_keys(seqlen_q, seqlen_kv, diagonal, window_left, window_right, HAS_LEFT, HAS_RIGHT)
        num_rows = max_seqlen_q
        if PACKED:
            num_rows = seqlen_q
        base = DQ + b.to(gl.int64) * stride_dqb + head.to(gl.int64) * stride_dqh + start_q.to(gl.int64) * stride_dqm
        _store_queries(base, dq0, softmax_scale, start_m, lowest, highest, num_rows, stride_dqm)
        if QK1 > 0:
            _store_queries(base + QK0, dq1, softmax_scale, start_m, lowest, highest, num_rows, stride_dqm)
        record += 1
        mbarrier.wait(r_full.index(record % RECORDS), record // RECORDS & 1)
        start_m = read_record(records, record % RECORDS * FIELDS)


@gluon.jit
def _store_queries(base, x, scale, start_m, lowest, highest, num_rows, stride):
    """Store scale * x; queries outside [lowest, highest), which see no key, get 0."""
    rows = start_m + gl.arange(0, ROWS, gl.SliceLayout(1, x.type.layout))
    sees_key = (rows >= lowest) & (rows < highest)
    store(base, gl.where(sees_key[:, None], x * scale, 0.0), start_m, num_rows, stride)
