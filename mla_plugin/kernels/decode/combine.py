"""The second kernel of decoding: the sum of a row's results over the pieces of its keys.

Mathematics and notation: README.md beside this folder.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def lse_of_parts(Parts, num_parts, num_rows, R: tl.constexpr):
    """Where the slots' log-sum-exps begin: float32, after 2 * num_parts * num_rows rows of R columns, aligned."""
    elements = tl.cdiv(num_parts.to(tl.int64) * num_rows * (2 * R), 2) * 2
    return (Parts + elements).to(tl.pointer_type(tl.float32))


@triton.jit
def list_of_cut(Parts, num_parts, num_rows, R: tl.constexpr):
    """Where the list of sequences of several pieces begins: two int32 each."""
    rows = num_parts.to(tl.int64) * num_rows * 2
    return (lse_of_parts(Parts, num_parts, num_rows, R) + rows).to(tl.pointer_type(tl.int32))


@triton.jit
def _load_pieces(
    Parts,
    parts_lse,
    pieces,
    first,
    count,
    num_parts,
    num_rows,
    rows,
    columns,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Some pieces [n, lanes] of a sequence: their lse in log2, -inf where there is no such piece, and results."""
    slots = first + tl.where(pieces == count - 1, num_parts, pieces)
    parts = slots.to(tl.int64) * num_rows + rows[None, :]
    lse_log2 = tl.load(parts_lse + parts, mask=pieces < count, other=float("-inf"))
    exists = (pieces < count)[:, :, None]
    if R % BLOCK_R != 0:
        exists = exists & (columns < R)[None, None, :]
    # not masked by the lse, which would have to arrive first
    x = tl.load(Parts + parts[:, :, None] * R + columns[None, None, :], mask=exists, other=0.0)
    return lse_log2, x.to(tl.float32)


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
    CHAINS: tl.constexpr,
    UNROLL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: BLOCK_R columns of BLOCK_ROWS rows of a sequence of several pieces, summed over them.

    Grid: (row blocks x entries of the list, column blocks). Parts is the workspace of ``decode_kernel``:

    - the pieces' results [2 * num_parts, S_q * H, R]: a sequence's last piece in slot num_parts + first, its piece k
      before in slot first + k, where no two sequences share ``first``, which is below num_parts;
    - their lse in log2, float32 [2 * num_parts, S_q * H];
    - the list, int32 pairs: (first, number of pieces) of each sequence, or, where there are more sequences than
      parts, (sequence, number of pieces) of each ``first``; fewer than two pieces mean that there is nothing to do.

    Lse may be None.

    A row's pieces are dealt out to CHAINS sums that run side by side, each with threads of its own, which meet only at
    the end. Each step loads UNROLL pieces of every sum at once, results and lse: one latency of the memory a step.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_rows = seqlen_q * num_heads
    row_blocks = tl.cdiv(num_rows, BLOCK_ROWS)
    entry = tl.program_id(0) // row_blocks
    found = list_of_cut(Parts, num_parts, num_rows, R) + 2 * entry
    other, count = tl.load(found), tl.load(found + 1)
    if count < 2:
        return
    b, first = entry, other
    if batch > num_parts:
        b, first = other, entry
    row0 = tl.program_id(0) % row_blocks * BLOCK_ROWS
    columns = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    parts_lse = lse_of_parts(Parts, num_parts, num_rows, R)
    # the rows of all chains: chain * BLOCK_ROWS + row
    lanes = tl.arange(0, CHAINS * BLOCK_ROWS)
    lane_rows = tl.minimum(row0 + lanes % BLOCK_ROWS, num_rows - 1)
    steps = tl.arange(0, UNROLL)[:, None] * CHAINS + (lanes // BLOCK_ROWS)[None, :]  # [UNROLL, lanes]
    # the first step by itself: values that the loop began with would be exchanged between threads in every step
    lse_log2, x = _load_pieces(
        Parts, parts_lse, steps, first, count, num_parts, num_rows, lane_rows, columns, R, BLOCK_R
    )
    highest = tl.maximum(tl.max(lse_log2, 0), -3.4028234663852886e38)  # finite: a chain may have no piece
    weights = tl.exp2(lse_log2 - highest[None, :])
    total = tl.sum(weights, 0)
    sums = tl.sum(x * weights[:, :, None], 0)
    for piece in range(UNROLL * CHAINS, count, UNROLL * CHAINS):
        lse_log2, x = _load_pieces(
            Parts, parts_lse, piece + steps, first, count, num_parts, num_rows, lane_rows, columns, R, BLOCK_R
        )
        higher = tl.maximum(highest, tl.max(lse_log2, 0))
        weights = tl.exp2(lse_log2 - higher[None, :])
        rescale = tl.exp2(highest - higher)
        total = total * rescale + tl.sum(weights, 0)
        sums = sums * rescale[:, None] + tl.sum(x * weights[:, :, None], 0)
        highest = higher
    highest = highest.reshape(CHAINS, BLOCK_ROWS)
    top = tl.max(highest, 0)
    weights = tl.exp2(highest - top[None, :])
    total = tl.sum(total.reshape(CHAINS, BLOCK_ROWS) * weights, 0)
    out = tl.sum(sums.reshape(CHAINS, BLOCK_ROWS, BLOCK_R) * weights[:, :, None], 0)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    rows = row0 + tl.arange(0, BLOCK_ROWS)
    out_rows = b.to(tl.int64) * num_rows + rows
    exists = (rows < num_rows)[:, None] & (columns < R)[None, :]
    out = (out / total[:, None]).to(Out.dtype.element_ty)
    tl.store(Out + out_rows[:, None] * R + columns[None, :], out, mask=exists)
    if (Lse is not None) and tl.program_id(1) == 0:
        lse = tl.where(empty, float("-inf"), (top + tl.log2(total)) * 0.6931471805599453)
        lse_rows = (b.to(tl.int64) * num_heads + rows % num_heads) * seqlen_q + rows // num_heads
        tl.store(Lse + lse_rows, lse, mask=rows < num_rows)
