"""The second kernel of decoding: combines a row's partial results over the pieces of its keys.

Mathematics and notation: kernels/README.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_plugin.kernels.tile_math import LN_2, LOWEST_FLOAT32


@triton.jit
def lse_of_parts(Parts, num_parts, num_rows, R: tl.constexpr):
    """Pointer to the slots' log-sum-exps: float32, after 2 * num_parts * num_rows rows of R columns, aligned."""
    elements = tl.cdiv(num_parts.to(tl.int64) * num_rows * (2 * R), 2) * 2
    return (Parts + elements).to(tl.pointer_type(tl.float32))


@triton.jit
def list_of_split(Parts, num_parts, num_rows, R: tl.constexpr):
    """Pointer to the list of sequences with several pieces: two int32 each."""
    rows = num_parts.to(tl.int64) * num_rows * 2
    return (lse_of_parts(Parts, num_parts, num_rows, R) + rows).to(tl.pointer_type(tl.int32))


@triton.jit
def in_order(x):
    """Mixed columns of ``x`` [BLOCK_ROWS, BLOCK_R] in their order, or columns in their order mixed; BLOCK_R: 32 n.

    Of each 32 columns, number 8 i + 2 j + k lies at 8 j + 2 i + k (i, j < 4): so the Hopper kernel stores 16 bytes a
    thread in place of 4.
    """
    BLOCK_ROWS: tl.constexpr = x.shape[0]
    BLOCK_R: tl.constexpr = x.shape[1]
    tl.static_assert(BLOCK_R % 32 == 0)
    return x.reshape([BLOCK_ROWS, BLOCK_R // 32, 4, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([BLOCK_ROWS, BLOCK_R])


@triton.jit(do_not_specialize=["batch", "num_parts"])
def combine_kernel(
    Parts,
    Out,
    Lse,
    batch,
    num_heads,
    seqlen_q,
    num_parts,
    R: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    MIXED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program combines the pieces of a sequence, for BLOCK_R columns of BLOCK_ROWS rows.

    Grid: (row blocks x entries of the list, column blocks). Parts is the workspace of ``decode_kernel``:

    - the pieces' results [2 * num_parts, S_q * H, R]: a sequence's last piece in slot num_parts + first, its piece k
      before in slot first + k, where no two sequences share ``first``, which is below num_parts;
    - their lse in log2, float32 [2 * num_parts, S_q * H];
    - the list, int32 pairs: (first, number of pieces) of each sequence, or, where there are more sequences than
      parts, (sequence, number of pieces) of each ``first``; with fewer than two pieces there is nothing to do.

    MIXED: the columns of the pieces' results lie as ``in_order`` says, as the Hopper kernel alone stores them. Lse may
    be None.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_rows = seqlen_q * num_heads
    row_blocks = tl.cdiv(num_rows, BLOCK_ROWS)
    entry = tl.program_id(0) // row_blocks
    found = list_of_split(Parts, num_parts, num_rows, R) + 2 * entry
    other, count = tl.load(found), tl.load(found + 1)
    b, first = entry, other
    if batch > num_parts:
        b, first = other, entry
    # a plan made for other lengths gives meaningless results, but must not lead outside the workspace
    if (count < 2) | (first < 0) | (count > num_parts - first):
        return
    rows = tl.program_id(0) % row_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    parts_lse = lse_of_parts(Parts, num_parts, num_rows, R)
    highest = tl.full([BLOCK_ROWS], LOWEST_FLOAT32, tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    out = tl.zeros([BLOCK_ROWS, BLOCK_R], tl.float32)
    for piece in range(0, count, BLOCK_PIECES):
        pieces = piece + tl.arange(0, BLOCK_PIECES)
        slots = first + tl.where(pieces == count - 1, num_parts, pieces)
        parts = slots.to(tl.int64)[None, :] * num_rows + rows[:, None]  # [BLOCK_ROWS, BLOCK_PIECES]
        exists = (pieces < count)[None, :] & (rows < num_rows)[:, None]
        lse_log2 = tl.load(parts_lse + parts, mask=exists, other=float("-inf"))
        exists = exists[:, :, None] & (columns < R)[None, None, :]
        # not masked by the lse: the load would have to wait for it
        x = tl.load(Parts + parts[:, :, None] * R + columns[None, None, :], mask=exists, other=0.0)
        higher = tl.maximum(highest, tl.max(lse_log2, 1))
        weights = tl.exp2(lse_log2 - higher[:, None])
        rescale = tl.exp2(highest - higher)
        total = total * rescale + tl.sum(weights, 1)
        out = out * rescale[:, None] + tl.sum(x.to(tl.float32) * weights[:, :, None], 1)
        highest = higher
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    out_rows = b.to(tl.int64) * num_rows + rows
    exists = (rows < num_rows)[:, None] & (columns < R)[None, :]
    out = (out / total[:, None]).to(Out.dtype.element_ty)
    if MIXED:
        out = in_order(out)
    tl.store(Out + out_rows[:, None] * R + columns[None, :], out, mask=exists)
    if (Lse is not None) and tl.program_id(1) == 0:
        lse = tl.where(empty, float("-inf"), (highest + tl.log2(total)) * LN_2)
        lse_rows = (b.to(tl.int64) * num_heads + rows % num_heads) * seqlen_q + rows // num_heads
        tl.store(Lse + lse_rows, lse, mask=rows < num_rows)
