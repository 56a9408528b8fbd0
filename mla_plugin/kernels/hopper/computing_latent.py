"""The computing warpgroups (consumers) of the Hopper forward over latents: 64 queries, half of the columns each."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mla_plugin.kernels.hopper.common import FIELDS, RECORDS, ROWS, read_record
from mla_plugin.kernels.hopper.latent import HALF, OUT_ROWS, SCORES_ROWS, fold_tiles, no_keys
from mla_plugin.kernels.hopper.latent_sums import sum_of_both
from mla_plugin.kernels.hopper.loading_latent import steps_of
from mla_plugin.kernels.hopper.panels import store
from mla_plugin.kernels.tile_math import LN_2, LOG2_E


@gluon.jit
def compute(
    tiles,
    records,
    barriers,
    record_barriers,
    arguments,
    which: gl.constexpr,
    PACKED: gl.constexpr,
    HAS_LENGTHS: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """Computing warpgroup ``which`` over every query tile of this program; writes half of the columns."""
    _q_tiles, _k_tiles, _p_tile, _maxima, sums = tiles
    q_full, _q_empty, _k_full, _k_empty, _published, finished = barriers
    r_full, r_empty = record_barriers
    # fmt: off
    (Out, Lse, stride_ob, stride_oh, stride_om, stride_lb, stride_lh, max_seqlen_q, window_right, softmax_scale,
     ) = arguments
    # fmt: on
    scale_log2 = softmax_scale * LOG2_E
    record = 0
    tile = 0
    even = 0
    odd = 0
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
        steps, seen_by_all, diagonal = steps_of(start_m, seqlen_q, seqlen_kv, window_right, BOTTOM_RIGHT, HAS_RIGHT)
        rows = start_m + gl.arange(0, ROWS, SCORES_ROWS)
        visible = gl.full([ROWS], 0, gl.int32, SCORES_ROWS) + seqlen_kv
        if HAS_RIGHT:
            visible = gl.minimum(rows + (diagonal + window_right + 1), seqlen_kv)
        acc, row_max, row_sum = no_keys()
        total = row_sum
        if steps > 0:
            mbarrier.wait(q_full.index(0), tile & 1)
            # fmt: off
            acc, row_max, row_sum, even, odd = fold_tiles(
                acc, row_max, row_sum, 0, steps, even, odd, seqlen_kv, seen_by_all, visible, scale_log2, tiles,
                barriers, tile, True, which, "plain", True,
            )
            # fmt: on
            total = sum_of_both(row_sum, sums, finished, tile, which)
            tile += 1
        empty = (total == 0.0) | (rows >= seqlen_q)
        inverse = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, total))
        acc = acc * gl.convert_layout(inverse, OUT_ROWS)[:, None]
        if HAS_LENGTHS or HAS_RIGHT:  # 0 times a value that is not finite is NaN
            acc = gl.where(gl.convert_layout(empty, OUT_ROWS)[:, None], 0.0, acc)
        num_rows = max_seqlen_q
        if PACKED:
            num_rows = seqlen_q
        if which == 0:
            lse = gl.where(empty, float("-inf"), (row_max + gl.log2(gl.where(empty, 1.0, total))) * LN_2)
            lse_base = Lse + b.to(gl.int64) * stride_lb + head.to(gl.int64) * stride_lh + start_q
            gl.store(lse_base + rows, lse, mask=rows < num_rows)
        base = Out + b.to(gl.int64) * stride_ob + head.to(gl.int64) * stride_oh + start_q.to(gl.int64) * stride_om
        store(base + which * HALF, acc, start_m, num_rows, stride_om)
        record += 1
        mbarrier.wait(r_full.index(record % RECORDS), record // RECORDS & 1)
        start_m = read_record(records, record % RECORDS * FIELDS)
