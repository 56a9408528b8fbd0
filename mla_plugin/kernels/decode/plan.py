"""The scheduler of the decode kernel: divides the key tiles of all sequences among programs, on the device.

Mathematics, and why every loop ends: kernels/README.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

SEQUENCES = tl.constexpr(256)
"""Sequences processed per step."""
SHARE_NUMBERS = tl.constexpr(4)
"""int32 values per part in the plan."""
FEW_SEQUENCES = 4
"""Up to so many, the programs of the Hopper kernels work out their parts by themselves; with 8 that takes longer."""
_FEW = tl.constexpr(FEW_SEQUENCES)
_MOST_LONGER = tl.constexpr(25)
"""A part of sequences that all cost the same may be longer by this part of it. Measured with a 32nd, where it gains."""


@triton.jit
def key_range(seqlens_kv, leftpad_kv, b, exists, capacity, BLOCK_N: tl.constexpr):
    """(first key of the first tile, first visible key, length) of the sequences ``b``; length 0 if not ``exists``.

    All are within 0 .. capacity whatever the tensors say, so that differences of them stay within int32.
    """
    length = tl.where(exists, capacity, 0)
    if seqlens_kv is not None:
        length = tl.maximum(tl.minimum(tl.load(seqlens_kv + b, mask=exists, other=0), capacity), 0)
    lowest = tl.where(exists, 0, 0)
    if leftpad_kv is not None:
        lowest = tl.minimum(tl.maximum(tl.load(leftpad_kv + b, mask=exists, other=0), 0), capacity)
    return lowest // BLOCK_N * BLOCK_N, lowest, length


@triton.jit
def tiles_between(origin, length, BLOCK_N: tl.constexpr):
    """Tiles of the keys from ``origin`` to ``length``; at least one, so that rows without keys are written."""
    return (tl.maximum(length - origin, 1) - 1) // BLOCK_N + 1


@triton.jit
def _costs(seqlens_kv, leftpad_kv, b, batch, capacity, overhead, BLOCK_N: tl.constexpr):
    """The cost of each sequence of ``b``: its tiles and ``overhead``; 0 from ``batch`` on."""
    exists = b < batch
    origin, _, length = key_range(seqlens_kv, leftpad_kv, b, exists, capacity, BLOCK_N)
    return tl.where(exists, tiles_between(origin, length, BLOCK_N) + overhead, 0)


@triton.jit
def _total(seqlens_kv, leftpad_kv, batch, capacity, overhead, BLOCK_N: tl.constexpr):
    """The cost of all sequences."""
    total = tl.cast(0, tl.int32)
    for b0 in range(0, batch, SEQUENCES):
        b = b0 + tl.arange(0, SEQUENCES)
        total += tl.sum(_costs(seqlens_kv, leftpad_kv, b, batch, capacity, overhead, BLOCK_N))
    return total


@triton.jit
def _part_size(total, first, batch, num_parts):
    """The size of a part, in tiles and overhead: ceil(total / num_parts), or up to a 25th more for equal sequences.

    They get more if each then lies in one part or is exactly several parts. Whether all sequences cost the same is told
    from their ``total`` and the ``first`` one's cost. A batch that only has this mean gets the larger size, too: any
    size from ceil(total / num_parts) on covers all tiles.
    """
    size = tl.cdiv(total, num_parts)
    # few: ``part_range_of_few`` does not do this, and both must agree; below 2**30: the last part ends at up to
    # 26 / 25 * (total + num_parts), which must be int32
    if (batch > _FEW) & (total < 2**30) & (total == first.to(tl.int64) * batch):
        pieces = tl.maximum(first // size, 1)
        whole = tl.cdiv(size, first) * first // pieces
        if (first % pieces == 0) & (whole - size <= size // _MOST_LONGER):
            size = whole
    return size


@triton.jit
def part_range(part, num_parts, seqlens_kv, leftpad_kv, batch, capacity, overhead, BLOCK_N: tl.constexpr):
    """The contiguous range of tiles that is one part; all sequences are concatenated, ``overhead`` before each.

    Returns:
        (first, last, begin, size): the part's sequences are first .. last - 1; the first one's overhead begins at
        ``begin``; the part is [part * size, (part + 1) * size).
    """
    total = _total(seqlens_kv, leftpad_kv, batch, capacity, overhead, BLOCK_N)
    cost = _costs(seqlens_kv, leftpad_kv, total * 0, batch, capacity, overhead, BLOCK_N)
    size = _part_size(total, cost, batch, num_parts)
    start = part * size
    first, last, begin, before = total * 0, total * 0, total * 0, total * 0
    for b0 in range(0, batch, SEQUENCES):
        b = b0 + tl.arange(0, SEQUENCES)
        weights = _costs(seqlens_kv, leftpad_kv, b, batch, capacity, overhead, BLOCK_N)
        ends = before + tl.cumsum(weights)
        exists = b < batch
        first += tl.sum((exists & (ends <= start)).to(tl.int32))
        last += tl.sum((exists & (ends < start + size)).to(tl.int32))
        begin = tl.maximum(begin, tl.max(tl.where(ends <= start, ends, 0)))
        before += tl.sum(weights)
    return first, tl.minimum(last + 1, batch), begin, size


@triton.jit
def part_range_of_few(part, num_parts, seqlens_kv, batch, capacity, overhead, BLOCK_N: tl.constexpr):
    """As ``part_range``, without left padding, one sequence after the other.

    Without operations across threads, so that every warp of the Gluon kernels can do it by itself:
    for up to ``FEW_SEQUENCES`` that takes less time than ``plan_kernel``.
    """
    total = capacity * 0
    for b in range(batch):
        total += _costs(seqlens_kv, None, b, batch, capacity, overhead, BLOCK_N)
    size = tl.cdiv(total, num_parts)
    start = part * size
    first, last, begin, before = total * 0, total * 0, total * 0, total * 0
    for b in range(batch):
        before += _costs(seqlens_kv, None, b, batch, capacity, overhead, BLOCK_N)
        first += (before <= start).to(tl.int32)
        last += (before < start + size).to(tl.int32)
        begin = tl.where(before <= start, before, begin)
    return first, tl.minimum(last + 1, batch), begin, size


@triton.jit
def load_plan(Plan, part):
    """``part_range`` of a part, written by ``plan_kernel``."""
    found = Plan + SHARE_NUMBERS * part
    return tl.load(found), tl.load(found + 1), tl.load(found + 2), tl.load(found + 3)


@triton.jit(do_not_specialize=["batch", "capacity", "num_parts", "overhead"])
def plan_kernel(
    Plan,
    seqlens_kv,
    leftpad_kv,
    batch,
    capacity,
    num_parts,
    overhead,
    BLOCK_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Writes Plan [parts, SHARE_NUMBERS], int32: ``part_range`` of each part. Grid: (parts,).

    It depends on nothing that differs between the layers of a step, which can share it. For
    ``decode_kernel``; also of the Gluon kernels, for more than ``FEW_SEQUENCES``. A separate kernel with WGMMA:
    reductions over threads in the same kernel make ptxas hold the addresses of the queries in 72 registers, and spill
    (CUDA 12.9; a tile took 20 % longer).
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    first, last, begin, size = part_range(part, num_parts, seqlens_kv, leftpad_kv, batch, capacity, overhead, BLOCK_N)
    found = Plan + SHARE_NUMBERS * part
    tl.store(found, first)
    tl.store(found + 1, last)
    tl.store(found + 2, begin)
    tl.store(found + 3, size)
