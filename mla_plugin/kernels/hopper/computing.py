"""The computing warpgroups (consumers) of the Hopper forward: 64 queries each; scores, softmax and output."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla_plugin.kernels.hopper.common import (
    FIELDS,
    PANEL,
    RECORDS,
    ROWS,
    columns_of,
    kv_tiles,
    matrix_layout,
    panels_of,
    product_layout,
    read_record,
    store_layout,
    synchronize,
    width_of,
)
from mla_plugin.kernels.tile_math import LN_2, LOG2_E

_ZEROED_ROWS = gl.constexpr(16)
"""Rows of V that are set to 0 per step."""


@gluon.jit
def _scores(q_tiles, which, k_tiles, stage, BLOCK_N: gl.constexpr, D_QK: gl.constexpr):
    """Issue Q K^T of a warpgroup, without waiting for it: [64, BLOCK_N]."""
    panels: gl.constexpr = panels_of(D_QK)
    s = gl.zeros([ROWS, BLOCK_N], gl.float32, product_layout(BLOCK_N))
    for panel in gl.static_range(panels):
        q = columns_of(q_tiles, which * panels + panel, width_of(panel, D_QK))
        k = columns_of(k_tiles, stage * panels + panel, width_of(panel, D_QK))
        s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=panel > 0, is_async=True)
    return s


@gluon.jit
def _weights(
    s, row_max, scale_log2, start_n, limit, start, MASKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr
):
    """2 ** (s - new maximum), the new maximum, and the factor that rescales the previous sums.

    MASKED: a row sees the keys below its ``limit``, with HAS_LEFT from its ``start`` on.
    """
    if MASKED:
        keys = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))[None, :]
        visible = keys < (limit - start_n)[:, None] if HAS_RIGHT else keys < limit - start_n
        if HAS_LEFT:
            visible = visible & (keys >= (start - start_n)[:, None])
        s = gl.where(visible, s, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale_log2)
    shift = new_max
    if MASKED:  # a row that has seen no key yet has the maximum -inf: subtract 0, because -inf - -inf is NaN
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(s * scale_log2 - shift[:, None])
    return p, new_max, gl.exp2(row_max - shift)


@gluon.jit
def _attend(
    acc,
    row_max,
    row_sum,
    w,
    step,
    high,
    low,
    limit,
    start,
    scale_log2,
    q_tiles,
    k_tiles,
    v_tiles,
    k_full,
    k_empty,
    v_full,
    v_empty,
    which: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    D_QK: gl.constexpr,
    V_COLUMNS: gl.constexpr,
    MASKED: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """Key tiles high - 1 down to low. ``w``: weights of the previous tile, whose product with V overlaps the scores.

    That product also overlaps the softmax of this tile. No WGMMA is in flight at the end of a step.
    """
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(V_COLUMNS), 2)
    rows_layout: gl.constexpr = gl.SliceLayout(1, product_layout(V_COLUMNS))
    for n in range(high - low):
        before = step % STAGES
        phase = step // STAGES & 1
        step += 1
        stage = step % STAGES
        mbarrier.wait(k_full.index(stage), step // STAGES & 1)
        s = _scores(q_tiles, which, k_tiles, stage, BLOCK_N, D_QK)
        mbarrier.wait(v_full.index(before), phase)
        p = gl.convert_layout(w.to(v_tiles.dtype), weights_layout)
        acc = warpgroup_mma(p, columns_of(v_tiles, before, V_COLUMNS), acc, is_async=True)
        s = warpgroup_mma_wait(1, [s])
        mbarrier.arrive(k_empty.index(stage))
        w, row_max, rescale = _weights(
            s, row_max, scale_log2, (high - 1 - n) * BLOCK_N, limit, start, MASKED, HAS_LEFT, HAS_RIGHT
        )
        row_sum = row_sum * rescale + gl.sum(w, 1)
        acc, row_sum = warpgroup_mma_wait(0, [acc, row_sum])
        mbarrier.arrive(v_empty.index(before))
        acc = acc * gl.convert_layout(rescale, rows_layout)[:, None]
    return acc, row_max, row_sum, w, step


@gluon.jit
def _zero_rows(v_tiles, stage, first, BLOCK_N: gl.constexpr, V_COLUMNS: gl.constexpr):
    """Write 0 to the rows of V from ``first`` on: they may be NaN, and 0 * NaN is NaN.

    Both warpgroups write the same zeros.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    blocks: gl.constexpr = BLOCK_N // _ZEROED_ROWS
    panels: gl.constexpr = V_COLUMNS // PANEL
    rows = gl.arange(0, _ZEROED_ROWS, gl.SliceLayout(1, layout))
    v = v_tiles._reinterpret(
        v_tiles.dtype, [v_tiles.shape[0] * panels * blocks, _ZEROED_ROWS, PANEL], matrix_layout(v_tiles.dtype)
    )
    for block in range(first // _ZEROED_ROWS, blocks):
        for panel in gl.static_range(panels):
            part = v.index((stage * panels + panel) * blocks + block)
            exists = rows < first - block * _ZEROED_ROWS
            part.store(gl.where(exists[:, None], part.load(layout), 0.0))
    fence_async_shared()
    synchronize()


@gluon.jit
def _store(base, out, first, num_rows, stride, D_V: gl.constexpr):
    layout: gl.constexpr = store_layout(out.shape[1])
    out = gl.convert_layout(out, layout)
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, out.shape[1], gl.SliceLayout(0, layout))
    mask = (rows < num_rows)[:, None]
    if out.shape[1] > D_V:
        mask = mask & (columns < D_V)[None, :]
    gl.store(base + (rows.to(gl.int64) * stride)[:, None] + columns[None, :], out, mask=mask)


@gluon.jit
def compute(
    tiles,
    barriers,
    arguments,
    which: gl.constexpr,
    D_V: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    D_QK: gl.constexpr,
    V_COLUMNS: gl.constexpr,
    PACKED: gl.constexpr,
    HAS_LENGTHS: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """A computing warpgroup: the first 64 queries of every query tile with ``which`` 0, the second 64 with 1."""
    q_tiles, k_tiles, v_tiles, records = tiles
    r_full, r_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    # fmt: off
    (Out, Lse, stride_ob, stride_oh, stride_om, stride_lb, stride_lh, max_seqlen_q, window_left, window_right,
     softmax_scale) = arguments
    # fmt: on
    scores_rows: gl.constexpr = gl.SliceLayout(1, product_layout(BLOCK_N))
    out_rows: gl.constexpr = gl.SliceLayout(1, product_layout(V_COLUMNS))
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(V_COLUMNS), 2)
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
            start_m, seqlen_q, seqlen_kv, window_left, window_right, BLOCK_N, BOTTOM_RIGHT, HAS_LEFT, HAS_RIGHT
        )
        rows = start_m + which * ROWS + gl.arange(0, ROWS, scores_rows)
        diagonal = 0
        if BOTTOM_RIGHT:
            diagonal = seqlen_kv - seqlen_q
        limit = seqlen_kv
        if HAS_RIGHT:
            limit = gl.minimum(rows + (diagonal + window_right + 1), seqlen_kv)
        start = 0
        if HAS_LEFT:
            start = rows + (diagonal - window_left)
        acc = gl.zeros([ROWS, V_COLUMNS], gl.float32, product_layout(V_COLUMNS))
        row_max = gl.full([ROWS], float("-inf"), gl.float32, scores_rows)
        row_sum = gl.zeros([ROWS], gl.float32, scores_rows)
        if last > first:
            stage = step % STAGES
            mbarrier.wait(q_full.index(which), tile & 1)
            tile += 1
            mbarrier.wait(k_full.index(stage), step // STAGES & 1)
            s = _scores(q_tiles, which, k_tiles, stage, BLOCK_N, D_QK)
            s = warpgroup_mma_wait(0, [s])
            mbarrier.arrive(k_empty.index(stage))
            if HAS_LENGTHS:
                if last * BLOCK_N > seqlen_kv:
                    mbarrier.wait(v_full.index(stage), step // STAGES & 1)
                    _zero_rows(v_tiles, stage, seqlen_kv - (last - 1) * BLOCK_N, BLOCK_N, V_COLUMNS)
            w, row_max, _ = _weights(
                s, row_max, scale_log2, (last - 1) * BLOCK_N, limit, start, True, HAS_LEFT, HAS_RIGHT
            )
            row_sum = gl.sum(w, 1)
            # fmt: off
            if HAS_RIGHT or HAS_LENGTHS:
                acc, row_max, row_sum, w, step = _attend(
                    acc, row_max, row_sum, w, step, last - 1, whole_last, limit, start, scale_log2,
                    q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, which,
                    BLOCK_N, STAGES, D_QK, V_COLUMNS, True, HAS_LEFT, HAS_RIGHT,
                )
            acc, row_max, row_sum, w, step = _attend(
                acc, row_max, row_sum, w, step, whole_last, whole_first, limit, start, scale_log2,
                q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, which,
                BLOCK_N, STAGES, D_QK, V_COLUMNS, False, HAS_LEFT, HAS_RIGHT,
            )
            if HAS_LEFT:
                acc, row_max, row_sum, w, step = _attend(
                    acc, row_max, row_sum, w, step, whole_first, first, limit, start, scale_log2,
                    q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, which,
                    BLOCK_N, STAGES, D_QK, V_COLUMNS, True, HAS_LEFT, HAS_RIGHT,
                )
            # fmt: on
            mbarrier.arrive(q_empty.index(which))
            stage = step % STAGES
            mbarrier.wait(v_full.index(stage), step // STAGES & 1)
            p = gl.convert_layout(w.to(v_tiles.dtype), weights_layout)
            acc = warpgroup_mma(p, columns_of(v_tiles, stage, V_COLUMNS), acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(v_empty.index(stage))
            step += 1
        empty = (row_sum == 0.0) | (rows >= seqlen_q)
        inverse = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, row_sum))
        lse = gl.where(empty, float("-inf"), (row_max + gl.log2(gl.where(empty, 1.0, row_sum))) * LN_2)
        acc = acc * gl.convert_layout(inverse, out_rows)[:, None]
        if HAS_LENGTHS or HAS_LEFT or HAS_RIGHT:  # 0 times a value that is not finite is NaN
            acc = gl.where(gl.convert_layout(empty, out_rows)[:, None], 0.0, acc)
        num_rows = max_seqlen_q
        if PACKED:
            num_rows = seqlen_q
        lse_base = Lse + b.to(gl.int64) * stride_lb + head.to(gl.int64) * stride_lh + start_q
        gl.store(lse_base + rows, lse, mask=rows < num_rows)
        _store(
            Out + b.to(gl.int64) * stride_ob + head.to(gl.int64) * stride_oh + start_q.to(gl.int64) * stride_om,
            acc.to(v_tiles.dtype),
            start_m + which * ROWS,
            num_rows,
            stride_om,
            D_V,
        )
        record += 1
        mbarrier.wait(r_full.index(record % RECORDS), record // RECORDS & 1)
        start_m = read_record(records, record % RECORDS * FIELDS)
