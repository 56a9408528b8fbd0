"""The Hopper kernel of dQ: one warp loads, two warpgroups of 64 queries each compute.

Mathematics, the roles of the warps, and why it cannot deadlock: kernels/README.md.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mla_plugin.kernels.hopper.common import (
    FIELDS,
    PANEL,
    RECORDS,
    ROWS,
    STAGES,
    WIDE_STAGES,
    gdc_wait,
    is_wide,
    panels_of,
)
from mla_plugin.kernels.hopper.computing_q import compute_q
from mla_plugin.kernels.hopper.loading_backward import load_q


@gluon.jit(do_not_specialize=["num_tiles", "num_tickets", "together", "max_seqlen_q", "max_seqlen_kv"])
def attention_backward_q_kernel(
    Q,
    K,
    V,
    DOut,
    Lse,
    Delta,
    DQ,
    Work,
    cu_seqlens_q,
    cu_seqlens_kv,
    cu_seqlens_q_padded,
    cu_seqlens_kv_padded,
    stride_dqb,
    stride_dqh,
    stride_dqm,
    stride_lb,
    stride_lh,
    num_tiles,
    num_tickets,
    num_heads,
    group,
    together,
    max_seqlen_q,
    max_seqlen_kv,
    window_left,
    window_right,
    softmax_scale,
    QK0: gl.constexpr,
    QK1: gl.constexpr,
    V_PANELS: gl.constexpr,
    DYNAMIC: gl.constexpr,
    PACKED: gl.constexpr,
    HAS_LENGTHS: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Persistent: one program per SM takes query tiles of 128 rows until there are none left.

    Q, K, V, DOut: descriptors over [B, H, S, D], packed over [1, H, T, D], of tiles [1, 1, 64, 64]. Lse, in log2, and
    Delta: float32. Work: see plan.py; None unless PACKED or DYNAMIC. A program begins when one of the kernel of dK and
    dV, of which it reads no result, has left its SM.
    """
    panels: gl.constexpr = panels_of(QK0 + QK1)
    k_stages: gl.constexpr = WIDE_STAGES if is_wide(QK0) else STAGES
    v_stages: gl.constexpr = 1 if is_wide(QK0) else STAGES  # more do not fit into shared memory
    q_tiles = gl.allocate_shared_memory(Q.dtype, [2 * panels, 1, 1, ROWS, PANEL], Q.layout)
    d_tiles = gl.allocate_shared_memory(Q.dtype, [2 * V_PANELS, 1, 1, ROWS, PANEL], Q.layout)
    k_tiles = gl.allocate_shared_memory(Q.dtype, [k_stages * panels, 1, 1, ROWS, PANEL], Q.layout)
    v_tiles = gl.allocate_shared_memory(Q.dtype, [v_stages * V_PANELS, 1, 1, ROWS, PANEL], Q.layout)
    records = gl.allocate_shared_memory(gl.int32, [RECORDS * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    r_full = gl.allocate_shared_memory(gl.int64, [RECORDS, 1], barrier)
    r_empty = gl.allocate_shared_memory(gl.int64, [RECORDS, 1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [k_stages, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [k_stages, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [v_stages, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [v_stages, 1], barrier)
    for i in gl.static_range(RECORDS):
        mbarrier.init(r_full.index(i), count=1)
        mbarrier.init(r_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(k_stages):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
    for i in gl.static_range(v_stages):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    # fmt: off
    tiles = (q_tiles, d_tiles, k_tiles, v_tiles, records)
    barriers = (r_full, r_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    arguments = (
        Lse, Delta, DQ, stride_dqb, stride_dqh, stride_dqm, stride_lb, stride_lh, max_seqlen_q, window_left,
        window_right, softmax_scale,
    )
    gl.warp_specialize(
        [
            (compute_q, (
                tiles, barriers, arguments, 0, QK0, QK1, V_PANELS, k_stages, v_stages,
                PACKED, HAS_LENGTHS, BOTTOM_RIGHT, HAS_LEFT, HAS_RIGHT,
            )),
            (compute_q, (
                tiles, barriers, arguments, 1, QK0, QK1, V_PANELS, k_stages, v_stages,
                PACKED, HAS_LENGTHS, BOTTOM_RIGHT, HAS_LEFT, HAS_RIGHT,
            )),
            (load_q, (
                Q, K, V, DOut, tiles, barriers, Work, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded,
                cu_seqlens_kv_padded, num_tiles, num_tickets, num_heads, group, together, max_seqlen_q, max_seqlen_kv,
                window_left, window_right, panels, V_PANELS, k_stages, v_stages, DYNAMIC, PACKED, HAS_LENGTHS,
                BOTTOM_RIGHT, HAS_LEFT, HAS_RIGHT,
            )),
        ],
        [4, 1],
        [240, REGISTERS],
    )
    # fmt: on
    gdc_wait()  # for dK and dV: kernels after this one wait for this one alone
