"""``batch_invariant`` decode by the Hopper kernel: the chunks of a part, a result for each.

The warps that load see one piece for each sequence, its tiles in all chunks of the part (``pieces.py``). So they load
on while the computing warpgroups write the result of a chunk, and the queries stay where they are.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mla_plugin.kernels.decode.hopper.common import key_range, tiles_between
from mla_plugin.kernels.decode.hopper.computing import rows_of
from mla_plugin.kernels.decode.hopper.queries import scale_queries
from mla_plugin.kernels.decode.hopper.storing import store_piece
from mla_plugin.kernels.decode.invariant import chunks, combine
from mla_plugin.kernels.decode.invariant import plan as invariant_plan
from mla_plugin.kernels.hopper.common import ROWS, gdc_launch_dependents
from mla_plugin.kernels.hopper.latent import KEYS, fold_tiles, in_float16, no_keys
from mla_plugin.kernels.hopper.latent_sums import sum_of_both
from mla_plugin.kernels.tile_math import LOG2_E

_load_chunk_range = gluon.jit(invariant_plan.load_chunk_range.fn)
_chunk_range_of_few = gluon.jit(invariant_plan.chunk_range_of_few.fn)
_lse_of_slots = gluon.jit(combine.lse_of_slots.fn)
first_key = gluon.jit(chunks.first_key.fn)
_chunks_from = gluon.jit(chunks.chunks_from.fn)


@gluon.jit
def share_of_chunks(
    Plan,
    seqlens_kv,
    leftpad_kv,
    part,
    writes,
    batch,
    capacity,
    num_parts,
    CHUNK: gl.constexpr,
    PLANNED: gl.constexpr,
):
    """(first, last, slot, start, end) of a part, see ``chunk_range``; if not PLANNED it ``writes`` the list to Plan."""
    if PLANNED:
        return _load_chunk_range(Plan, part, batch)
    else:
        return _chunk_range_of_few(part, writes, Plan, num_parts, seqlens_kv, leftpad_kv, batch, capacity, CHUNK)


@gluon.jit
def chunks_of(
    seqlens_kv,
    leftpad_kv,
    b,
    tile,
    slot,
    start,
    end,
    batch,
    capacity,
    num_heads,
    seqlen_q,
    CAUSAL: gl.constexpr,
    CHUNK: gl.constexpr,
):
    """The chunks of sequence ``b`` in this part, whose first chunk has the index ``slot``.

    Returns:
        (origin, length, last, count, low, high): the first visible key; the number of keys from there on; how many of
        them some row of row tile ``tile`` sees, none if negative; the sequence's chunks; those of this part are
        low .. high - 1.
    """
    origin, _, end_of_keys = key_range(seqlens_kv, leftpad_kv, b, b < batch, capacity, 1)
    count = _chunks_from(tiles_between(origin, end_of_keys, CHUNK))
    length = end_of_keys - origin
    last = length
    if CAUSAL:  # the last row of the tile sees most keys
        last += gl.minimum((tile * ROWS + ROWS - 1) // num_heads + 1 - seqlen_q, 0)
    return origin, length, last, count, gl.maximum(start - slot, 0), gl.minimum(end - slot, count)


@gluon.jit
def steps_between(first, stop_chunk, last, CHUNK: gl.constexpr):
    """Tiles of the keys from ``first`` to the chunk ``stop_chunk`` that some row sees, those below ``last``.

    Keys are counted from the first visible one.
    """
    keys = gl.minimum(last - first, first_key(stop_chunk, CHUNK) - first)
    return (gl.maximum(keys, 0) + KEYS - 1) // KEYS


@gluon.jit
def compute_chunks(
    seqlens_kv,
    leftpad_kv,
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
    slots,
    which: gl.constexpr,
    R: gl.constexpr,
    CAUSAL: gl.constexpr,
    DEPENDENT: gl.constexpr,
    FORMAT: gl.constexpr,
    CHUNK: gl.constexpr,
    PLANNED: gl.constexpr,
):
    """As ``compute``, with a result for each chunk of the part."""
    # otherwise a chunk could begin in stage 1, where the loading warp does not expect it
    gl.static_assert(CHUNK % (2 * KEYS) == 0)
    _q_tiles, _k_tiles, _p_tile, _maxima, sums = tiles
    q_full, q_empty, _k_full, _k_empty, _published, finished = barriers
    num_rows = seqlen_q * num_heads
    row_tiles = gl.cdiv(num_rows, ROWS)
    tile = gl.program_id(0) % row_tiles
    scale_log2 = softmax_scale * LOG2_E
    if FORMAT == "fp8":
        scale_log2 *= gl.load(KV_scale)
    part = gl.program_id(0) // row_tiles
    # not PLANNED, the warps that load write the list: with its address here ptxas would spill registers
    # fmt: off
    first_b, last_b, slot, start, end = share_of_chunks(
        Plan if PLANNED else None, seqlens_kv, leftpad_kv, part, False, batch, capacity, num_parts, CHUNK, PLANNED,
    )
    # fmt: on
    sequences = 0
    exchanges = 0
    even = 0
    odd = 0
    for b in range(first_b, last_b):
        _, length, last, count, low, high = chunks_of(
            seqlens_kv, leftpad_kv, b, tile, slot, start, end, batch, capacity, num_heads, seqlen_q, CAUSAL, CHUNK
        )
        is_loaded = (low < high) & (first_key(low, CHUNK) < last)
        if is_loaded:
            mbarrier.wait(q_full.index(0), sequences & 1)
            if in_float16(FORMAT):
                scale_queries(tiles, q_converted, scale_log2, which, Out.dtype.element_ty)
        for chunk in range(low, high):
            rows, visible, seen_by_all = rows_of(length, tile, num_heads, seqlen_q, CAUSAL)
            acc, reference, row_sum = no_keys()
            total = row_sum
            first = first_key(chunk, CHUNK)
            steps = steps_between(first, chunk + 1, last, CHUNK)
            if steps > 0:
                # of the chunks of this part that some row of the tile sees this is the last one
                releases = (chunk + 1 == high) | (first_key(chunk + 1, CHUNK) >= last)
                # with a causal mask not early: the loop over tiles would spill up to 19 registers
                # fmt: off
                acc, reference, row_sum, even, odd = fold_tiles(
                    acc, reference, row_sum, first // KEYS, steps, even, odd, length, seen_by_all, visible, scale_log2,
                    tiles, barriers, exchanges, releases, which, FORMAT, not CAUSAL,
                )
                # fmt: on
                total = sum_of_both(row_sum, sums, finished, exchanges, which)
                exchanges += 1
            if DEPENDENT:
                if slot + chunk == end - 1:
                    gdc_launch_dependents()
            # fmt: off
            store_piece(
                Parts, _lse_of_slots(Parts, slots, num_rows, R), Out, Lse, acc, reference, total, KV_scale, rows, b,
                tile, slot + chunk, True, count == 1, num_heads, seqlen_q, which, R, FORMAT, True,
            )
            # fmt: on
        if is_loaded:
            if CAUSAL:
                mbarrier.arrive(q_empty.index(0))
            sequences += 1
        slot += count
