"""The computing warpgroups of the wide decode kernel: every piece of a part, by tiles as in ``tiles.py``."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_plugin.kernels.decode.hopper.common import lse_of_parts, piece_of, share_of_tiles
from mla_plugin.kernels.decode.hopper.storing import list_nothing, list_sequence
from mla_plugin.kernels.decode.transposed.common import RANK
from mla_plugin.kernels.decode.wide.common import OUT_ROWS, SCORES_ROWS
from mla_plugin.kernels.decode.wide.queries import convert_queries
from mla_plugin.kernels.decode.wide.tiles import fold_tiles, no_keys
from mla_plugin.kernels.decode.wide.values import RESULT, in_columns
from mla_plugin.kernels.hopper.common import ROWS, gdc_launch_dependents, gdc_wait
from mla_plugin.kernels.hopper.latent import HALF
from mla_plugin.kernels.hopper.latent_sums import hand_over_sums, sum_of_both
from mla_plugin.kernels.tile_math import LOG2_E


@gluon.jit
def _store_half(base, acc, tile, num_rows, is_written, which: gl.constexpr):
    """Store a warpgroup's columns of row tile ``tile`` of ``num_rows`` rows of RANK contiguous elements."""
    x = in_columns(acc.to(base.dtype.element_ty))
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, RESULT))
    columns = which * HALF + gl.arange(0, HALF, gl.SliceLayout(0, RESULT))
    exists = (tile * ROWS + rows < num_rows) & is_written
    base += tile.to(gl.int64) * (ROWS * RANK)
    gl.store(base + rows[:, None] * RANK + columns[None, :], x, mask=exists[:, None])


@gluon.jit
def _store_piece(
    Parts,
    parts_lse,
    Out,
    acc,
    reference,
    row_sum,
    kv_scale,
    rows,
    b,
    tile,
    slot,
    is_written,
    is_whole,
    num_rows,
    which: gl.constexpr,
):
    """As ``store_piece`` of the Hopper kernel, with the columns in order and without the results' log-sum-exp."""
    empty = row_sum == 0.0
    inverse = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, row_sum)) * kv_scale
    acc *= gl.convert_layout(inverse, OUT_ROWS)[None, :]
    if is_whole:
        _store_half(Out + gl.cast(b, gl.int64) * num_rows * RANK, acc, tile, num_rows, is_written, which)
    else:
        slot_row = slot.to(gl.int64) * num_rows
        _store_half(Parts + slot_row * RANK, acc, tile, num_rows, is_written, which)
        if which == 0:
            lse_log2 = gl.where(empty, float("-inf"), reference + gl.log2(gl.where(empty, 1.0, row_sum)))
            gl.store(parts_lse + slot_row + rows, lse_log2, mask=(rows < num_rows) & is_written)


@gluon.jit
def compute(
    seqlens_kv,
    KV_scale,
    Parts,
    Plan,
    Out,
    tiles,
    barriers,
    softmax_scale,
    batch,
    num_heads,
    seqlen_q,
    capacity,
    num_parts,
    overhead,
    which: gl.constexpr,
    CAUSAL: gl.constexpr,
    DEPENDENT: gl.constexpr,
    PLANNED: gl.constexpr,
):
    """Computing warpgroup ``which`` over every piece of this program's part; writes half of the columns."""
    if DEPENDENT:
        gdc_wait()
    _q_tiles, _r_tiles_q, _c_tiles, _r_tiles, _p_tiles, _vectors, _largest, sums = tiles
    _full, _empty, _published, _taken, _converted, finished = barriers
    num_rows = seqlen_q * num_heads
    row_tiles = gl.cdiv(num_rows, ROWS)
    tile = gl.program_id(0) % row_tiles
    part = gl.program_id(0) // row_tiles
    kv_scale = gl.load(KV_scale)
    scale_log2 = softmax_scale * LOG2_E * kv_scale
    rows = tile * ROWS + gl.arange(0, ROWS, SCORES_ROWS)
    if which == 0:
        list_nothing(Parts, part, (batch > num_parts) & (tile == 0), num_parts, num_rows, RANK)
    first_b, last_b, at, size = share_of_tiles(Plan, seqlens_kv, part, batch, capacity, num_parts, overhead, PLANNED)
    pieces = 0
    used = 0
    even = 0
    odd = 0
    for b in range(first_b, last_b):
        at += overhead
        length, sequence_tiles, low, high, steps = piece_of(
            seqlens_kv, b, tile, at, size, part, batch, capacity, num_heads, seqlen_q, CAUSAL
        )
        first_part = at // size
        count = (at + sequence_tiles - 1) // size - first_part + 1
        visible = gl.full([ROWS], 0, gl.int32, SCORES_ROWS) + length
        seen_by_all = length
        if CAUSAL:
            visible += rows // num_heads + 1 - seqlen_q
            seen_by_all += tile * ROWS // num_heads + 1 - seqlen_q
        acc, reference, row_sum = no_keys()
        total = row_sum  # 0, as no row sees a key
        if steps > 0:
            convert_queries(tiles, barriers, used, scale_log2, which)
            acc, reference, row_sum, even, odd = fold_tiles(
                acc,
                reference,
                row_sum,
                low,
                steps,
                used + 2,
                even,
                odd,
                length,
                seen_by_all,
                visible,
                tiles,
                barriers,
                which,
            )
            used += 2 + steps
            hand_over_sums(row_sum, sums, finished, pieces, which)
            total = sum_of_both(row_sum, sums, finished, pieces, which)
            pieces += 1
        if DEPENDENT:
            if b == last_b - 1:
                gdc_launch_dependents()
        slot = gl.where(high == sequence_tiles, num_parts + first_part, part)
        # fmt: off
        _store_piece(
            Parts, lse_of_parts(Parts, num_parts, num_rows, RANK), Out, acc, reference, total, kv_scale, rows, b,
            tile, slot, low < high, count == 1, num_rows, which,
        )
        # fmt: on
        if which == 0:
            is_listed = (low == 0) & (high > 0) & (tile == 0)
            list_sequence(Parts, b, first_part, count, is_listed, batch, num_parts, num_rows, RANK)
        at += sequence_tiles
