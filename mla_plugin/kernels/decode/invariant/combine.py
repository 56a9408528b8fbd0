"""The last kernel: combines a row's results over the chunks of its keys, always in the same order.

Mathematics and notation: kernels/README.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_plugin.kernels.tile_math import LN_2, LOWEST_FLOAT32


@triton.jit
def lse_of_slots(Parts, slots, num_rows, R: tl.constexpr):
    """Pointer to the slots' log-sum-exps: float32, after slots * num_rows rows of R columns, aligned."""
    elements = tl.cdiv(slots.to(tl.int64) * num_rows * R, 2) * 2
    return (Parts + elements).to(tl.pointer_type(tl.float32))


@triton.jit
def list_of_sequences(Parts, slots, num_rows, R: tl.constexpr):
    """Pointer to the list of sequences: two int32 each."""
    return (lse_of_slots(Parts, slots, num_rows, R) + slots.to(tl.int64) * num_rows).to(tl.pointer_type(tl.int32))


@triton.jit(do_not_specialize=["slots"])
def combine_chunks_kernel(
    Parts,
    Out,
    Lse,
    num_heads,
    seqlen_q,
    slots,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    MIXED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program combines the chunks of one row of one sequence, for BLOCK_R columns.

    Grid: (sequences x rows, column blocks). Chunk after chunk is added, so the order of the sum is that of the chunks
    whatever the block sizes are; BLOCK_CHUNKS are loaded at a time. A chunk that a row does not see has weight 0 and
    changes no bit. Parts is the workspace of ``chunks_kernel``:

    - the chunks' results [slots, S_q * H, R], those of a sequence one after the other;
    - their lse in log2, float32 [slots, S_q * H];
    - the list [B], int32 pairs: (slot of the first chunk, number of chunks) of each sequence; with fewer than two
      chunks there is nothing to do;
    - the plan.

    MIXED: of each 32 columns of a result, number 8 i + 2 j + k lies at 8 j + 2 i + k (i, j < 4), where the Hopper
    kernel stores it faster. Lse may be None.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_rows = seqlen_q * num_heads
    b = tl.program_id(0) // num_rows
    row = tl.program_id(0) % num_rows
    found = list_of_sequences(Parts, slots, num_rows, R) + 2 * b
    first, count = tl.load(found), tl.load(found + 1)
    if count < 2:
        return
    columns = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    chunks_lse = lse_of_slots(Parts, slots, num_rows, R)
    highest = tl.cast(LOWEST_FLOAT32, tl.float32)
    total = tl.cast(0.0, tl.float32)
    out = tl.zeros([BLOCK_R], tl.float32)
    for chunk in range(0, count, BLOCK_CHUNKS):
        for i in tl.static_range(BLOCK_CHUNKS):
            exists = chunk + i < count
            part = (first + chunk + i).to(tl.int64) * num_rows + row
            lse_log2 = tl.load(chunks_lse + part, mask=exists, other=float("-inf"))
            # not masked by the lse: the load would have to wait for it
            x = tl.load(Parts + part * R + columns, mask=exists & (columns < R), other=0.0)
            higher = tl.maximum(highest, lse_log2)
            weight = tl.exp2(lse_log2 - higher)
            rescale = tl.exp2(highest - higher)
            total = total * rescale + weight
            out = out * rescale + x.to(tl.float32) * weight
            highest = higher
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    out_row = b.to(tl.int64) * num_rows + row
    # a row that sees one chunk must equal that chunk's result bit for bit: exact division, and no logarithm of 1
    out = out * tl.div_rn(tl.cast(1.0, tl.float32), total) + 0.0  # -0 would depend on how many chunks were added
    if MIXED:
        out = out.reshape(BLOCK_R // 32, 4, 4, 2).permute(0, 2, 1, 3).reshape(BLOCK_R)
    tl.store(Out + out_row * R + columns, out.to(Out.dtype.element_ty), mask=columns < R)
    if (Lse is not None) and tl.program_id(1) == 0:
        lse_log2 = tl.where(total == 1.0, highest, highest + tl.log2(total))
        lse = tl.where(empty, float("-inf"), lse_log2 * LN_2)
        tl.store(Lse + (b.to(tl.int64) * num_heads + row % num_heads) * seqlen_q + row // num_heads, lse)
