"""Who works on what: the key tiles of all sequences, shared out to programs by count; worked out on the device.

Mathematics, and why every loop ends: README.md beside this folder.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_plugin.kernels.decode.combine import list_of_cut

SEQUENCES = tl.constexpr(256)
"""Sequences that are looked at together."""
CLASSES = tl.constexpr(16)
"""Of the lengths of last pieces, which start in the order of their class, the longest first."""


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
def _total(seqlens_kv, leftpad_kv, batch, capacity, overhead, BLOCK_N: tl.constexpr):
    """The sum of all sequences' weights."""
    total = tl.cast(0, tl.int32)
    for b0 in range(0, batch, SEQUENCES):
        b = b0 + tl.arange(0, SEQUENCES)
        total += tl.sum(_weights(seqlens_kv, leftpad_kv, b, batch, capacity, overhead, BLOCK_N))
    return total


@triton.jit
def run_of(part, num_parts, seqlens_kv, leftpad_kv, batch, capacity, overhead, BLOCK_N: tl.constexpr):
    """The run of tiles of a part, all sequences' tiles standing in one row, each after ``overhead`` empty ones.

    Returns:
        (first, last, begin, size): the part's sequences are first .. last - 1; ``begin`` is where the first of them
        begins in the row; the part is [part * size, (part + 1) * size).
    """
    total = _total(seqlens_kv, leftpad_kv, batch, capacity, overhead, BLOCK_N)
    size = tl.cdiv(total, num_parts)
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


@triton.jit
def _cut(seqlens_kv, leftpad_kv, b, batch, capacity, size, BLOCK_N: tl.constexpr):
    """Of each of the sequences ``b``: its pieces of ``size`` tiles before the last, and the class of the last.

    CLASSES stands for no piece at all, from ``batch`` on.
    """
    tiles = _weights(seqlens_kv, leftpad_kv, b, batch, capacity, 0, BLOCK_N)
    whole = (tl.maximum(tiles, 1) - 1) // size
    missing = size - (tiles - whole * size)  # to a piece of size
    return whole, tl.where(b < batch, missing // tl.cdiv(size, CLASSES), CLASSES)


@triton.jit
def piece_of(program, num_parts, slots, least, seqlens_kv, leftpad_kv, batch, capacity, BLOCK_N: tl.constexpr):
    """The piece of a program, where every sequence is cut into pieces of ``size`` tiles and a last, shorter one.

    Whole pieces come first, then the last ones by class. ``size`` makes num_parts pieces of all tiles, or ``slots``
    where that many would be below ``least`` tiles long.

    Returns:
        (b, piece, first, size): the number of the piece in its sequence; the program of the sequence's first whole
        piece; b is ``batch`` where the program has nothing to do.
    """
    total = _total(seqlens_kv, leftpad_kv, batch, capacity, 0, BLOCK_N)
    size = tl.cdiv(total, num_parts)
    size = tl.where(size < least, tl.cdiv(total, slots), size)
    classes = tl.arange(0, CLASSES)
    num_whole = total * 0
    in_class = tl.zeros([CLASSES], tl.int32)
    for b0 in range(0, batch, SEQUENCES):
        b = b0 + tl.arange(0, SEQUENCES)
        whole, of_class = _cut(seqlens_kv, leftpad_kv, b, batch, capacity, size, BLOCK_N)
        num_whole += tl.sum(whole)
        in_class += tl.sum((of_class[:, None] == classes[None, :]).to(tl.int32), 0)
    is_last = program >= num_whole
    # a last piece: of which class, and which of it
    class_ends = num_whole + tl.cumsum(in_class)
    wanted_class = tl.sum((class_ends <= program).to(tl.int32))
    class_start = tl.maximum(tl.max(tl.where(class_ends <= program, class_ends, 0)), num_whole)
    nth = program - tl.where(is_last, class_start, 0)
    found, first, before = total * 0, total * 0, total * 0
    for b0 in range(0, batch, SEQUENCES):
        b = b0 + tl.arange(0, SEQUENCES)
        whole, of_class = _cut(seqlens_kv, leftpad_kv, b, batch, capacity, size, BLOCK_N)
        counted = tl.where(is_last, (of_class == wanted_class).to(tl.int32), whole)
        ends = before + tl.cumsum(counted)
        passed = (b < batch) & (ends <= nth)
        found += tl.sum(passed.to(tl.int32))
        first += tl.sum(tl.where(passed, whole, 0))
        before += tl.sum(counted)
    return found, tl.where(is_last, -1, nth - first), first, size


@triton.jit
def _plans(Parts, batch, num_parts, num_rows, R: tl.constexpr):
    """Where the plan begins in the workspace that ``combine_kernel`` describes: four int32 a program."""
    return list_of_cut(Parts, num_parts, num_rows, R) + 2 * tl.minimum(batch, num_parts)


@triton.jit
def load_plan(Parts, program, batch, num_parts, num_rows, R: tl.constexpr):
    """What ``plan_kernel`` left for a program."""
    found = _plans(Parts, batch, num_parts, num_rows, R) + 4 * program
    return tl.load(found), tl.load(found + 1), tl.load(found + 2), tl.load(found + 3)


@triton.jit(do_not_specialize=["batch", "capacity", "num_parts", "slots", "overhead", "least"])
def plan_kernel(
    Parts,
    seqlens_kv,
    leftpad_kv,
    batch,
    capacity,
    num_parts,
    slots,
    overhead,
    least,
    num_rows,
    R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The plan of ``decode_kernel``: ``piece_of`` or ``run_of`` of each program. Grid: (programs,).

    A kernel of its own for warpgroup products: what is summed over threads in the same kernel makes the assembler hold
    the addresses of the queries in 72 registers, and spill (CUDA 12.9; a tile took 20 % longer).
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    if PIECES:
        b, piece, first, size = piece_of(
            program, num_parts, slots, least, seqlens_kv, leftpad_kv, batch, capacity, BLOCK_N
        )
    else:
        b, piece, first, size = run_of(program, num_parts, seqlens_kv, leftpad_kv, batch, capacity, overhead, BLOCK_N)
    plan = _plans(Parts, batch, num_parts, num_rows, R) + 4 * program
    tl.store(plan, b)
    tl.store(plan + 1, piece)
    tl.store(plan + 2, first)
    tl.store(plan + 3, size)
