"""Who works on what: the key tiles of all sequences, shared out to programs by count; worked out on the device.

Mathematics, and why every loop ends: README.md beside this folder.
"""

from __future__ import annotations

import triton
import triton.language as tl

SEQUENCES = tl.constexpr(256)
"""Sequences that are looked at together."""


@triton.jit
def key_range(seqlens_kv, leftpad_kv, b, exists, capacity, BLOCK_N: tl.constexpr):
    """(first tile's first key, first key that is seen, keys) of sequences ``b``; of those that do not exist, no key."""
    length = tl.where(exists, capacity, 0)
    if seqlens_kv is not None:
        length = tl.minimum(tl.load(seqlens_kv + b, mask=exists, other=0), capacity)
    lowest = tl.where(exists, 0, 0)
    if leftpad_kv is not None:
        lowest = tl.maximum(tl.load(leftpad_kv + b, mask=exists, other=0), 0)
    return lowest // BLOCK_N * BLOCK_N, lowest, length


@triton.jit
def tiles_between(origin, length, BLOCK_N: tl.constexpr):
    """Tiles of the keys from ``origin`` to ``length``; one where there is no key, so that its rows are written."""
    return (tl.maximum(length - origin, 1) - 1) // BLOCK_N + 1


@triton.jit
def _weights(seqlens_kv, leftpad_kv, b, batch, capacity, overhead, BLOCK_N: tl.constexpr):
    """What each of the sequences ``b`` counts: its tiles and ``overhead``; 0 from ``batch`` on."""
    exists = b < batch
    origin, _, length = key_range(seqlens_kv, leftpad_kv, b, exists, capacity, BLOCK_N)
    return tl.where(exists, tiles_between(origin, length, BLOCK_N) + overhead, 0)


@triton.jit
def share_of(part, num_parts, seqlens_kv, leftpad_kv, batch, capacity, overhead, least, BLOCK_N: tl.constexpr):
    """The run of tiles of a part, all sequences' tiles standing in one row, each after ``overhead`` empty ones.

    Returns:
        (first, last, begin, size): the part's sequences are first .. last - 1; ``begin`` is where the first of them
        begins in the row; the part is [part * size, (part + 1) * size), at least ``least`` long.
    """
    total = tl.cast(0, tl.int32)
    for b0 in range(0, batch, SEQUENCES):
        b = b0 + tl.arange(0, SEQUENCES)
        total += tl.sum(_weights(seqlens_kv, leftpad_kv, b, batch, capacity, overhead, BLOCK_N))
    size = tl.maximum(tl.cdiv(total, num_parts), least)
    start = part * size
    first, last, begin, before = total * 0, total * 0, total * 0, total * 0
    for b0 in range(0, batch, SEQUENCES):
        b = b0 + tl.arange(0, SEQUENCES)
        weights = _weights(seqlens_kv, leftpad_kv, b, batch, capacity, overhead, BLOCK_N)
        ends = before + tl.cumsum(weights)
        exists = b < batch
        first += tl.sum((exists & (ends <= start)).to(tl.int32))
        last += tl.sum((exists & (ends < start + size)).to(tl.int32))
        begin = tl.maximum(begin, tl.max(tl.where(ends <= start, ends, 0)))
        before += tl.sum(weights)
    return first, tl.minimum(last + 1, batch), begin, size
