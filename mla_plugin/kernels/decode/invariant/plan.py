"""The scheduler of the batch-invariant kernel: divides the chunks of all sequences among programs, on the device.

Mathematics, and why every loop ends: kernels/README.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_plugin.kernels.decode.invariant.chunks import chunks_from
from mla_plugin.kernels.decode.invariant.combine import list_of_sequences
from mla_plugin.kernels.decode.plan import SEQUENCES, key_range, tiles_between

NUMBERS = tl.constexpr(5)
"""int32 values per part in the plan."""
_NONE = tl.constexpr(2**31 - 1)


@triton.jit
def _units(seqlens_kv, leftpad_kv, b, batch, capacity, CHUNK: tl.constexpr):
    """Keys of each sequence of ``b`` in units of CHUNK, rounded up, at least one; 0 from ``batch`` on."""
    exists = b < batch
    origin, _, length = key_range(seqlens_kv, leftpad_kv, b, exists, capacity, 1)
    return tl.where(exists, tiles_between(origin, length, CHUNK), 0)


@triton.jit
def _round(seqlens_kv, leftpad_kv, batch, capacity, begin, size, CHUNK: tl.constexpr):
    """The sequences of a round, those whose first chunk is in begin .. begin + size - 1.

    Returns:
        (low, high, low_unit, high_unit): their chunks are low .. high - 1, and their units low_unit .. high_unit - 1.
    """
    before = tl.cast(0, tl.int32)
    before_units = before
    low, high, low_unit, high_unit = before + _NONE, before + _NONE, before + _NONE, before + _NONE
    for b0 in range(0, batch, SEQUENCES):
        b = b0 + tl.arange(0, SEQUENCES)
        units = _units(seqlens_kv, leftpad_kv, b, batch, capacity, CHUNK)
        counts = chunks_from(units)
        starts = before + tl.cumsum(counts) - counts
        first_units = before_units + tl.cumsum(units) - units
        is_later = (b < batch) & (starts >= begin)
        is_after = (b < batch) & (starts - begin >= size)
        low = tl.minimum(low, tl.min(tl.where(is_later, starts, _NONE)))
        low_unit = tl.minimum(low_unit, tl.min(tl.where(is_later, first_units, _NONE)))
        high = tl.minimum(high, tl.min(tl.where(is_after, starts, _NONE)))
        high_unit = tl.minimum(high_unit, tl.min(tl.where(is_after, first_units, _NONE)))
        before += tl.sum(counts)
        before_units += tl.sum(units)
    return (
        tl.minimum(low, before),
        tl.minimum(high, before),
        tl.minimum(low_unit, before_units),
        tl.minimum(high_unit, before_units),
    )


@triton.jit
def chunk_range(
    part, writes, listed, num_parts, seqlens_kv, leftpad_kv, batch, capacity, begin, size, CHUNK: tl.constexpr
):
    """The contiguous range of chunks that is one part of a round; the chunks of all sequences are concatenated.

    A part has the chunks that begin within an equal share of the round's keys. The program with ``writes`` set also
    writes the list of sequences that ``combine_chunks_kernel`` describes.

    Returns:
        (first, last, slot, start, end): the part's sequences are first .. last - 1, ``slot`` is the index of the first
        one's first chunk in the round, and the part is the chunks [start, end) of the round.
    """
    low, high, low_unit, high_unit = _round(seqlens_kv, leftpad_kv, batch, capacity, begin, size, CHUNK)
    share = tl.cdiv(high_unit - low_unit, num_parts)
    start_unit = tl.minimum(low_unit + part * share, high_unit)
    end_unit = tl.minimum(start_unit + share, high_unit)
    zero = low * 0
    first, last, slot, start, end, before, before_units = zero, zero, zero, zero, zero, zero, zero
    for b0 in range(0, batch, SEQUENCES):
        b = b0 + tl.arange(0, SEQUENCES)
        units = _units(seqlens_kv, leftpad_kv, b, batch, capacity, CHUNK)
        counts = chunks_from(units)
        starts = before + tl.cumsum(counts) - counts
        first_units = before_units + tl.cumsum(units) - units
        exists = b < batch
        # chunks of each sequence that begin before the part does, and before it ends
        earlier = chunks_from(tl.minimum(tl.maximum(start_unit - first_units, 0), units))
        reached = chunks_from(tl.minimum(tl.maximum(end_unit - first_units, 0), units))
        is_earlier = exists & (earlier == counts)
        first += tl.sum(is_earlier.to(tl.int32))
        slot += tl.sum(tl.where(is_earlier, counts, 0))
        last += tl.sum((exists & (reached > 0)).to(tl.int32))
        start += tl.sum(earlier)
        end += tl.sum(reached)
        tl.store(listed + 2 * b, starts - low, mask=exists & writes)
        in_round = (starts >= low) & (starts < high)
        tl.store(listed + 2 * b + 1, tl.where(in_round, counts, 0), mask=exists & writes)
        before += tl.sum(counts)
        before_units += tl.sum(units)
    return first, last, slot - low, start - low, end - low


@triton.jit
def load_chunk_range(listed, part, batch):
    """The plan of a part, written by ``plan_chunks_kernel``."""
    found = listed + 2 * batch + NUMBERS * part
    return tl.load(found), tl.load(found + 1), tl.load(found + 2), tl.load(found + 3), tl.load(found + 4)


@triton.jit(do_not_specialize=["batch", "capacity", "num_parts", "slots", "begin", "size"])
def plan_chunks_kernel(
    Parts,
    seqlens_kv,
    leftpad_kv,
    batch,
    capacity,
    num_parts,
    slots,
    begin,
    size,
    num_rows,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Writes the plan of ``chunks_kernel`` and the list: ``chunk_range`` of each part. Grid: (parts,).

    A separate kernel with WGMMA, for the same reason as ``plan_kernel``.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    listed = list_of_sequences(Parts, slots, num_rows, R)
    first, last, slot, start, end = chunk_range(
        part, part == 0, listed, num_parts, seqlens_kv, leftpad_kv, batch, capacity, begin, size, CHUNK
    )
    plan = listed + 2 * batch + NUMBERS * part
    tl.store(plan, first)
    tl.store(plan + 1, last)
    tl.store(plan + 2, slot)
    tl.store(plan + 3, start)
    tl.store(plan + 4, end)
