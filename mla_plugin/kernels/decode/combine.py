"""The second kernel of decoding: the sum of a row's results over the pieces of its keys.

Mathematics and notation: README.md beside this folder.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def lse_of_parts(Parts, num_parts, R: tl.constexpr):
    """Where the log-sum-exps of the parts begin: float32, after num_parts rows of R columns, at an even element."""
    elements = tl.cdiv(num_parts.to(tl.int64) * R, 2) * 2
    return (Parts + elements).to(tl.pointer_type(tl.float32))


@triton.jit
def pieces_of(Parts, b, num_slots, num_rows, R: tl.constexpr):
    """Where the (first slot, number of pieces) of sequence ``b`` stand: two int32."""
    rows = num_slots.to(tl.int64) * num_rows
    return (lse_of_parts(Parts, rows, R) + rows).to(tl.pointer_type(tl.int32)) + 2 * b


@triton.jit(do_not_specialize=["num_slots"])
def combine_kernel(
    Parts,
    Out,
    Lse,
    num_heads,
    seqlen_q,
    num_slots,
    R: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: BLOCK_R columns of BLOCK_ROWS rows of a sequence of several pieces, summed over them.

    Grid: (row blocks x sequences, column blocks). Parts is the workspace of ``decode_kernel``: the pieces' results
    [num_slots, S_q * H, R], after them their lse in log2, float32 [num_slots, S_q * H], then (first slot, pieces) of
    each sequence, int32 [B, 2]. Lse may be None.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_rows = seqlen_q * num_heads
    row_blocks = tl.cdiv(num_rows, BLOCK_ROWS)
    b = tl.program_id(0) // row_blocks
    found = pieces_of(Parts, b, num_slots, num_rows, R)
    first, count = tl.load(found), tl.load(found + 1)
    if count < 2:
        return
    rows = tl.program_id(0) % row_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    parts_lse = lse_of_parts(Parts, num_slots.to(tl.int64) * num_rows, R)
    highest = tl.full([BLOCK_ROWS], -3.4028234663852886e38, tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    out = tl.zeros([BLOCK_ROWS, BLOCK_R], tl.float32)
    for piece in range(0, count, BLOCK_PIECES):
        pieces = piece + tl.arange(0, BLOCK_PIECES)
        slots = first + 2 * pieces + (pieces == 0).to(tl.int32)
        parts = slots.to(tl.int64)[None, :] * num_rows + rows[:, None]  # [BLOCK_ROWS, BLOCK_PIECES]
        exists = (pieces < count)[None, :] & (rows < num_rows)[:, None]
        lse_log2 = tl.load(parts_lse + parts, mask=exists, other=float("-inf"))
        exists = exists[:, :, None] & (columns < R)[None, None, :]
        # not masked by the lse, which would have to arrive first
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
    tl.store(Out + out_rows[:, None] * R + columns[None, :], (out / total[:, None]).to(Out.dtype.element_ty), exists)
    if (Lse is not None) and tl.program_id(1) == 0:
        lse = tl.where(empty, float("-inf"), (highest + tl.log2(total)) * 0.6931471805599453)
        lse_rows = (b.to(tl.int64) * num_heads + rows % num_heads) * seqlen_q + rows // num_heads
        tl.store(Lse + lse_rows, lse, mask=rows < num_rows)
