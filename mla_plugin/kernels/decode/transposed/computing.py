"""The computing warpgroup of the transposed decode kernel: every piece of a part, with its keys as rows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla_plugin.kernels.decode.hopper.common import (
    FLOAT16_TOP,
    lse_of_parts,
    nonzero_scale,
    piece_of,
    row_factor,
    share_of_tiles,
)
from mla_plugin.kernels.decode.hopper.storing import list_nothing, list_sequence
from mla_plugin.kernels.decode.transposed.common import (
    E4M3,
    E4M3_TOP,
    KEYS,
    LOW,
    PANEL,
    PANELS,
    RANK,
    ROPE,
    STAGES,
    panel_layout,
    product_layout,
    scores_layout,
)
from mla_plugin.kernels.decode.transposed.operands import (
    STEP,
    as_columns,
    as_operand_of_scores,
    in_order_of_keys,
    key_of_rows,
    keys_of_panel,
    keys_of_rope,
    result_layout,
    values_of_step,
    zero_rows,
)
from mla_plugin.kernels.hopper.common import gdc_launch_dependents, gdc_wait, synchronize, tile_reference
from mla_plugin.kernels.tile_math import LN_2, LOG2_E, LOWEST_FLOAT32

_QUERIES = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))


@gluon.jit
def _load_rows(base, num_rows, num_heads, stride_s, stride_h, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Queries of a sequence in float32: [ROWS, COLUMNS]; rows that do not exist are 0."""
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, _QUERIES))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, _QUERIES))
    offsets = (rows // num_heads).to(gl.int64) * stride_s + (rows % num_heads).to(gl.int64) * stride_h
    exists = (rows < num_rows)[:, None] & (columns >= 0)[None, :]
    return gl.load(base + offsets[:, None] + columns[None, :], mask=exists, other=0.0).to(gl.float32)


@gluon.jit
def _store_terms(tile, x):
    """x [ROWS, columns] as two terms: rows 0 .. ROWS - 1 are its e4m3 rounding, the next ROWS the rest times LOW."""
    ROWS: gl.constexpr = x.shape[0]
    high = x.to(E4M3)
    tile.slice(0, ROWS, 0).store(high)
    tile.slice(ROWS, ROWS, 0).store(((x - high.to(gl.float32)) * LOW).to(E4M3))


@gluon.jit
def _load_queries(
    q, r, q_tile, r_tile, num_rows, num_heads, stride_qs, stride_qh, stride_rs, stride_rh, ROWS: gl.constexpr
):
    """Write a sequence's queries to shared memory, each row times a power of 2; returns its inverse.

    In float16, or, where the tiles are e4m3, in two terms.
    """
    nope = _load_rows(q, num_rows, num_heads, stride_qs, stride_qh, ROWS, RANK)
    rope = _load_rows(r, num_rows, num_heads, stride_rs, stride_rh, ROWS, ROPE)
    largest = gl.maximum(gl.max(gl.abs(nope), 1), gl.max(gl.abs(rope), 1))
    if q_tile.dtype == E4M3:
        factor, inverse = row_factor(largest, E4M3_TOP)
        _store_terms(q_tile, nope * factor[:, None])
        _store_terms(r_tile, rope * factor[:, None])
    else:
        factor, inverse = row_factor(largest, FLOAT16_TOP)
        q_tile.store(as_operand_of_scores((nope * factor[:, None]).to(gl.float16)))
        r_tile.store(as_operand_of_scores((rope * factor[:, None]).to(gl.float16)))
    fence_async_shared()
    synchronize()
    return inverse


@gluon.jit
def _scores(q_tile, r_tile, c_tiles, r_tiles, stage, ROWS: gl.constexpr):
    """keys q^T of a tile: [KEYS, ROWS]. While a product runs, the next panel is converted."""
    s = gl.zeros([KEYS, ROWS], gl.float32, product_layout(ROWS))
    s = warpgroup_mma(keys_of_rope(r_tiles, stage, ROWS), r_tile.permute((1, 0)), s, use_acc=False, is_async=True)
    for panel in gl.static_range(PANELS):
        keys = keys_of_panel(c_tiles, stage, panel, ROWS)
        q = q_tile.slice(panel * PANEL, PANEL, 1)
        s = warpgroup_mma_wait(0, [s])
        s = warpgroup_mma(keys, q.permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, [s])


@gluon.jit
def _scores_of_terms(q_tile, r_tile, c_tiles, r_tiles, stage, ROWS: gl.constexpr):
    """keys q^T of a tile over e4m3, without a conversion: [KEYS, ROWS], with the keys in order.

    One product has both terms of the queries as its columns.
    """
    s = gl.zeros([KEYS, 2 * ROWS], gl.float32, scores_layout(2 * ROWS))
    keys = r_tiles.index(stage)._reinterpret(E4M3, [KEYS, ROPE], panel_layout(ROPE))
    s = warpgroup_mma(keys, r_tile.permute((1, 0)), s, use_acc=False, is_async=True)
    keys = c_tiles.index(stage * PANELS)._reinterpret(E4M3, [KEYS, RANK], panel_layout(RANK))
    s = warpgroup_mma(keys, q_tile.permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    high, low = s.reshape([KEYS, 2, ROWS]).permute((0, 2, 1)).split()
    return gl.convert_layout(high + low * (1.0 / LOW), product_layout(ROWS))


@gluon.jit
def _store_weights(p, p_tile, is_in_order: gl.constexpr):
    """Weights [KEYS, ROWS] to shared memory, for a product; ``is_in_order``: row i is key i, not as ``key_of_rows``.

    No warp writes before all have waited for the previous product, which reads the previous weights: the maximum over
    keys, which goes over all warps, lies between.
    """
    p = p.to(gl.float16)
    p_tile.store(p if is_in_order else in_order_of_keys(p))
    fence_async_shared()
    synchronize()


@gluon.jit
def _fold_tile(
    acc, highest, reference, sums, start, length, seen_by_all, visible, scale, stage, tiles, ROWS: gl.constexpr
):
    """A tile's keys from ``start`` on into acc [RANK, ROWS] and the sums of weights [KEYS, ROWS].

    The sums are added up over keys at the end of a piece. ``highest`` and ``reference`` [ROWS]: see
    ``tile_reference``.
    """
    q_tile, r_tile, c_tiles, r_tiles, p_tile = tiles
    IS_SPLIT: gl.constexpr = q_tile.dtype == E4M3
    if IS_SPLIT:
        s = _scores_of_terms(q_tile, r_tile, c_tiles, r_tiles, stage, ROWS)
        keys = gl.arange(0, KEYS, gl.SliceLayout(1, product_layout(ROWS)))
    else:
        s = _scores(q_tile, r_tile, c_tiles, r_tiles, stage, ROWS)
        keys = key_of_rows(ROWS)
    if start + KEYS > seen_by_all:
        s = gl.where(keys[:, None] < (visible - start)[None, :], s, float("-inf"))
    new_reference, highest = tile_reference(gl.max(s, 0) * scale, reference, highest)
    p = gl.exp2(s * scale[None, :] - new_reference[None, :])
    rescale = gl.exp2(reference - new_reference)
    sums = sums * rescale[None, :] + p
    _store_weights(p, p_tile, IS_SPLIT)
    if start + KEYS > length:
        zero_rows(c_tiles, stage, length - start)
        fence_async_shared()
        synchronize()
    acc = acc * rescale[None, :]
    for step in gl.static_range(KEYS // STEP):
        values = values_of_step(c_tiles, stage, step, ROWS)
        if step > 0:
            acc = warpgroup_mma_wait(0, [acc])
        acc = warpgroup_mma(values, p_tile.slice(step * STEP, STEP, 0), acc, is_async=True)
    return acc, highest, new_reference, sums


@gluon.jit
def _store_piece(
    Parts,
    parts_lse,
    Out,
    Lse,
    acc,
    reference,
    row_sum,
    kv_scale,
    b,
    slot,
    is_written,
    is_whole,
    num_heads,
    seqlen_q,
    ROWS: gl.constexpr,
):
    """Write the results of a piece, if ``is_written``: to Out if it ``is_whole``, else to ``slot`` of Parts."""
    num_rows = seqlen_q * num_heads
    empty = row_sum == 0.0
    inverse = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, row_sum)) * kv_scale
    lse_log2 = gl.where(empty, float("-inf"), reference + gl.log2(gl.where(empty, 1.0, row_sum)))
    out = as_columns((acc * inverse[None, :]).to(Out.dtype.element_ty))
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, result_layout(ROWS)))
    columns = gl.arange(0, RANK, gl.SliceLayout(0, result_layout(ROWS)))
    base = Out + gl.cast(b, gl.int64) * num_rows * RANK
    if not is_whole:
        base = Parts + slot.to(gl.int64) * num_rows * RANK
    gl.store(base + rows[:, None] * RANK + columns[None, :], out, mask=((rows < num_rows) & is_written)[:, None])
    rows = gl.arange(0, ROWS, gl.SliceLayout(0, product_layout(ROWS)))
    exists = (rows < num_rows) & is_written
    if not is_whole:
        gl.store(parts_lse + slot.to(gl.int64) * num_rows + rows, lse_log2, mask=exists)
    elif Lse is not None:
        lse_rows = (gl.cast(b, gl.int64) * num_heads + rows % num_heads) * seqlen_q + rows // num_heads
        gl.store(Lse + lse_rows, lse_log2 * LN_2, mask=exists)


@gluon.jit
def compute(
    Q_nope_abs,
    Q_rope,
    seqlens_kv,
    KV_scale,
    Parts,
    Plan,
    Out,
    Lse,
    tiles,
    barriers,
    softmax_scale,
    batch,
    num_heads,
    seqlen_q,
    capacity,
    num_parts,
    overhead,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_rb,
    stride_rs,
    stride_rh,
    ROWS: gl.constexpr,
    CAUSAL: gl.constexpr,
    DEPENDENT: gl.constexpr,
    PLANNED: gl.constexpr,
):
    """Every piece of this program's part."""
    if DEPENDENT:
        gdc_wait()
    q_tile, r_tile, _c_tiles, _r_tiles, _p_tile = tiles
    full, empty = barriers
    num_rows = seqlen_q * num_heads
    part = gl.program_id(0)
    kv_scale = gl.load(KV_scale)
    scale_log2 = softmax_scale * LOG2_E * kv_scale
    product: gl.constexpr = product_layout(ROWS)
    row: gl.constexpr = gl.SliceLayout(0, product)
    rows = gl.arange(0, ROWS, row)
    list_nothing(Parts, part, batch > num_parts, num_parts, num_rows, RANK)
    first_b, last_b, at, size = share_of_tiles(Plan, seqlens_kv, part, batch, capacity, num_parts, overhead, PLANNED)
    used = 0
    for b in range(first_b, last_b):
        at += overhead
        length, sequence_tiles, low, high, steps = piece_of(
            seqlens_kv, b, 0, at, size, part, batch, capacity, num_heads, seqlen_q, CAUSAL
        )
        first_part = at // size
        count = (at + sequence_tiles - 1) // size - first_part + 1
        visible = gl.full([ROWS], 0, gl.int32, row) + length
        seen_by_all = length
        if CAUSAL:
            visible += rows // num_heads + 1 - seqlen_q
            seen_by_all += 1 - seqlen_q
        acc = gl.zeros([RANK, ROWS], gl.float32, product)
        reference = gl.full([ROWS], LOWEST_FLOAT32, gl.float32, row)
        highest = reference
        sums = gl.zeros([KEYS, ROWS], gl.float32, product)
        if steps > 0:
            b64 = gl.cast(b, gl.int64)
            # fmt: off
            inverse = _load_queries(
                Q_nope_abs + b64 * stride_qb, Q_rope + b64 * stride_rb, q_tile, r_tile, num_rows, num_heads,
                stride_qs, stride_qh, stride_rs, stride_rh, ROWS,
            )
            # fmt: on
            scale = nonzero_scale(gl.convert_layout(inverse, row) * scale_log2)
            for n in range(steps):
                stage = used % STAGES
                mbarrier.wait(full.index(stage), used // STAGES & 1)
                # fmt: off
                acc, highest, reference, sums = _fold_tile(
                    acc, highest, reference, sums, (low + n) * KEYS, length, seen_by_all, visible, scale, stage, tiles,
                    ROWS,
                )
                # fmt: on
                synchronize()  # all warps have read the tile; its last product runs from registers
                mbarrier.arrive(empty.index(stage))
                acc = warpgroup_mma_wait(0, [acc])
                used += 1
        if DEPENDENT:
            if b == last_b - 1:
                gdc_launch_dependents()
        row_sum = gl.sum(sums, 0)
        slot = gl.where(high == sequence_tiles, num_parts + first_part, part)
        # fmt: off
        _store_piece(
            Parts, lse_of_parts(Parts, num_parts, num_rows, RANK), Out, Lse, acc, reference, row_sum, kv_scale, b,
            slot, low < high, count == 1, num_heads, seqlen_q, ROWS,
        )
        # fmt: on
        is_listed = (low == 0) & (high > 0)
        list_sequence(Parts, b, first_part, count, is_listed, batch, num_parts, num_rows, RANK)
        at += sequence_tiles
