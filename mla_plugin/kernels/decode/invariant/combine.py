"""The last kernel: combines a row's results over the chunks of its keys, always in the same order.

Mathematics and notation: kernels/README.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_plugin.kernels.decode.combine import in_order
from mla_plugin.kernels.tile_math import LN_2, LOWEST_FLOAT32


@triton.jit
def lse_of_slots(Parts, slots, num_rows, R: tl.constexpr):
    """Pointer to the slots' log-sum-exps: float32, after slots * num_rows rows of R columns, aligned."""
    elements = tl.cdiv(slots.to(tl.int64) * num_rows * R, 2) * 2
    return (Parts + elements).to(tl.pointer_type(tl.float32))


_LSE_BLOCK = tl.constexpr(64)
"""Log-sum-exps per step of the search for the maximum."""


@triton.jit(do_not_specialize=["slots"])
def combine_chunks_kernel(
    Parts,
    Plan,
    Out,
    Lse,
    num_heads,
    seqlen_q,
    slots,
    R: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    MIXED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program combines the chunks of a sequence, for BLOCK_R columns of BLOCK_ROWS rows.

    Grid: (sequences x row blocks, column blocks). Chunk after chunk is added, so the order of the sum is that of the
    chunks whatever the block sizes are; BLOCK_CHUNKS are loaded at a time. A chunk that a row does not see has weight 0
    and changes no bit. Parts is the workspace of ``chunks_kernel``:

    - the chunks' results [slots, S_q * H, R], those of a sequence one after the other;
    - their lse in log2, float32 [slots, S_q * H].

    Plan begins with the list [B], int32 pairs: (slot of the first chunk, number of chunks) of each sequence; with fewer
    than two chunks there is nothing to do.

    MIXED: the columns of the chunks' results lie as ``in_order`` says, as the Hopper kernel alone stores them. Lse may
    be None.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_rows = seqlen_q * num_heads
    row_blocks = tl.cdiv(num_rows, BLOCK_ROWS)
    b = tl.program_id(0) // row_blocks
    first, count = tl.load(Plan + 2 * b), tl.load(Plan + 2 * b + 1)
    if count < 2:
        return
    rows = tl.program_id(0) % row_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    exists = rows < num_rows
    chunks_lse = lse_of_slots(Parts, slots, num_rows, R)
    parts = first.to(tl.int64) * num_rows + rows
    # the maximum first: so weights do not depend on each other, and only the sums form a chain from chunk to chunk
    running_max = tl.full([BLOCK_ROWS, _LSE_BLOCK], LOWEST_FLOAT32, tl.float32)
    for chunk in range(0, count, _LSE_BLOCK):
        offsets = chunk + tl.arange(0, _LSE_BLOCK)
        lse_log2 = tl.load(
            chunks_lse + parts[:, None] + (offsets.to(tl.int64) * num_rows)[None, :],
            mask=exists[:, None] & (offsets < count)[None, :],
            other=float("-inf"),
        )
        running_max = tl.maximum(running_max, lse_log2)
    highest = tl.max(running_max, 1)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    out = tl.zeros([BLOCK_ROWS, BLOCK_R], tl.float32)
    for chunk in range(0, count, BLOCK_CHUNKS):
        # all loads first: the compiler leaves them where they are, and a use would wait for its load
        lse_log2, x = tl.tuple(()), tl.tuple(())
        for i in tl.static_range(BLOCK_CHUNKS):
            is_chunk = exists & (chunk + i < count)
            lse_log2 += (tl.load(chunks_lse + parts, mask=is_chunk, other=float("-inf")),)
            is_stored = is_chunk[:, None] & (columns < R)[None, :]
            x += (tl.load(Parts + parts[:, None] * R + columns[None, :], mask=is_stored, other=0.0),)
            parts += num_rows
        for i in tl.static_range(BLOCK_CHUNKS):
            weights = tl.exp2(lse_log2[i] - highest)
            total += weights
            out += x[i].to(tl.float32) * weights[:, None]
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    # a row that sees one chunk must equal that chunk's result bit for bit: exact division, and no logarithm of 1
    out *= tl.div_rn(tl.full([BLOCK_ROWS], 1.0, tl.float32), total)[:, None]
    if MIXED:
        out = in_order(out)
    out_rows = b.to(tl.int64) * num_rows + rows
    tl.store(
        Out + out_rows[:, None] * R + columns[None, :],
        out.to(Out.dtype.element_ty),
        mask=exists[:, None] & (columns < R)[None, :],
    )
    if (Lse is not None) and tl.program_id(1) == 0:
        lse_log2 = tl.where(total == 1.0, highest, highest + tl.log2(total))
        lse = tl.where(empty, float("-inf"), lse_log2 * LN_2)
        tl.store(Lse + (b.to(tl.int64) * num_heads + rows % num_heads) * seqlen_q + rows // num_heads, lse, mask=exists)
