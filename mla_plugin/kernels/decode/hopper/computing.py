"""The computing warpgroups (consumers) of the Hopper decode: every piece of a part, by tiles as in ``latent.py``."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mla_plugin.kernels.decode.hopper.common import lse_of_parts, piece_of, share_of_tiles
from mla_plugin.kernels.decode.hopper.queries import scale_queries
from mla_plugin.kernels.decode.hopper.storing import list_nothing, list_sequence, store_piece
from mla_plugin.kernels.hopper.common import ROWS, gdc_launch_dependents
from mla_plugin.kernels.hopper.latent import SCORES_ROWS, fold_tiles, in_float16, no_keys
from mla_plugin.kernels.hopper.latent_sums import sum_of_both
from mla_plugin.kernels.tile_math import LOG2_E


@gluon.jit
def rows_of(length, tile, num_heads, seqlen_q, CAUSAL: gl.constexpr):
    """(rows [ROWS] of a row tile, keys that each sees [ROWS], keys that all of them see) of ``length`` keys."""
    rows = tile * ROWS + gl.arange(0, ROWS, SCORES_ROWS)
    visible = gl.full([ROWS], 0, gl.int32, SCORES_ROWS) + length
    seen_by_all = length
    if CAUSAL:
        visible += rows // num_heads + 1 - seqlen_q
        seen_by_all += tile * ROWS // num_heads + 1 - seqlen_q
    return rows, visible, seen_by_all


@gluon.jit
def compute(
    seqlens_kv,
    KV_scale,
    Parts,
    Plan,
    Out,
    Lse,
    tiles,
    barriers,
    q_converted,
    softmax_scale,
    batch,
    num_heads,
    seqlen_q,
    capacity,
    num_parts,
    overhead,
    which: gl.constexpr,
    R: gl.constexpr,
    CAUSAL: gl.constexpr,
    DEPENDENT: gl.constexpr,
    FORMAT: gl.constexpr,
    PLANNED: gl.constexpr,
):
    """Computing warpgroup ``which`` over every piece of this program's part; writes half of the columns."""
    _q_tiles, _k_tiles, _p_tile, _maxima, sums = tiles
    q_full, q_empty, _k_full, _k_empty, _published, finished = barriers
    num_rows = seqlen_q * num_heads
    row_tiles = gl.cdiv(num_rows, ROWS)
    tile = gl.program_id(0) % row_tiles
    part = gl.program_id(0) // row_tiles
    scale_log2 = softmax_scale * LOG2_E
    if FORMAT == "fp8":
        scale_log2 *= gl.load(KV_scale)
    if which == 0:
        list_nothing(Parts, part, (batch > num_parts) & (tile == 0), num_parts, num_rows, R)
    first_b, last_b, at, size = share_of_tiles(Plan, seqlens_kv, part, batch, capacity, num_parts, overhead, PLANNED)
    pieces = 0
    even = 0
    odd = 0
    for b in range(first_b, last_b):
        at += overhead
        length, sequence_tiles, low, high, steps = piece_of(
            seqlens_kv, b, tile, at, size, part, batch, capacity, num_heads, seqlen_q, CAUSAL
        )
        first_part = at // size
        count = (at + sequence_tiles - 1) // size - first_part + 1
        rows, visible, seen_by_all = rows_of(length, tile, num_heads, seqlen_q, CAUSAL)
        acc, reference, row_sum = no_keys()
        total = row_sum  # 0, as no row sees a key
        if steps > 0:
            mbarrier.wait(q_full.index(0), pieces & 1)
            if in_float16(FORMAT):
                scale_queries(tiles, q_converted, scale_log2, which, Out.dtype.element_ty)
            # with a causal mask not early: over e4m3 the loop over tiles would spill up to 10 registers
            # fmt: off
            acc, reference, row_sum, even, odd = fold_tiles(
                acc, reference, row_sum, low, steps, even, odd, length, seen_by_all, visible, scale_log2, tiles,
                barriers, pieces, True, which, FORMAT, not CAUSAL,
            )
            # fmt: on
            if CAUSAL:
                mbarrier.arrive(q_empty.index(0))
            total = sum_of_both(row_sum, sums, finished, pieces, which)
            pieces += 1
        if DEPENDENT:
            if b == last_b - 1:
                gdc_launch_dependents()
        slot = gl.where(high == sequence_tiles, num_parts + first_part, part)
        # fmt: off
        store_piece(
            Parts, lse_of_parts(Parts, num_parts, num_rows, R), Out, Lse, acc, reference, total, KV_scale, rows, b,
            tile, slot, low < high, count == 1, num_heads, seqlen_q, which, R, FORMAT, False,
        )
        # fmt: on
        if which == 0:
            is_listed = (low == 0) & (high > 0) & (tile == 0)
            list_sequence(Parts, b, first_part, count, is_listed, batch, num_parts, num_rows, R)
        at += sequence_tiles
