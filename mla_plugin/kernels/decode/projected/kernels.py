"""The first and the last kernel of an absorbed decode with W_UK and W_UV; see ``launch.py``.

Mathematics and notation: kernels/README.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_plugin.kernels.decode.combine import list_of_split, lse_of_parts
from mla_plugin.kernels.decode.plan import plan_kernel
from mla_plugin.kernels.tile_math import LOWEST_FLOAT32


@triton.jit(do_not_specialize=["batch", "capacity", "num_parts", "overhead"], do_not_specialize_on_alignment=["Ranges"])
def absorb_kernel(
    Q,
    W,
    Q_nope_abs,
    Plan,
    Ranges,
    Lengths,
    batch,
    capacity,
    num_parts,
    overhead,
    num_heads,
    seqlen_q,
    stride_qb,
    stride_qh,
    stride_qs,
    stride_w,
    stride_l,
    R: tl.constexpr,
    D_NOPE: tl.constexpr,
    NOPE: tl.constexpr,
    D_V: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PLANNED: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Q [B, H, S_q, D_NOPE + ..] times W_UK, to Q_nope_abs [B, S_q, H, R]; PLANNED: also ``plan_kernel``.

    Ranges, int32 [1 or 2, B] at any address, or None: the lengths, and with HAS_PADDING the first keys. They are copied
    to Lengths [2, ROWS], because the next kernel is compiled for addresses that are multiples of 16 bytes.

    Grid: (column blocks x heads, or parts if there are more of them,). W [H (D_NOPE + D_V), R] has W_UK and W_UV of
    each head, one below the other. One program computes BLOCK_R columns of one head, for all queries.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.arange(0, ROWS)
    first_keys = None
    if HAS_PADDING:
        first_keys = Ranges + stride_l
    if Ranges is not None:
        if tl.program_id(0) == 0:
            tl.store(Lengths + row, tl.load(Ranges + row, mask=row < batch, other=0))
            if HAS_PADDING:
                tl.store(Lengths + ROWS + row, tl.load(first_keys + row, mask=row < batch, other=0))
    if PLANNED:
        if tl.program_id(0) < num_parts:
            plan_kernel(Plan, Ranges, first_keys, batch, capacity, num_parts, overhead, BLOCK_N, False)
    blocks: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    head = tl.program_id(0) // blocks
    if head >= num_heads:
        return
    d = tl.arange(0, NOPE)
    column = tl.program_id(0) % blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    row64, head64 = row.to(tl.int64), head.to(tl.int64)
    queries = Q + row64 // seqlen_q * stride_qb + row64 % seqlen_q * stride_qs + head64 * stride_qh
    exists = row < batch * seqlen_q
    q = tl.load(queries[:, None] + d[None, :], mask=exists[:, None] & (d < D_NOPE)[None, :], other=0.0)
    w = W + head64 * (D_NOPE + D_V) * stride_w + (d[:, None] * stride_w + column[None, :])
    w = tl.load(w, mask=(d < D_NOPE)[:, None] & (column < R)[None, :], other=0.0)
    out = tl.dot(q, w).to(Q_nope_abs.dtype.element_ty)
    rows = row64 * num_heads + head
    tl.store(Q_nope_abs + rows[:, None] * R + column[None, :], out, mask=exists[:, None] & (column < R)[None, :])


@triton.jit
def _combined(
    Parts, Latent, b, row, num_rows, num_parts, R: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_PIECES: tl.constexpr
):
    """The latent result [COLUMNS], float32, of a row of the sequence ``b``, from one piece or more."""
    column = tl.arange(0, COLUMNS)
    found = list_of_split(Parts, num_parts, num_rows, R) + 2 * b
    first, count = tl.load(found), tl.load(found + 1)
    if count < 2:
        at = Latent + (tl.cast(b, tl.int64) * num_rows + row) * R
        latent = tl.load(at + column, mask=column < R, other=0.0).to(tl.float32)
    else:
        parts_lse = lse_of_parts(Parts, num_parts, num_rows, R)
        highest = tl.cast(LOWEST_FLOAT32, tl.float32)
        total = tl.cast(0.0, tl.float32)
        latent = tl.zeros([COLUMNS], tl.float32)
        for piece in range(0, count, BLOCK_PIECES):
            pieces = piece + tl.arange(0, BLOCK_PIECES)
            exists = pieces < count
            slots = (first + tl.where(pieces == count - 1, num_parts, pieces)).to(tl.int64) * num_rows + row
            lse_log2 = tl.load(parts_lse + slots, mask=exists, other=float("-inf"))
            x = Parts + slots[:, None] * R + column[None, :]
            x = tl.load(x, mask=exists[:, None] & (column < R)[None, :], other=0.0).to(tl.float32)
            higher = tl.maximum(highest, tl.max(lse_log2, 0))
            weights, rescale = tl.exp2(lse_log2 - higher), tl.exp2(highest - higher)
            total = total * rescale + tl.sum(weights, 0)
            latent = latent * rescale + tl.sum(x * weights[:, None], 0)
            highest = higher
        latent = latent / tl.where(total == 0.0, 1.0, total)
    return latent


@triton.jit(do_not_specialize=["batch", "num_parts"])
def values_kernel(
    Parts,
    Latent,
    W,
    Out,
    batch,
    num_heads,
    seqlen_q,
    num_parts,
    stride_w,
    R: tl.constexpr,
    COLUMNS: tl.constexpr,
    D_NOPE: tl.constexpr,
    D_V: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    COMBINES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Multiply by W_UV, to Out [B, S_q, H, D_V]; COMBINES: combine the pieces first, as ``combine_kernel`` does.

    Grid: (value blocks x heads,). One program computes BLOCK_V values of one head, for all queries. Latent
    [B, S_q, H, R] has the rows of sequences with one piece, without COMBINES all; with it there are no more sequences
    than parts.
    """
    blocks: tl.constexpr = (D_V + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // blocks
    column = tl.arange(0, COLUMNS)
    value = tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    # The weight is loaded before the wait. No kernel of this call writes it, and a kernel that wrote it before the call
    # has ended: each kernel of the call lets the next one start only after the one before it has ended.
    w = W + (head.to(tl.int64) * (D_NOPE + D_V) + D_NOPE) * stride_w + (value[:, None] * stride_w + column[None, :])
    w = tl.load(w, mask=(value < D_V)[:, None] & (column < R)[None, :], other=0.0)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.arange(0, ROWS)
    if COMBINES:
        num_rows = seqlen_q * num_heads
        latents = tl.zeros([ROWS, COLUMNS], tl.float32)
        for query in range(batch * seqlen_q):
            b, row = query // seqlen_q, query % seqlen_q * num_heads + head
            latent = _combined(Parts, Latent, b, row, num_rows, num_parts, R, COLUMNS, BLOCK_PIECES)
            latents = tl.where((rows == query)[:, None], latent[None, :], latents)
    else:
        at = Latent + (rows * num_heads + head).to(tl.int64)[:, None] * R + column[None, :]
        latents = tl.load(at, mask=(rows < batch * seqlen_q)[:, None] & (column < R)[None, :], other=0.0)
    out = tl.dot(latents.to(w.dtype), w.T).to(Out.dtype.element_ty)
    exists = (rows < batch * seqlen_q)[:, None] & (value < D_V)[None, :]
    out_rows = (rows * num_heads + head).to(tl.int64)
    tl.store(Out + out_rows[:, None] * D_V + value[None, :], out, mask=exists)
