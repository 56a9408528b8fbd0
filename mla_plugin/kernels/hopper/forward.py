"""The forward kernel for Hopper: one warp loads, two warpgroups of 64 queries each compute, on every multiprocessor.

Mathematics, roles, and why no barrier waits for ever: kernels/README.md.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla_plugin.kernels import tile_math

_tile_bounds = gluon.jit(tile_math.tile_bounds.fn)
_synchronize = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # renamed in Triton 3.7

PANEL = gl.constexpr(64)
"""Columns that one copy brings: 128 bytes, the widest swizzle. A row of 192 columns is three panels."""
_ROWS = gl.constexpr(64)
"""Queries of a warpgroup; two of them share the keys and values."""
_RECORDS = gl.constexpr(2)
"""Query tiles that the loading warp may be ahead with its records."""
_FIELDS = gl.constexpr(8)
_CLEANED = gl.constexpr(16)
"""Rows of V that are cleaned at a time."""


@gluon.constexpr_function
def tile_layout(dtype):
    """Of a tile [1, 1, rows, columns] of a [B, H, S, D] tensor in shared memory."""
    return gl.NVMMASharedLayout(128, dtype.primitive_bitwidth, 4)


@gluon.constexpr_function
def _matrix_layout(dtype):
    """Of the same memory as [rows, columns]."""
    return gl.NVMMASharedLayout(128, dtype.primitive_bitwidth, 2)


@gluon.constexpr_function
def _scalar_layout(num_warps):
    return gl.BlockedLayout([1], [32], [num_warps], [0])


@gluon.constexpr_function
def _product_layout(columns):
    """Of a warpgroup's product [64, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def _store_layout(columns):
    """[64, columns] with 8 neighbouring columns to a thread, for 16-byte stores.

    Coming from a product, values move only between the four threads that share a row: no shared memory is needed.
    """
    registers = [[0, 1], [0, 2], [0, 4], [8, 0]] + [[0, 32 << i] for i in range((columns // 64).bit_length())]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, columns])


@gluon.jit
def _kv_tiles(
    start_m,
    seqlen_q,
    seqlen_kv,
    window_left,
    window_right,
    BLOCK_N: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """Key tiles of a query tile, which are taken from the last to the first: (last, whole_last, whole_first, first).

    In [first, last) some row sees a key; [whole_first, whole_last) need no mask. Tile last - 1 is always masked, so
    whole_last < last. Without any tile last == first.
    """
    diagonal = 0
    if BOTTOM_RIGHT:
        diagonal = seqlen_kv - seqlen_q
    low, whole_low, whole_high, high = _tile_bounds(
        start_m, seqlen_kv, diagonal, window_left, window_right, 2 * _ROWS, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    first = low // BLOCK_N
    last = gl.cdiv(high, BLOCK_N)
    if start_m >= seqlen_q:  # rows of a dense batch behind the end of their sequence
        last = 0
    last = gl.maximum(last, first)
    whole_last = gl.maximum(gl.minimum(whole_high // BLOCK_N, last - 1), first)
    whole_first = gl.minimum(gl.maximum(whole_low // BLOCK_N, first), whole_last)
    return last, whole_last, whole_first, first


@gluon.jit
def _work(ticket, Work, tiles, num_heads, together, PACKED: gl.constexpr):
    """Query tile, sequence and head of a ticket; ``together`` heads advance side by side through their tiles.

    Packed sequences have their tiles listed by plan.py, dense ones begin with the last, under a causal mask longest.
    """
    if PACKED:
        tiles = gl.load(Work + 1)
    per_group = together * tiles
    rest = ticket % per_group
    head = ticket // per_group * together + rest % together
    if PACKED:
        entry = Work + 2 + 2 * (rest // together)
        return gl.load(entry), gl.load(entry + 1), head
    else:
        return tiles - 1 - rest // together, head // num_heads, head % num_heads


@gluon.jit
def _sequence(b, cu_seqlens, starts, seqlen, PACKED: gl.constexpr, HAS_LENGTHS: gl.constexpr):
    """First row and length of a sequence, as ``tile_math.sequence``; rows are below 2**31."""
    start = 0
    length = seqlen
    if HAS_LENGTHS:
        length = gl.load(cu_seqlens + b + 1) - gl.load(cu_seqlens + b)
        if PACKED:
            start = gl.load(starts + b)
    return start, length


@gluon.jit
def _publish(records, record, r_full, r_empty, start_m, b, head, start_q, seqlen_q, seqlen_kv):
    """Tell both computing warpgroups about a query tile; a negative ``start_m`` says that there is none left."""
    layout: gl.constexpr = _scalar_layout(1)
    slot = record % _RECORDS
    mbarrier.wait(r_empty.index(slot), (record // _RECORDS & 1) ^ 1)
    at = slot * _FIELDS
    records.index(at).store(gl.full([1], start_m, gl.int32, layout))
    records.index(at + 1).store(gl.full([1], b, gl.int32, layout))
    records.index(at + 2).store(gl.full([1], head, gl.int32, layout))
    records.index(at + 3).store(gl.full([1], start_q, gl.int32, layout))
    records.index(at + 4).store(gl.full([1], seqlen_q, gl.int32, layout))
    records.index(at + 5).store(gl.full([1], seqlen_kv, gl.int32, layout))
    mbarrier.arrive(r_full.index(slot))


@gluon.jit
def _read(records, field):
    return gl.max(records.index(field).load(_scalar_layout(4)), 0)


@gluon.jit
def _load(
    q_source,
    k_source,
    v_source,
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
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    QK_PANELS: gl.constexpr,
    V_COLUMNS: gl.constexpr,
    DYNAMIC: gl.constexpr,
    PACKED: gl.constexpr,
    HAS_LENGTHS: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """The loading warp: takes tickets, says what they are, and brings their tiles."""
    q_tiles, k_tiles, v_tiles, records = tiles
    r_full, r_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    if PACKED:
        num_tickets = gl.load(Work + 1) * num_heads
    ticket = gl.program_id(0)
    record = 0
    tile = 0
    step = 0
    while ticket < num_tickets:
        m, b, head = _work(ticket, Work, num_tiles, num_heads, together, PACKED)
        start_m = m * 2 * _ROWS
        start_q, seqlen_q = _sequence(b, cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q, PACKED, HAS_LENGTHS)
        start_kv, seqlen_kv = _sequence(b, cu_seqlens_kv, cu_seqlens_kv_padded, max_seqlen_kv, PACKED, HAS_LENGTHS)
        _publish(records, record, r_full, r_empty, start_m, b, head, start_q, seqlen_q, seqlen_kv)
        record += 1
        last, _, _, first = _kv_tiles(
            start_m, seqlen_q, seqlen_kv, window_left, window_right, BLOCK_N, BOTTOM_RIGHT, HAS_LEFT, HAS_RIGHT
        )
        row = b
        if PACKED:
            row = 0
        if last > first:
            for w in gl.static_range(2):
                mbarrier.wait(q_empty.index(w), (tile & 1) ^ 1)
                mbarrier.expect(q_full.index(w), _ROWS * QK_PANELS * PANEL * 2)
                for panel in gl.static_range(QK_PANELS):
                    at = [row, head, start_q + start_m + w * _ROWS, panel * PANEL]
                    tma.async_copy_global_to_shared(
                        q_source, at, q_full.index(w), q_tiles.index(w * QK_PANELS + panel)
                    )
            tile += 1
        for n in range(last - first):
            stage = step % STAGES
            is_free = (step // STAGES & 1) ^ 1
            start_n = start_kv + (last - 1 - n) * BLOCK_N
            mbarrier.wait(k_empty.index(stage), is_free)
            mbarrier.expect(k_full.index(stage), BLOCK_N * QK_PANELS * PANEL * 2)
            for panel in gl.static_range(QK_PANELS):
                at = [row, head // group, start_n, panel * PANEL]
                tma.async_copy_global_to_shared(
                    k_source, at, k_full.index(stage), k_tiles.index(stage * QK_PANELS + panel)
                )
            mbarrier.wait(v_empty.index(stage), is_free)
            mbarrier.expect(v_full.index(stage), BLOCK_N * V_COLUMNS * 2)
            tma.async_copy_global_to_shared(
                v_source, [row, head // group, start_n, 0], v_full.index(stage), v_tiles.index(stage)
            )
            step += 1
        if DYNAMIC:
            taken = gl.atomic_add(Work, 1)
            if taken == num_tickets - 1:  # all programs have learnt that there is no more: 0 for the next launch
                gl.store(Work, 0)
            ticket = gl.num_programs(0) + taken
        else:
            ticket += gl.num_programs(0)
    _publish(records, record, r_full, r_empty, -1, 0, 0, 0, 0, 0)


@gluon.jit
def _scores(q_tiles, which, k_tiles, stage, BLOCK_N: gl.constexpr, QK_PANELS: gl.constexpr):
    """Q K^T of a warpgroup, asked for and not yet there: [64, BLOCK_N]."""
    layout: gl.constexpr = _matrix_layout(q_tiles.dtype)
    s = gl.zeros([_ROWS, BLOCK_N], gl.float32, _product_layout(BLOCK_N))
    for panel in gl.static_range(QK_PANELS):
        q = q_tiles.index(which * QK_PANELS + panel)._reinterpret(q_tiles.dtype, [_ROWS, PANEL], layout)
        k = k_tiles.index(stage * QK_PANELS + panel)._reinterpret(q_tiles.dtype, [BLOCK_N, PANEL], layout)
        s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=panel > 0, is_async=True)
    return s


@gluon.jit
def _values(v_tiles, stage, BLOCK_N: gl.constexpr, V_COLUMNS: gl.constexpr):
    """V [BLOCK_N, V_COLUMNS] in shared memory."""
    layout: gl.constexpr = _matrix_layout(v_tiles.dtype)
    return v_tiles.index(stage)._reinterpret(v_tiles.dtype, [BLOCK_N, V_COLUMNS], layout)


@gluon.jit
def _weights(
    s, row_max, scale_log2, start_n, limit, start, MASKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr
):
    """2 ** (s - new maximum), the new maximum, and the factor of what was summed before.

    MASKED: a row sees the keys below its ``limit``, with HAS_LEFT from its ``start`` on.
    """
    if MASKED:
        keys = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))[None, :]
        if HAS_RIGHT:
            visible = keys < (limit - start_n)[:, None]
        else:
            visible = keys < limit - start_n
        if HAS_LEFT:
            visible = visible & (keys >= (start - start_n)[:, None])
        s = gl.where(visible, s, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale_log2)
    shift = new_max
    if MASKED:  # a row that has seen no key yet keeps -inf: subtract 0 there, so that exp2 gives 0 and not NaN
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
    QK_PANELS: gl.constexpr,
    V_COLUMNS: gl.constexpr,
    MASKED: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """Key tiles high - 1 down to low. ``p``: weights of the tile before, whose values are added beside the scores.

    The products with the values run while the softmax of the next tile is computed; nothing is in flight at the end.
    """
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, _product_layout(V_COLUMNS), 2)
    rows_layout: gl.constexpr = gl.SliceLayout(1, _product_layout(V_COLUMNS))
    for n in range(high - low):
        before = step % STAGES
        phase = step // STAGES & 1
        step += 1
        stage = step % STAGES
        mbarrier.wait(k_full.index(stage), step // STAGES & 1)
        s = _scores(q_tiles, which, k_tiles, stage, BLOCK_N, QK_PANELS)
        mbarrier.wait(v_full.index(before), phase)
        p = gl.convert_layout(w.to(v_tiles.dtype), weights_layout)
        acc = warpgroup_mma(p, _values(v_tiles, before, BLOCK_N, V_COLUMNS), acc, is_async=True)
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
def _clean(v_tiles, stage, first, BLOCK_N: gl.constexpr, V_COLUMNS: gl.constexpr):
    """Write 0 to the rows of V from ``first`` on: they may be NaN, and a weight of 0 does not hide that.

    Both warpgroups do it, and write the same.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    blocks: gl.constexpr = BLOCK_N // _CLEANED
    panels: gl.constexpr = V_COLUMNS // PANEL
    rows = gl.arange(0, _CLEANED, gl.SliceLayout(1, layout))
    v = v_tiles._reinterpret(
        v_tiles.dtype, [v_tiles.shape[0] * panels * blocks, _CLEANED, PANEL], _matrix_layout(v_tiles.dtype)
    )
    for block in range(first // _CLEANED, blocks):
        for panel in gl.static_range(panels):
            part = v.index((stage * panels + panel) * blocks + block)
            exists = rows < first - block * _CLEANED
            part.store(gl.where(exists[:, None], part.load(layout), 0.0))
    fence_async_shared()
    _synchronize()


@gluon.jit
def _compute(
    tiles,
    barriers,
    given,
    which: gl.constexpr,
    D_V: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    QK_PANELS: gl.constexpr,
    V_COLUMNS: gl.constexpr,
    PACKED: gl.constexpr,
    HAS_LENGTHS: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """A computing warpgroup: 64 queries of every query tile, ``which`` says the first or the second 64."""
    q_tiles, k_tiles, v_tiles, records = tiles
    r_full, r_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    # fmt: off
    (Out, Lse, stride_ob, stride_oh, stride_om, stride_lb, stride_lh, max_seqlen_q, window_left, window_right,
     softmax_scale) = given
    # fmt: on
    scores_rows: gl.constexpr = gl.SliceLayout(1, _product_layout(BLOCK_N))
    out_rows: gl.constexpr = gl.SliceLayout(1, _product_layout(V_COLUMNS))
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, _product_layout(V_COLUMNS), 2)
    scale_log2 = softmax_scale * 1.4426950408889634
    record = 0
    tile = 0
    step = 0
    mbarrier.wait(r_full.index(0), 0)
    start_m = _read(records, 0)
    while start_m >= 0:
        at = record % _RECORDS * _FIELDS
        b = _read(records, at + 1)
        head = _read(records, at + 2)
        start_q = _read(records, at + 3)
        seqlen_q = _read(records, at + 4)
        seqlen_kv = _read(records, at + 5)
        mbarrier.arrive(r_empty.index(record % _RECORDS))
        last, whole_last, whole_first, first = _kv_tiles(
            start_m, seqlen_q, seqlen_kv, window_left, window_right, BLOCK_N, BOTTOM_RIGHT, HAS_LEFT, HAS_RIGHT
        )
        rows = start_m + which * _ROWS + gl.arange(0, _ROWS, scores_rows)
        diagonal = 0
        if BOTTOM_RIGHT:
            diagonal = seqlen_kv - seqlen_q
        limit = seqlen_kv
        if HAS_RIGHT:
            limit = gl.minimum(rows + (diagonal + window_right + 1), seqlen_kv)
        start = 0
        if HAS_LEFT:
            start = rows + (diagonal - window_left)
        acc = gl.zeros([_ROWS, V_COLUMNS], gl.float32, _product_layout(V_COLUMNS))
        row_max = gl.full([_ROWS], float("-inf"), gl.float32, scores_rows)
        row_sum = gl.zeros([_ROWS], gl.float32, scores_rows)
        if last > first:
            stage = step % STAGES
            mbarrier.wait(q_full.index(which), tile & 1)
            tile += 1
            mbarrier.wait(k_full.index(stage), step // STAGES & 1)
            s = _scores(q_tiles, which, k_tiles, stage, BLOCK_N, QK_PANELS)
            s = warpgroup_mma_wait(0, [s])
            mbarrier.arrive(k_empty.index(stage))
            if HAS_LENGTHS:
                if last * BLOCK_N > seqlen_kv:
                    mbarrier.wait(v_full.index(stage), step // STAGES & 1)
                    _clean(v_tiles, stage, seqlen_kv - (last - 1) * BLOCK_N, BLOCK_N, V_COLUMNS)
            w, row_max, _ = _weights(
                s, row_max, scale_log2, (last - 1) * BLOCK_N, limit, start, True, HAS_LEFT, HAS_RIGHT
            )
            row_sum = gl.sum(w, 1)
            # fmt: off
            if HAS_RIGHT or HAS_LENGTHS:
                acc, row_max, row_sum, w, step = _attend(
                    acc, row_max, row_sum, w, step, last - 1, whole_last, limit, start, scale_log2,
                    q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, which,
                    BLOCK_N, STAGES, QK_PANELS, V_COLUMNS, True, HAS_LEFT, HAS_RIGHT,
                )
            acc, row_max, row_sum, w, step = _attend(
                acc, row_max, row_sum, w, step, whole_last, whole_first, limit, start, scale_log2,
                q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, which,
                BLOCK_N, STAGES, QK_PANELS, V_COLUMNS, False, HAS_LEFT, HAS_RIGHT,
            )
            if HAS_LEFT:
                acc, row_max, row_sum, w, step = _attend(
                    acc, row_max, row_sum, w, step, whole_first, first, limit, start, scale_log2,
                    q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, which,
                    BLOCK_N, STAGES, QK_PANELS, V_COLUMNS, True, HAS_LEFT, HAS_RIGHT,
                )
            # fmt: on
            mbarrier.arrive(q_empty.index(which))
            stage = step % STAGES
            mbarrier.wait(v_full.index(stage), step // STAGES & 1)
            p = gl.convert_layout(w.to(v_tiles.dtype), weights_layout)
            acc = warpgroup_mma(p, _values(v_tiles, stage, BLOCK_N, V_COLUMNS), acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(v_empty.index(stage))
            step += 1
        empty = (row_sum == 0.0) | (rows >= seqlen_q)
        inverse = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, row_sum))
        lse = gl.where(empty, float("-inf"), (row_max + gl.log2(gl.where(empty, 1.0, row_sum))) * 0.6931471805599453)
        acc = acc * gl.convert_layout(inverse, out_rows)[:, None]
        if HAS_LENGTHS or HAS_LEFT or HAS_RIGHT:  # weights of 0 times a value that is not finite
            acc = gl.where(gl.convert_layout(empty, out_rows)[:, None], 0.0, acc)
        num_rows = max_seqlen_q
        if PACKED:
            num_rows = seqlen_q
        lse_base = Lse + b.to(gl.int64) * stride_lb + head.to(gl.int64) * stride_lh + start_q
        gl.store(lse_base + rows, lse, mask=rows < num_rows)
        _store(
            Out + b.to(gl.int64) * stride_ob + head.to(gl.int64) * stride_oh + start_q.to(gl.int64) * stride_om,
            acc.to(v_tiles.dtype), start_m + which * _ROWS, num_rows, stride_om, D_V,
        )
        record += 1
        mbarrier.wait(r_full.index(record % _RECORDS), record // _RECORDS & 1)
        start_m = _read(records, record % _RECORDS * _FIELDS)


@gluon.jit
def _store(base, out, first, num_rows, stride, D_V: gl.constexpr):
    layout: gl.constexpr = _store_layout(out.shape[1])
    out = gl.convert_layout(out, layout)
    rows = first + gl.arange(0, _ROWS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, out.shape[1], gl.SliceLayout(0, layout))
    mask = (rows < num_rows)[:, None]
    if out.shape[1] > D_V:
        mask = mask & (columns < D_V)[None, :]
    gl.store(base + (rows.to(gl.int64) * stride)[:, None] + columns[None, :], out, mask=mask)


@gluon.jit(do_not_specialize=["num_tiles", "num_tickets", "together", "max_seqlen_q", "max_seqlen_kv"])
def attention_forward_kernel(
    Q,
    K,
    V,
    Out,
    Lse,
    Work,
    cu_seqlens_q,
    cu_seqlens_kv,
    cu_seqlens_q_padded,
    cu_seqlens_kv_padded,
    stride_ob,
    stride_oh,
    stride_om,
    stride_lb,
    stride_lh,
    num_tiles,
    num_tickets,
    num_heads,
    group,
    together,
    max_seqlen_q,
    max_seqlen_kv,
    window_left,
    window_right,
    softmax_scale,
    D_V: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    QK_PANELS: gl.constexpr,
    V_COLUMNS: gl.constexpr,
    DYNAMIC: gl.constexpr,
    PACKED: gl.constexpr,
    HAS_LENGTHS: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """One program a multiprocessor, which takes query tiles of 128 rows until there are none.

    Q, K, V: descriptors over [B, H, S, D], packed over [1, H, T, D], of tiles [1, 1, 64, 64], [1, 1, BLOCK_N, 64] and
    [1, 1, BLOCK_N, V_COLUMNS]. Work: see plan.py; None unless PACKED or DYNAMIC.
    """
    q_tiles = gl.allocate_shared_memory(Q.dtype, [2 * QK_PANELS, 1, 1, _ROWS, PANEL], Q.layout)
    k_tiles = gl.allocate_shared_memory(Q.dtype, [STAGES * QK_PANELS, 1, 1, BLOCK_N, PANEL], K.layout)
    v_tiles = gl.allocate_shared_memory(Q.dtype, [STAGES, 1, 1, BLOCK_N, V_COLUMNS], V.layout)
    records = gl.allocate_shared_memory(gl.int32, [_RECORDS * _FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    r_full = gl.allocate_shared_memory(gl.int64, [_RECORDS, 1], barrier)
    r_empty = gl.allocate_shared_memory(gl.int64, [_RECORDS, 1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for i in gl.static_range(_RECORDS):
        mbarrier.init(r_full.index(i), count=1)
        mbarrier.init(r_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    # fmt: off
    tiles = (q_tiles, k_tiles, v_tiles, records)
    barriers = (r_full, r_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    given = (
        Out, Lse, stride_ob, stride_oh, stride_om, stride_lb, stride_lh, max_seqlen_q, window_left, window_right,
        softmax_scale,
    )
    gl.warp_specialize(
        [
            (_compute, (
                tiles, barriers, given, 0, D_V, BLOCK_N, STAGES, QK_PANELS, V_COLUMNS,
                PACKED, HAS_LENGTHS, BOTTOM_RIGHT, HAS_LEFT, HAS_RIGHT,
            )),
            (_compute, (
                tiles, barriers, given, 1, D_V, BLOCK_N, STAGES, QK_PANELS, V_COLUMNS,
                PACKED, HAS_LENGTHS, BOTTOM_RIGHT, HAS_LEFT, HAS_RIGHT,
            )),
            (_load, (
                Q, K, V, tiles, barriers, Work, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded,
                num_tiles, num_tickets, num_heads, group, together, max_seqlen_q, max_seqlen_kv, window_left, window_right,
                BLOCK_N, STAGES, QK_PANELS, V_COLUMNS, DYNAMIC,
                PACKED, HAS_LENGTHS, BOTTOM_RIGHT, HAS_LEFT, HAS_RIGHT,
            )),
        ],
        [4, 1],
        [240, REGISTERS],
    )
    # fmt: on
