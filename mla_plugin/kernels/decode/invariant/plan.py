"""The scheduler of the batch-invariant kernel: divides the chunks of all sequences among programs, on the device.

Mathematics, and why every loop ends: kernels/README.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_plugin.kernels.decode.invariant.chunks import DOUBLE, SINGLE, chunks_from
from mla_plugin.kernels.decode.plan import SEQUENCES, key_range, tiles_between

NUMBERS = tl.constexpr(5)
"""int32 values per part in the plan."""
COUNTED_KEYS = tl.constexpr(64)
"""Keys in which shares are counted; a chunk has a multiple of them."""
_MOST_ROUNDED = tl.constexpr(2**28)
"""Batches of fewer tiles, times those of CHUNK keys, may be rounded up: by less than 4 * CHUNK keys a sequence, and no
more sequences than tiles, so int32 holds the sum."""
_NONE = tl.constexpr(2**31 - 1)


@triton.jit
def _tiles(seqlens_kv, leftpad_kv, b, batch, capacity):
    """Tiles of each sequence of ``b``, at least one; 0 from ``batch`` on."""
    exists = b < batch
    origin, _, length = key_range(seqlens_kv, leftpad_kv, b, exists, capacity, 1)
    return tl.where(exists, tiles_between(origin, length, COUNTED_KEYS), 0)


@triton.jit
def _chunks_before(tiles, CHUNK: tl.constexpr):
    """How many chunks of a sequence begin within its first ``tiles``."""
    return chunks_from(tl.cdiv(tiles, CHUNK // COUNTED_KEYS))


@triton.jit
def _rounded(tiles, units: tl.constexpr, CHUNK: tl.constexpr):
    """``tiles`` rounded up to a multiple of ``units`` * CHUNK keys."""
    grain: tl.constexpr = units * (CHUNK // COUNTED_KEYS)
    return tl.cdiv(tiles, grain) * grain


@triton.jit
def _totals(seqlens_kv, leftpad_kv, batch, capacity, CHUNK: tl.constexpr):
    """Tiles of all sequences, those of the longest, and all if each is rounded up to 1, 2, 4 * CHUNK keys."""
    total = tl.cast(0, tl.int32)
    most, by_one, by_two, by_four = total, total, total, total
    for b0 in range(0, batch, SEQUENCES):
        tiles = _tiles(seqlens_kv, leftpad_kv, b0 + tl.arange(0, SEQUENCES), batch, capacity)
        total += tl.sum(tiles)
        most = tl.maximum(most, tl.max(tiles))
        by_one += tl.sum(_rounded(tiles, 1, CHUNK))
        by_two += tl.sum(_rounded(tiles, 2, CHUNK))
        by_four += tl.sum(_rounded(tiles, 4, CHUNK))
    return total, most, by_one, by_two, by_four


@triton.jit
def _round(seqlens_kv, leftpad_kv, batch, capacity, begin, size, CHUNK: tl.constexpr):
    """The sequences of a round, those whose first chunk is in begin .. begin + size - 1.

    Returns:
        (low, high, low_tile, high_tile): their chunks are low .. high - 1, and their tiles low_tile .. high_tile - 1.
    """
    before = tl.cast(0, tl.int32)
    before_tiles = before
    low, high, low_tile, high_tile = before + _NONE, before + _NONE, before + _NONE, before + _NONE
    for b0 in range(0, batch, SEQUENCES):
        b = b0 + tl.arange(0, SEQUENCES)
        tiles = _tiles(seqlens_kv, leftpad_kv, b, batch, capacity)
        counts = _chunks_before(tiles, CHUNK)
        starts = before + tl.cumsum(counts) - counts
        first_tiles = before_tiles + tl.cumsum(tiles) - tiles
        is_later = (b < batch) & (starts >= begin)
        is_after = (b < batch) & (starts - begin >= size)
        low = tl.minimum(low, tl.min(tl.where(is_later, starts, _NONE)))
        low_tile = tl.minimum(low_tile, tl.min(tl.where(is_later, first_tiles, _NONE)))
        high = tl.minimum(high, tl.min(tl.where(is_after, starts, _NONE)))
        high_tile = tl.minimum(high_tile, tl.min(tl.where(is_after, first_tiles, _NONE)))
        before += tl.sum(counts)
        before_tiles += tl.sum(tiles)
    return (
        tl.minimum(low, before),
        tl.minimum(high, before),
        tl.minimum(low_tile, before_tiles),
        tl.minimum(high_tile, before_tiles),
    )


@triton.jit
def _shorter(longest, tiles, grain, share, rounded, overhang, num_parts, candidate: tl.constexpr):
    """``longest`` and the results of ``_shares``: with the grain ``candidate`` if its longest part is shorter.

    ``rounded``: all tiles with that grain; a part may end up to ``overhang`` tiles after its share.
    """
    size = tl.cdiv(rounded // candidate, num_parts) * candidate
    if size + overhang < longest:
        longest, tiles, grain, share = size + overhang, rounded, grain * 0 + candidate, size
    return longest, tiles, grain, share


@triton.jit
def _shares(total, most, by_one, by_two, by_four, num_parts, CHUNK: tl.constexpr):
    """How a single round is divided: so that the longest part is as short as possible. Arguments: see ``_totals``.

    Parts end where chunks do, so a part may have up to a chunk less one tile beyond its share. If shares are multiples
    of the largest chunk, and sequences count as such multiples, no part goes beyond its share.

    Returns:
        (tiles, grain, share): the tiles to divide; a sequence counts as a multiple of ``grain``; a part has ``share``
        tiles, the last ones fewer; 0: parts are equal but for rounding.
    """
    unit: tl.constexpr = CHUNK // COUNTED_KEYS
    tiles, grain, share = total, total * 0 + 1, total * 0
    if total < _MOST_ROUNDED // unit:
        largest = tl.where(most <= SINGLE * unit, unit, 2 * unit)
        largest = tl.where(most <= (SINGLE + 2 * DOUBLE) * unit, largest, 4 * unit)
        # the longest of equal shares, plus one: if equal, whole chunks win, as their parts have fewer chunks
        longest = tl.cdiv(total, num_parts) + largest
        # fmt: off
        longest, tiles, grain, share = _shorter(
            longest, tiles, grain, share, by_one, largest - unit, num_parts, unit,
        )
        # fmt: on
        if largest <= 2 * unit:  # a chunk of 4 units could go beyond a share
            longest, tiles, grain, share = _shorter(longest, tiles, grain, share, by_two, 0, num_parts, 2 * unit)
        longest, tiles, grain, share = _shorter(longest, tiles, grain, share, by_four, 0, num_parts, 4 * unit)
    return tiles, grain, share


@triton.jit
def _share_of(part, num_parts, low_tile, high_tile, share):
    """(first tile, end) of a part of the tiles low_tile .. high_tile - 1; with a ``share`` low_tile is 0."""
    tiles = (high_tile - low_tile).to(tl.int64)
    start = low_tile + (tiles * part // num_parts).to(tl.int32)
    end = low_tile + (tiles * (part + 1) // num_parts).to(tl.int32)
    if share > 0:
        start = tl.minimum(part * share, high_tile)
        end = tl.minimum(start + share, high_tile)
    return start, end


@triton.jit
def _reached(tile, first_tile, tiles, CHUNK: tl.constexpr):
    """How many chunks of a sequence begin before ``tile``; its ``tiles`` begin at ``first_tile``."""
    return _chunks_before(tl.minimum(tl.maximum(tile - first_tile, 0), tiles), CHUNK)


@triton.jit
def chunk_range_of_few(part, writes, Plan, num_parts, seqlens_kv, leftpad_kv, batch, capacity, CHUNK: tl.constexpr):
    """As ``chunk_range`` in a single round of at most ``FEW_SEQUENCES``, one after the other; Plan may be None.

    Without operations across threads, for the same reason as ``part_range_of_few``.
    """
    zero = capacity * 0
    total, most, by_one, by_two, by_four = zero, zero, zero, zero, zero
    for b in range(batch):
        tiles = _tiles(seqlens_kv, leftpad_kv, b, batch, capacity)
        total += tiles
        most = tl.maximum(most, tiles)
        by_one += _rounded(tiles, 1, CHUNK)
        by_two += _rounded(tiles, 2, CHUNK)
        by_four += _rounded(tiles, 4, CHUNK)
    total, grain, share = _shares(total, most, by_one, by_two, by_four, num_parts, CHUNK)
    start_tile, end_tile = _share_of(part, num_parts, zero, total, share)
    first, last, slot, start, end, before, before_tiles = zero, zero, zero, zero, zero, zero, zero
    for b in range(batch):
        tiles = _tiles(seqlens_kv, leftpad_kv, b, batch, capacity)
        count = _chunks_before(tiles, CHUNK)
        earlier = _reached(start_tile, before_tiles, tiles, CHUNK)
        reached = _reached(end_tile, before_tiles, tiles, CHUNK)
        is_earlier = (earlier == count).to(tl.int32)
        first += is_earlier
        slot += is_earlier * count
        last += (reached > 0).to(tl.int32)
        start += earlier
        end += reached
        if Plan is not None:
            tl.store(Plan + 2 * b, before, mask=writes)
            tl.store(Plan + 2 * b + 1, count, mask=writes)
        before += count
        before_tiles += tl.cdiv(tiles, grain) * grain
    return first, last, slot, start, end


@triton.jit
def chunk_range(
    part,
    writes,
    Plan,
    num_parts,
    seqlens_kv,
    leftpad_kv,
    batch,
    capacity,
    begin,
    size,
    CHUNK: tl.constexpr,
    SINGLE_ROUND: tl.constexpr,
):
    """The contiguous range of chunks that is one part of a round; the chunks of all sequences are concatenated.

    A part has the chunks that begin within its share of the round's tiles, see ``_shares``; the last parts may have
    none. The program with ``writes`` set also writes the list of sequences that ``combine_chunks_kernel`` describes.

    Returns:
        (first, last, slot, start, end): the part's sequences are first .. last - 1, ``slot`` is the index of the first
        one's first chunk in the round, and the part is the chunks [start, end) of the round.
    """
    low, low_tile = tl.cast(0, tl.int32), tl.cast(0, tl.int32)
    high = low + _NONE
    grain, share = low + 1, low
    if SINGLE_ROUND:
        total, most, by_one, by_two, by_four = _totals(seqlens_kv, leftpad_kv, batch, capacity, CHUNK)
        high_tile, grain, share = _shares(total, most, by_one, by_two, by_four, num_parts, CHUNK)
    else:
        low, high, low_tile, high_tile = _round(seqlens_kv, leftpad_kv, batch, capacity, begin, size, CHUNK)
    start_tile, end_tile = _share_of(part, num_parts, low_tile, high_tile, share)
    zero = low * 0
    first, last, slot, start, end, before, before_tiles = zero, zero, zero, zero, zero, zero, zero
    for b0 in range(0, batch, SEQUENCES):
        b = b0 + tl.arange(0, SEQUENCES)
        tiles = _tiles(seqlens_kv, leftpad_kv, b, batch, capacity)
        counts = _chunks_before(tiles, CHUNK)
        starts = before + tl.cumsum(counts) - counts
        counted = tl.cdiv(tiles, grain) * grain
        first_tiles = before_tiles + tl.cumsum(counted) - counted
        exists = b < batch
        # chunks of each sequence that begin before the share does, and before it ends
        earlier = _reached(start_tile, first_tiles, tiles, CHUNK)
        reached = _reached(end_tile, first_tiles, tiles, CHUNK)
        is_earlier = exists & (earlier == counts)
        first += tl.sum(is_earlier.to(tl.int32))
        slot += tl.sum(tl.where(is_earlier, counts, 0))
        last += tl.sum((exists & (reached > 0)).to(tl.int32))
        start += tl.sum(earlier)
        end += tl.sum(reached)
        tl.store(Plan + 2 * b, starts - low, mask=exists & writes)
        in_round = (starts >= low) & (starts < high)
        tl.store(Plan + 2 * b + 1, tl.where(in_round, counts, 0), mask=exists & writes)
        before += tl.sum(counts)
        before_tiles += tl.sum(counted)
    return first, last, slot - low, start - low, end - low


@triton.jit
def load_chunk_range(Plan, part, batch):
    """``chunk_range`` of a part, written by ``plan_chunks_kernel``."""
    found = Plan + 2 * batch + NUMBERS * part
    return tl.load(found), tl.load(found + 1), tl.load(found + 2), tl.load(found + 3), tl.load(found + 4)


@triton.jit(do_not_specialize=["batch", "capacity", "num_parts", "begin", "size"])
def plan_chunks_kernel(
    Plan,
    seqlens_kv,
    leftpad_kv,
    batch,
    capacity,
    num_parts,
    begin,
    size,
    CHUNK: tl.constexpr,
    SINGLE_ROUND: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Writes Plan, int32: the list [B, 2], then ``chunk_range`` of each part [parts, NUMBERS]. Grid: (parts,).

    The layers of a step can share it. A separate kernel with WGMMA, for the same reason as ``plan_kernel``.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    first, last, slot, start, end = chunk_range(
        part, part == 0, Plan, num_parts, seqlens_kv, leftpad_kv, batch, capacity, begin, size, CHUNK, SINGLE_ROUND
    )
    found = Plan + 2 * batch + NUMBERS * part
    tl.store(found, first)
    tl.store(found + 1, last)
    tl.store(found + 2, slot)
    tl.store(found + 3, start)
    tl.store(found + 4, end)
