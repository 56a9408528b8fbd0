"""The forward kernel: FlashAttention-2's online softmax for head_dim_qk != head_dim_v.

Mathematics and notation: kernels/README.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_plugin.kernels.tile_math import LN_2, LOG2_E, grouped_tile, load_rows, sequence, store_rows, tile_bounds


@triton.jit
def _attend(
    acc0,
    acc1,
    row_max,
    row_sum,
    q0,
    q1,
    k_base,
    v_base,
    stride_kn,
    stride_vn,
    first,
    last,
    seqlen_kv,
    query_rows,
    diagonal,
    window_left,
    window_right,
    scale_log2,
    D_QK: tl.constexpr,
    D_V: tl.constexpr,
    QK0: tl.constexpr,
    QK1: tl.constexpr,
    V0: tl.constexpr,
    V1: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Update the online softmax with the keys first .. last; MASKED tiles check lengths, diagonal and window."""
    for n in range(first, last, BLOCK_N):
        cols = n + tl.arange(0, BLOCK_N)
        k0 = load_rows(k_base, n, stride_kn, seqlen_kv, BLOCK_N, 0, QK0, D_QK, MASKED, WIDE)  # [BLOCK_N, QK0]
        s = tl.dot(q0, k0.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if QK1 > 0:
            k1 = load_rows(k_base, n, stride_kn, seqlen_kv, BLOCK_N, QK0, QK1, D_QK, MASKED, WIDE)
            s = tl.dot(q1, k1.T, s, input_precision=PRECISION)
        if MASKED:
            visible = cols[None, :] < seqlen_kv
            if HAS_RIGHT:
                visible = visible & (cols[None, :] <= query_rows[:, None] + (diagonal + window_right))
            if HAS_LEFT:
                visible = visible & (cols[None, :] >= query_rows[:, None] + (diagonal - window_left))
            s = tl.where(visible, s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
        # a row that has seen no key yet has the maximum -inf: subtract 0, because -inf - -inf is NaN
        shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        p = tl.exp2(s * scale_log2 - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc0 = acc0 * rescale[:, None]
        v0 = load_rows(v_base, n, stride_vn, seqlen_kv, BLOCK_N, 0, V0, D_V, MASKED, WIDE)  # [BLOCK_N, V0]
        acc0 = tl.dot(p.to(v0.dtype), v0, acc0, input_precision=PRECISION)
        if V1 > 0:
            acc1 = acc1 * rescale[:, None]
            v1 = load_rows(v_base, n, stride_vn, seqlen_kv, BLOCK_N, V0, V1, D_V, MASKED, WIDE)
            acc1 = tl.dot(p.to(v1.dtype), v1, acc1, input_precision=PRECISION)
        row_max = new_max
    return acc0, acc1, row_max, row_sum


@triton.jit(do_not_specialize=["heads_together"])
def attention_forward_kernel(
    Q,
    K,
    V,
    Out,
    Lse,
    cu_seqlens_q,
    cu_seqlens_kv,
    cu_seqlens_q_padded,
    cu_seqlens_kv_padded,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_ob,
    stride_oh,
    stride_om,
    stride_lb,
    stride_lh,
    num_heads,
    max_seqlen_q,
    max_seqlen_kv,
    window_left,
    window_right,
    heads_together,
    softmax_scale,
    D_QK: tl.constexpr,
    D_V: tl.constexpr,
    QK0: tl.constexpr,
    QK1: tl.constexpr,
    V0: tl.constexpr,
    V1: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One program computes BLOCK_M queries of one head of one sequence. Grid: (query tiles x heads x sequences,).

    Out is written for every row below the sequence's length; in a dense batch the rows beyond it get 0 and lse -inf.
    """
    tiles = tl.cdiv(max_seqlen_q, BLOCK_M)
    tile, bh = grouped_tile(tiles, heads_together)
    start_m = (tiles - 1 - tile) * BLOCK_M  # under a causal mask the longest rows go first
    head = bh % num_heads
    b = bh // num_heads
    start_q, seqlen_q = sequence(b, cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q, PACKED, HAS_LENGTHS)
    start_kv, seqlen_kv = sequence(b, cu_seqlens_kv, cu_seqlens_kv_padded, max_seqlen_kv, PACKED, HAS_LENGTHS)
    if PACKED:
        if start_m >= seqlen_q:
            return
    b64 = b.to(tl.int64)
    h64 = head.to(tl.int64)
    q_base = Q + b64 * stride_qb + h64 * stride_qh + start_q * stride_qm
    k_base = K + b64 * stride_kb + (h64 // GROUP) * stride_kh + start_kv * stride_kn
    v_base = V + b64 * stride_vb + (h64 // GROUP) * stride_vh + start_kv * stride_vn
    out_base = Out + b64 * stride_ob + h64 * stride_oh + start_q * stride_om

    rows = start_m + tl.arange(0, BLOCK_M)
    diagonal = 0
    if BOTTOM_RIGHT:
        diagonal = seqlen_kv - seqlen_q
    first, full_first, full_last, last = tile_bounds(
        start_m, seqlen_kv, diagonal, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    if HAS_LENGTHS:
        if start_m >= seqlen_q:  # a tile beyond the sequence's end sees nothing
            first, full_first, full_last, last = 0, 0, 0, 0

    scale_log2 = softmax_scale * LOG2_E
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc0 = tl.zeros([BLOCK_M, V0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, V1 if V1 > 0 else 1], tl.float32)
    q0 = load_rows(q_base, start_m, stride_qm, seqlen_q, BLOCK_M, 0, QK0, D_QK, True, WIDE)
    q1 = q0
    if QK1 > 0:
        q1 = load_rows(q_base, start_m, stride_qm, seqlen_q, BLOCK_M, QK0, QK1, D_QK, True, WIDE)
    # fmt: off
    if HAS_LEFT:
        acc0, acc1, row_max, row_sum = _attend(
            acc0, acc1, row_max, row_sum, q0, q1, k_base, v_base, stride_kn, stride_vn, first, full_first,
            seqlen_kv, rows, diagonal, window_left, window_right, scale_log2,
            D_QK, D_V, QK0, QK1, V0, V1, BLOCK_N, True, HAS_LEFT, HAS_RIGHT, PRECISION, WIDE,
        )
    acc0, acc1, row_max, row_sum = _attend(
        acc0, acc1, row_max, row_sum, q0, q1, k_base, v_base, stride_kn, stride_vn, full_first, full_last,
        seqlen_kv, rows, diagonal, window_left, window_right, scale_log2,
        D_QK, D_V, QK0, QK1, V0, V1, BLOCK_N, False, HAS_LEFT, HAS_RIGHT, PRECISION, WIDE,
    )
    acc0, acc1, row_max, row_sum = _attend(
        acc0, acc1, row_max, row_sum, q0, q1, k_base, v_base, stride_kn, stride_vn, full_last, last,
        seqlen_kv, rows, diagonal, window_left, window_right, scale_log2,
        D_QK, D_V, QK0, QK1, V0, V1, BLOCK_N, True, HAS_LEFT, HAS_RIGHT, PRECISION, WIDE,
    )
    # fmt: on
    empty = (row_sum == 0.0) | (rows >= seqlen_q)
    inverse = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, row_sum))
    lse = tl.where(empty, float("-inf"), (row_max + tl.log2(tl.where(empty, 1.0, row_sum))) * LN_2)
    num_rows = seqlen_q if PACKED else max_seqlen_q
    acc0 *= inverse[:, None]
    acc1 *= inverse[:, None]
    if HAS_LENGTHS or HAS_LEFT or HAS_RIGHT:  # 0 times a value that is not finite is NaN
        acc0 = tl.where(empty[:, None], 0.0, acc0)
        acc1 = tl.where(empty[:, None], 0.0, acc1)
    store_rows(out_base, start_m, stride_om, num_rows, acc0, BLOCK_M, 0, V0, D_V, WIDE)
    if V1 > 0:
        store_rows(out_base, start_m, stride_om, num_rows, acc1, BLOCK_M, V0, V1, D_V, WIDE)
    tl.store(Lse + b64 * stride_lb + h64 * stride_lh + start_q + rows, lse, mask=rows < num_rows)
