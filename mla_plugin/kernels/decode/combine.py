"""The second kernel of decoding: the sum of a row's results over the splits of its keys.

Mathematics and notation: README.md beside this file.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def lse_of_parts(Parts, num_parts, R: tl.constexpr):
    """Where the log-sum-exps of the parts begin: float32, after num_parts rows of R columns, at an even element."""
    elements = tl.cdiv(num_parts.to(tl.int64) * R, 2) * 2
    return (Parts + elements).to(tl.pointer_type(tl.float32))


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    Parts,
    Out,
    Lse,
    num_heads,
    seqlen_q,
    num_splits,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: BLOCK_R columns of one (query, head) row, summed over the splits. Grid: (rows x sequences, columns).

    Parts is the workspace of ``decode_kernel``. The result of a split that saw no key (lse -inf) was never written,
    so it counts as 0 whatever memory holds. Lse may be None.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_rows = seqlen_q * num_heads
    row = tl.program_id(0) % num_rows
    b64 = (tl.program_id(0) // num_rows).to(tl.int64)
    splits = tl.arange(0, BLOCK_SPLITS)
    columns = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    parts = (b64 * num_splits + splits) * num_rows + row
    parts_lse = lse_of_parts(Parts, tl.num_programs(0) * num_splits, R)
    lse_log2 = tl.load(parts_lse + parts, mask=splits < num_splits, other=float("-inf"))
    exists = (splits < num_splits)[:, None] & (columns[None, :] < R)
    # not masked by the lse, which would have to arrive first
    x = tl.load(Parts + parts[:, None] * R + columns[None, :], mask=exists, other=0.0)  # [BLOCK_SPLITS, BLOCK_R]
    x = tl.where((lse_log2 != float("-inf"))[:, None], x.to(tl.float32), 0.0)
    highest = tl.max(lse_log2, 0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(lse_log2 - shift)
    total = tl.sum(weights, 0)
    empty = total == 0.0
    out = tl.sum(x * weights[:, None], 0) / tl.where(empty, 1.0, total)
    tl.store(Out + (b64 * num_rows + row) * R + columns, out.to(Out.dtype.element_ty), mask=columns < R)
    if (Lse is not None) and tl.program_id(1) == 0:
        lse = tl.where(empty, float("-inf"), (shift + tl.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453)
        tl.store(Lse + (b64 * num_heads + row % num_heads) * seqlen_q + row // num_heads, lse)
