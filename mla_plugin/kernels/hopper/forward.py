"""The Hopper forward kernel: one warp loads, two warpgroups of 64 queries each compute.

Mathematics, the roles of the warps, and why it cannot deadlock: kernels/README.md.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mla_plugin.kernels.hopper.common import FIELDS, PANEL, RECORDS, ROWS, panels_of
from mla_plugin.kernels.hopper.computing import compute
from mla_plugin.kernels.hopper.loading import load


@gluon.jit(do_not_specialize=["num_tiles", "num_tickets", "together", "max_seqlen_q", "max_seqlen_kv"])
def attention_forward_kernel(
    Q,
    K,
    V,
    Out,
    Lse,
    Work,
    cu_seqlens_q,
    cu_seqlens_kv,
    cu_seqlens_q_padded,
    cu_seqlens_kv_padded,
    stride_ob,
    stride_oh,
    stride_om,
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
    D_V: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    D_QK: gl.constexpr,
    V_COLUMNS: gl.constexpr,
    AHEAD: gl.constexpr,
    DYNAMIC: gl.constexpr,
    PACKED: gl.constexpr,
    HAS_LENGTHS: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Persistent: one program per SM takes query tiles of 128 rows until there are none left.

    Q, K, V: descriptors over [B, H, S, D], packed over [1, H, T, D], of tiles [1, 1, 64, 64], [1, 1, BLOCK_N, 64] and
    [1, 1, BLOCK_N, V_COLUMNS]. Work: see plan.py; None unless PACKED or DYNAMIC.
    """
    qk_panels: gl.constexpr = panels_of(D_QK)
    q_tiles = gl.allocate_shared_memory(Q.dtype, [2 * qk_panels, 1, 1, ROWS, PANEL], Q.layout)
    k_tiles = gl.allocate_shared_memory(Q.dtype, [STAGES * qk_panels, 1, 1, BLOCK_N, PANEL], K.layout)
    v_tiles = gl.allocate_shared_memory(Q.dtype, [STAGES, 1, 1, BLOCK_N, V_COLUMNS], V.layout)
    records = gl.allocate_shared_memory(gl.int32, [RECORDS * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    r_full = gl.allocate_shared_memory(gl.int64, [RECORDS, 1], barrier)
    r_empty = gl.allocate_shared_memory(gl.int64, [RECORDS, 1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for i in gl.static_range(RECORDS):
        mbarrier.init(r_full.index(i), count=1)
        mbarrier.init(r_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    # fmt: off
    tiles = (q_tiles, k_tiles, v_tiles, records)
    barriers = (r_full, r_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    arguments = (
        Out, Lse, stride_ob, stride_oh, stride_om, stride_lb, stride_lh, max_seqlen_q, window_left, window_right,
        softmax_scale,
    )
    gl.warp_specialize(
        [
            (compute, (
                tiles, barriers, arguments, 0, D_V, BLOCK_N, STAGES, D_QK, V_COLUMNS,
                PACKED, HAS_LENGTHS, BOTTOM_RIGHT, HAS_LEFT, HAS_RIGHT,
            )),
            (compute, (
                tiles, barriers, arguments, 1, D_V, BLOCK_N, STAGES, D_QK, V_COLUMNS,
                PACKED, HAS_LENGTHS, BOTTOM_RIGHT, HAS_LEFT, HAS_RIGHT,
            )),
            (load, (
                Q, K, V, tiles, barriers, Work, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded,
                num_tiles, num_tickets, num_heads, group, together,
                max_seqlen_q, max_seqlen_kv, window_left, window_right, BLOCK_N, STAGES, qk_panels, V_COLUMNS, AHEAD,
                DYNAMIC, PACKED, HAS_LENGTHS, BOTTOM_RIGHT, HAS_LEFT, HAS_RIGHT,
            )),
        ],
        [4, 1],
        [240, REGISTERS],
    )
    # fmt: on
