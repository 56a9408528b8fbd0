"""The preprocessing of the backward: delta and the log-sum-exp in base 2 for each query.

Mathematics and notation: kernels/README.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_plugin.kernels.tile_math import LOG2_E, load_rows


@triton.jit
def delta_kernel(
    Out,
    DOut,
    Lse,
    DLse,
    LseLog2,
    Delta,
    stride_ob,
    stride_oh,
    stride_om,
    stride_db,
    stride_dh,
    stride_dm,
    stride_lb,
    stride_lh,
    num_heads,
    num_rows,
    D_V: tl.constexpr,
    V0: tl.constexpr,
    V1: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Writes delta = rowsum(dout * out) - dlse and lse / ln(2) for BLOCK_M rows of one head.

    A row that sees no key gets lse +inf, so that its weights are 0, and delta 0 even if its gradients are not finite.
    Packed sequences are one long sequence here.
    """
    tiles = tl.cdiv(num_rows, BLOCK_M)
    start = tl.program_id(0) % tiles * BLOCK_M
    rows = start + tl.arange(0, BLOCK_M)
    h64 = (tl.program_id(0) // tiles % num_heads).to(tl.int64)
    b64 = (tl.program_id(0) // tiles // num_heads).to(tl.int64)
    out_base = Out + b64 * stride_ob + h64 * stride_oh
    dout_base = DOut + b64 * stride_db + h64 * stride_dh
    o = load_rows(out_base, start, stride_om, num_rows, BLOCK_M, 0, V0, D_V, True, WIDE).to(tl.float32)
    do = load_rows(dout_base, start, stride_dm, num_rows, BLOCK_M, 0, V0, D_V, True, WIDE).to(tl.float32)
    delta = tl.sum(o * do, 1)
    if V1 > 0:
        o = load_rows(out_base, start, stride_om, num_rows, BLOCK_M, V0, V1, D_V, True, WIDE).to(tl.float32)
        do = load_rows(dout_base, start, stride_dm, num_rows, BLOCK_M, V0, V1, D_V, True, WIDE).to(tl.float32)
        delta += tl.sum(o * do, 1)
    at = b64 * stride_lb + h64 * stride_lh + rows
    if HAS_DLSE:
        delta -= tl.load(DLse + at, mask=rows < num_rows, other=0.0)
    lse = tl.load(Lse + at, mask=rows < num_rows, other=0.0)
    sees_none = lse == float("-inf")
    tl.store(Delta + at, tl.where(sees_none, 0.0, delta), mask=rows < num_rows)
    tl.store(LseLog2 + at, tl.where(sees_none, float("inf"), lse * LOG2_E), mask=rows < num_rows)


@triton.jit
def load_row_values(Values, at, rows, num_rows, other, EVEN_M: tl.constexpr):
    """One float32 for each row; ``other`` for rows that do not exist."""
    if EVEN_M:
        return tl.load(Values + at + rows)
    else:
        return tl.load(Values + at + rows, mask=rows < num_rows, other=other)
