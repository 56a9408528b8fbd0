"""The backward kernel of dK and dV: one program for each tile of keys, no atomics.

Mathematics and notation: kernels/README.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_plugin.kernels.prefill.backward_rows import load_row_values
from mla_plugin.kernels.tile_math import LOG2_E, grouped_tile, load_tile, rows_with_keys, sequence, store_rows


@triton.jit
def attention_backward_kv_kernel(
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
    DK,
    DV,
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
    stride_dkb,
    stride_dkh,
    stride_dkn,
    stride_dvb,
    stride_dvh,
    stride_dvn,
    stride_lb,
    stride_lh,
    num_kv_heads,
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
    EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    HEADS_TOGETHER: tl.constexpr,
    WIDE: tl.constexpr,
    TMA: tl.constexpr,
):
    """One program computes dK and dV of BLOCK_N keys of one key-value head, summed over its query heads.

    Works on transposed scores (keys x queries), so that the weights are tensor-core operands in registers.
    """
    tile, bh = grouped_tile(tl.cdiv(max_seqlen_kv, BLOCK_N), HEADS_TOGETHER)
    kv_head = bh % num_kv_heads
    b = bh // num_kv_heads
    start_n = tile * BLOCK_N
    start_q, seqlen_q = sequence(b, cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q, PACKED, HAS_LENGTHS)
    start_kv, seqlen_kv = sequence(b, cu_seqlens_kv, cu_seqlens_kv_padded, max_seqlen_kv, PACKED, HAS_LENGTHS)
    if PACKED:
        if start_n >= seqlen_kv:
            return
    b64 = b.to(tl.int64)
    h64 = kv_head.to(tl.int64)
    keys = start_n + tl.arange(0, BLOCK_N)
    k_base = K
    v_base = V
    if not TMA:
        k_base = K + b64 * stride_kb + h64 * stride_kh + start_kv * stride_kn
        v_base = V + b64 * stride_vb + h64 * stride_vh + start_kv * stride_vn
    # fmt: off
    k0 = load_tile(K, b, kv_head, k_base, start_n, stride_kn, seqlen_kv, BLOCK_N, 0, QK0, D_QK, not EVEN_N, WIDE, TMA)
    k1 = k0
    if QK1 > 0:
        k1 = load_tile(
            K1, b, kv_head, k_base, start_n, stride_kn, seqlen_kv, BLOCK_N, QK0,
            QK1, D_QK, not EVEN_N, WIDE, TMA,
        )
    v0 = load_tile(V, b, kv_head, v_base, start_n, stride_vn, seqlen_kv, BLOCK_N, 0, V0, D_V, not EVEN_N, WIDE, TMA)
    v1 = v0
    if V1 > 0:
        v1 = load_tile(
            V1_, b, kv_head, v_base, start_n, stride_vn, seqlen_kv, BLOCK_N, V0,
            V1, D_V, not EVEN_N, WIDE, TMA,
        )
    # fmt: on
    dk0 = tl.zeros([BLOCK_N, QK0], tl.float32)
    dk1 = tl.zeros([BLOCK_N, QK1 if QK1 > 0 else 1], tl.float32)
    dv0 = tl.zeros([BLOCK_N, V0], tl.float32)
    dv1 = tl.zeros([BLOCK_N, V1 if V1 > 0 else 1], tl.float32)

    diagonal = 0
    if BOTTOM_RIGHT:
        diagonal = seqlen_kv - seqlen_q
    first = 0
    num_rows = seqlen_q
    if SOME_SEE_NO_KEY:
        first, num_rows = rows_with_keys(seqlen_q, seqlen_kv, diagonal, window_left, window_right, HAS_LEFT, HAS_RIGHT)
    last = num_rows
    if HAS_RIGHT:
        tile_first = tl.maximum(start_n - diagonal - window_right, 0) // BLOCK_M * BLOCK_M
        first = tl.maximum(first, tile_first) if SOME_SEE_NO_KEY else tile_first
    if HAS_LEFT:
        last = tl.minimum(last, start_n + BLOCK_N - diagonal + window_left)
    if start_n >= seqlen_kv:
        last = 0
    first_row = keys - (diagonal + window_right)  # the first query that sees a key under a causal mask
    last_row = keys - (diagonal - window_left)
    scale_log2 = softmax_scale * LOG2_E
    for g in range(GROUP):
        head = kv_head * GROUP + g
        hq64 = head.to(tl.int64)
        at = b64 * stride_lb + hq64 * stride_lh + start_q
        q_base = Q
        do_base = DOut
        if not TMA:
            q_base = Q + b64 * stride_qb + hq64 * stride_qh + start_q * stride_qm
            do_base = DOut + b64 * stride_db + hq64 * stride_dh + start_q * stride_dm
        for m in range(first, last, BLOCK_M):
            rows = m + tl.arange(0, BLOCK_M)
            q0 = load_tile(Q, b, head, q_base, m, stride_qm, num_rows, BLOCK_M, 0, QK0, D_QK, not EVEN_M, WIDE, TMA)
            sT = tl.dot(k0, q0.T, input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
            q1 = q0
            if QK1 > 0:
                q1 = load_tile(
                    Q1, b, head, q_base, m, stride_qm, num_rows, BLOCK_M, QK0, QK1, D_QK, not EVEN_M, WIDE, TMA
                )
                sT = tl.dot(k1, q1.T, sT, input_precision=PRECISION)
            lse = load_row_values(LseLog2, at, rows, num_rows, float("inf"), EVEN_M)
            pT = tl.exp2(sT * scale_log2 - lse[None, :])
            if HAS_RIGHT:
                pT = tl.where(rows[None, :] >= first_row[:, None], pT, 0.0)
            if HAS_LEFT:
                pT = tl.where(rows[None, :] <= last_row[:, None], pT, 0.0)
            do0 = load_tile(DOut, b, head, do_base, m, stride_dm, num_rows, BLOCK_M, 0, V0, D_V, not EVEN_M, WIDE, TMA)
            dv0 = tl.dot(pT.to(do0.dtype), do0, dv0, input_precision=PRECISION)
            dpT = tl.dot(v0, do0.T, input_precision=PRECISION)
            if V1 > 0:
                do1 = load_tile(
                    DOut1, b, head, do_base, m, stride_dm, num_rows, BLOCK_M, V0, V1, D_V, not EVEN_M, WIDE, TMA
                )
                dv1 = tl.dot(pT.to(do1.dtype), do1, dv1, input_precision=PRECISION)
                dpT = tl.dot(v1, do1.T, dpT, input_precision=PRECISION)
            delta = load_row_values(Delta, at, rows, num_rows, 0.0, EVEN_M)
            dsT = (pT * (dpT - delta[None, :])).to(q0.dtype)
            dk0 = tl.dot(dsT, q0, dk0, input_precision=PRECISION)
            if QK1 > 0:
                dk1 = tl.dot(dsT, q1, dk1, input_precision=PRECISION)

    exists = keys[:, None] < seqlen_kv
    num_keys = seqlen_kv if PACKED else max_seqlen_kv
    dk_base = DK + b64 * stride_dkb + h64 * stride_dkh + start_kv * stride_dkn
    dv_base = DV + b64 * stride_dvb + h64 * stride_dvh + start_kv * stride_dvn
    store_rows(dv_base, start_n, stride_dvn, num_keys, tl.where(exists, dv0, 0.0), BLOCK_N, 0, V0, D_V, WIDE)
    if V1 > 0:
        store_rows(dv_base, start_n, stride_dvn, num_keys, tl.where(exists, dv1, 0.0), BLOCK_N, V0, V1, D_V, WIDE)
    store_rows(
        dk_base, start_n, stride_dkn, num_keys, tl.where(exists, dk0 * softmax_scale, 0.0), BLOCK_N, 0, QK0, D_QK, WIDE
    )
    if QK1 > 0:
        store_rows(
            dk_base,
            start_n,
            stride_dkn,
            num_keys,
            tl.where(exists, dk1 * softmax_scale, 0.0),
            BLOCK_N,
            QK0,
            QK1,
            D_QK,
            WIDE,
        )
