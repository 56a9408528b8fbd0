"""The backward kernel of dQ: one program for each tile of queries, no atomics.

Mathematics and notation: kernels/README.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_plugin.kernels.prefill.backward_rows import load_row_values
from mla_plugin.kernels.tile_math import (
    LOG2_E,
    grouped_tile,
    load_tile,
    rows_with_keys,
    sequence,
    store_rows,
    tile_bounds,
)


@triton.jit
def _fold_keys(
    dq0,
    dq1,
    q0,
    q1,
    do0,
    do1,
    lse,
    delta,
    K,
    K1,
    V,
    V1_,
    b,
    kv_head,
    k_base,
    v_base,
    stride_kn,
    stride_vn,
    first,
    last,
    seqlen_kv,
    last_key,
    first_key,
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
    TMA: tl.constexpr,
):
    """Add the contribution of the keys first .. last to dQ; MASKED tiles check length, diagonal and window."""
    for n in range(first, last, BLOCK_N):
        keys = n + tl.arange(0, BLOCK_N)
        k0 = load_tile(
            K, b, kv_head, k_base, n, stride_kn, seqlen_kv, BLOCK_N, 0, QK0, D_QK, MASKED, WIDE, TMA
        )  # [BLOCK_N, QK0]
        s = tl.dot(q0, k0.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        k1 = k0
        if QK1 > 0:
            k1 = load_tile(K1, b, kv_head, k_base, n, stride_kn, seqlen_kv, BLOCK_N, QK0, QK1, D_QK, MASKED, WIDE, TMA)
            s = tl.dot(q1, k1.T, s, input_precision=PRECISION)
        v0 = load_tile(V, b, kv_head, v_base, n, stride_vn, seqlen_kv, BLOCK_N, 0, V0, D_V, MASKED, WIDE, TMA)
        dp = tl.dot(do0, v0.T, input_precision=PRECISION)
        if V1 > 0:
            v1 = load_tile(V1_, b, kv_head, v_base, n, stride_vn, seqlen_kv, BLOCK_N, V0, V1, D_V, MASKED, WIDE, TMA)
            dp = tl.dot(do1, v1.T, dp, input_precision=PRECISION)
        p = tl.exp2(s * scale_log2 - lse[:, None])
        if MASKED:
            visible = keys[None, :] < seqlen_kv
            if HAS_RIGHT:
                visible = visible & (keys[None, :] <= last_key[:, None])
            if HAS_LEFT:
                visible = visible & (keys[None, :] >= first_key[:, None])
            p = tl.where(visible, p, 0.0)
        ds = (p * (dp - delta[:, None])).to(k0.dtype)
        dq0 = tl.dot(ds, k0, dq0, input_precision=PRECISION)
        if QK1 > 0:
            dq1 = tl.dot(ds, k1, dq1, input_precision=PRECISION)
    return dq0, dq1


@triton.jit
def attention_backward_q_kernel(
    Q,
    Q1,
    K,
    K1,
    V,
    V1_,
    DOut,
    DOut1,
    LseLog2,
    Delta,
    DQ,
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
    stride_db,
    stride_dh,
    stride_dm,
    stride_dqb,
    stride_dqh,
    stride_dqm,
    stride_lb,
    stride_lh,
    num_heads,
    max_seqlen_q,
    max_seqlen_kv,
    window_left,
    window_right,
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
    SOME_SEE_NO_KEY: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADS_TOGETHER: tl.constexpr,
    WIDE: tl.constexpr,
    TMA: tl.constexpr,
):
    """One program computes dQ of BLOCK_M queries of one head."""
    tiles = tl.cdiv(max_seqlen_q, BLOCK_M)
    tile, bh = grouped_tile(tiles, HEADS_TOGETHER)
    start_m = (tiles - 1 - tile) * BLOCK_M  # under a causal mask the longest rows go first
    head = bh % num_heads
    kv_head = head // GROUP
    b = bh // num_heads
    start_q, seqlen_q = sequence(b, cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q, PACKED, HAS_LENGTHS)
    start_kv, seqlen_kv = sequence(b, cu_seqlens_kv, cu_seqlens_kv_padded, max_seqlen_kv, PACKED, HAS_LENGTHS)
    if PACKED:
        if start_m >= seqlen_q:
            return
    b64 = b.to(tl.int64)
    h64 = head.to(tl.int64)
    hkv64 = kv_head.to(tl.int64)
    rows = start_m + tl.arange(0, BLOCK_M)
    q_base, k_base, v_base, do_base = Q, K, V, DOut
    if not TMA:
        q_base = Q + b64 * stride_qb + h64 * stride_qh + start_q * stride_qm
        k_base = K + b64 * stride_kb + hkv64 * stride_kh + start_kv * stride_kn
        v_base = V + b64 * stride_vb + hkv64 * stride_vh + start_kv * stride_vn
        do_base = DOut + b64 * stride_db + h64 * stride_dh + start_q * stride_dm
    # fmt: off
    q0 = load_tile(Q, b, head, q_base, start_m, stride_qm, seqlen_q, BLOCK_M, 0, QK0, D_QK, True, WIDE, TMA)
    q1 = q0
    if QK1 > 0:
        q1 = load_tile(Q1, b, head, q_base, start_m, stride_qm, seqlen_q, BLOCK_M, QK0, QK1, D_QK, True, WIDE, TMA)
    do0 = load_tile(DOut, b, head, do_base, start_m, stride_dm, seqlen_q, BLOCK_M, 0, V0, D_V, True, WIDE, TMA)
    do1 = do0
    if V1 > 0:
        do1 = load_tile(DOut1, b, head, do_base, start_m, stride_dm, seqlen_q, BLOCK_M, V0, V1, D_V, True, WIDE, TMA)
    # fmt: on
    at = b64 * stride_lb + h64 * stride_lh + start_q
    lse = load_row_values(LseLog2, at, rows, seqlen_q, float("inf"), False)
    delta = load_row_values(Delta, at, rows, seqlen_q, 0.0, False)
    dq0 = tl.zeros([BLOCK_M, QK0], tl.float32)
    dq1 = tl.zeros([BLOCK_M, QK1 if QK1 > 0 else 1], tl.float32)

    diagonal = 0
    if BOTTOM_RIGHT:
        diagonal = seqlen_kv - seqlen_q
    first, full_first, full_last, last = tile_bounds(
        start_m, seqlen_kv, diagonal, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    if HAS_LENGTHS:
        if start_m >= seqlen_q:
            first, full_first, full_last, last = 0, 0, 0, 0
    last_key = rows + (diagonal + window_right)
    first_key = rows + (diagonal - window_left)
    scale_log2 = softmax_scale * LOG2_E
    # fmt: off
    if HAS_LEFT:
        dq0, dq1 = _fold_keys(
            dq0, dq1, q0, q1, do0, do1, lse, delta, K, K1, V, V1_, b, kv_head, k_base, v_base, stride_kn, stride_vn,
            first, full_first, seqlen_kv, last_key, first_key, scale_log2,
            D_QK, D_V, QK0, QK1, V0, V1, BLOCK_N, True, HAS_LEFT, HAS_RIGHT, PRECISION, WIDE, TMA,
        )
    dq0, dq1 = _fold_keys(
        dq0, dq1, q0, q1, do0, do1, lse, delta, K, K1, V, V1_, b, kv_head, k_base, v_base, stride_kn, stride_vn,
        full_first, full_last, seqlen_kv, last_key, first_key, scale_log2,
        D_QK, D_V, QK0, QK1, V0, V1, BLOCK_N, False, HAS_LEFT, HAS_RIGHT, PRECISION, WIDE, TMA,
    )
    dq0, dq1 = _fold_keys(
        dq0, dq1, q0, q1, do0, do1, lse, delta, K, K1, V, V1_, b, kv_head, k_base, v_base, stride_kn, stride_vn,
        full_last, last, seqlen_kv, last_key, first_key, scale_log2,
        D_QK, D_V, QK0, QK1, V0, V1, BLOCK_N, True, HAS_LEFT, HAS_RIGHT, PRECISION, WIDE, TMA,
    )
    # fmt: on
    if SOME_SEE_NO_KEY:
        lowest, highest = rows_with_keys(seqlen_q, seqlen_kv, diagonal, window_left, window_right, HAS_LEFT, HAS_RIGHT)
        sees_key = (rows >= lowest) & (rows < highest)
        dq0 = tl.where(sees_key[:, None], dq0, 0.0)
        dq1 = tl.where(sees_key[:, None], dq1, 0.0)
    num_rows = seqlen_q if PACKED else max_seqlen_q
    dq_base = DQ + b64 * stride_dqb + h64 * stride_dqh + start_q * stride_dqm
    store_rows(dq_base, start_m, stride_dqm, num_rows, dq0 * softmax_scale, BLOCK_M, 0, QK0, D_QK, WIDE)
    if QK1 > 0:
        store_rows(dq_base, start_m, stride_dqm, num_rows, dq1 * softmax_scale, BLOCK_M, QK0, QK1, D_QK, WIDE)
