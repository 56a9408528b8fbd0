"""The scheduler of the batch-invariant kernel: divides the chunks of all sequences among programs, on the device.

Mathematics, and why every loop ends: kernels/README.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_plugin.kernels.decode.invariant.combine import list_of_sequences
from mla_plugin.kernels.decode.plan import SEQUENCES, key_range, tiles_between

NUMBERS = tl.constexpr(5)
"""int32 values per part in the plan."""
_NONE = tl.constexpr(2**31 - 1)


@triton.jit
def _chunks(seqlens_kv, leftpad_kv, b, batch, capacity, CHUNK: tl.constexpr):
    """Number of chunks of each sequence of ``b``; 0 from ``batch`` on."""
    exists = b < batch
    origin, _, length = key_range(seqlens_kv, leftpad_kv, b, exists, capacity, 1)
    return tl.where(exists, tiles_between(origin, length, CHUNK), 0)


@triton.jit
def _round(seqlens_kv, leftpad_kv, batch, capacity, begin, size, CHUNK: tl.constexpr):
    """The round's chunks [low, high): those of the sequences whose first chunk is in begin .. begin + size - 1."""
    before = tl.cast(0, tl.int32)
    low, high = before + _NONE, before + _NONE
    for b0 in range(0, batch, SEQUENCES):
        b = b0 + tl.arange(0, SEQUENCES)
        counts = _chunks(seqlens_kv, leftpad_kv, b, batch, capacity, CHUNK)
        starts = before + tl.cumsum(counts) - counts
        exists = b < batch
        low = tl.minimum(low, tl.min(tl.where(exists & (starts >= begin), starts, _NONE)))
        high = tl.minimum(high, tl.min(tl.where(exists & (starts - begin >= size), starts, _NONE)))
        before += tl.sum(counts)
    return tl.minimum(low, before), tl.minimum(high, before)


@triton.jit
def chunk_range(
    part, writes, listed, num_parts, seqlens_kv, leftpad_kv, batch, capacity, begin, size, CHUNK: tl.constexpr
):
    """The contiguous range of chunks that is one part of a round; the chunks of all sequences are concatenated.

    The program with ``writes`` set also writes the list of sequences that ``combine_chunks_kernel`` describes.

    Returns:
        (first, last, slot, start, end): the part's sequences are first .. last - 1, ``slot`` is the index of the first
        one's first chunk in the round, and the part is the chunks [start, end) of the round.
    """
    low, high = _round(seqlens_kv, leftpad_kv, batch, capacity, begin, size, CHUNK)
    length = tl.cdiv(high - low, num_parts)
    start = tl.minimum(low + part * length, high)
    end = tl.minimum(start + length, high)
    first, last, slot, before = low * 0, low * 0, low, low * 0
    for b0 in range(0, batch, SEQUENCES):
        b = b0 + tl.arange(0, SEQUENCES)
        counts = _chunks(seqlens_kv, leftpad_kv, b, batch, capacity, CHUNK)
        ends = before + tl.cumsum(counts)
        starts = ends - counts
        exists = b < batch
        first += tl.sum((exists & (ends <= start)).to(tl.int32))
        last += tl.sum((exists & (starts < end)).to(tl.int32))
        slot = tl.maximum(slot, tl.max(tl.where(ends <= start, ends, 0)))
        tl.store(listed + 2 * b, starts - low, mask=exists & writes)
        in_round = (starts >= low) & (starts < high)
        tl.store(listed + 2 * b + 1, tl.where(in_round, counts, 0), mask=exists & writes)
        before += tl.sum(counts)
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
