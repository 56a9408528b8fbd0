"""The Hopper kernel of dK and dV: one warp loads, two warpgroups of 64 keys each compute.

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
    gdc_launch_dependents,
    is_wide,
    matrix_layout,
    panels_of,
)
from mla_plugin.kernels.hopper.computing_kv import compute_kv
from mla_plugin.kernels.hopper.computing_kv_wide import compute_kv_wide
from mla_plugin.kernels.hopper.loading_backward import LOADERS, load_kv


@gluon.jit
def _compute(
    tiles,
    barriers,
    exchange,
    arguments,
    which: gl.constexpr,
    QK0: gl.constexpr,
    QK1: gl.constexpr,
    V_PANELS: gl.constexpr,
    PACKED: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """A computing warpgroup."""
    if is_wide(QK0):
        compute_kv_wide(
            tiles, barriers, exchange, arguments, which, V_PANELS, PACKED, BOTTOM_RIGHT, HAS_LEFT, HAS_RIGHT
        )
    else:
        compute_kv(tiles, barriers, arguments, which, QK0, QK1, V_PANELS, PACKED, BOTTOM_RIGHT, HAS_LEFT, HAS_RIGHT)


@gluon.jit(do_not_specialize=["num_tiles", "num_tickets", "together", "max_seqlen_q", "max_seqlen_kv"])
def attention_backward_kv_kernel(
    Q,
    K,
    V,
    DOut,
    Lse,
    Delta,
    DK,
    DV,
    Work,
    cu_seqlens_q,
    cu_seqlens_kv,
    cu_seqlens_q_padded,
    cu_seqlens_kv_padded,
    stride_dkb,
    stride_dkh,
    stride_dkn,
    stride_dvb,
    stride_dvh,
    stride_dvn,
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
    """Persistent: one program per SM takes key tiles of 128 rows, with wide heads of 64, until there are none left.

    Q, K, V, DOut: descriptors over [B, H, S, D], packed over [1, H, T, D], of tiles [1, 1, 64, 64]. Lse, in log2, and
    Delta: float32. Work: see plan.py; None unless PACKED or DYNAMIC.
    """
    gdc_launch_dependents()  # dQ, which reads no result of this kernel, may start on SMs that this one leaves
    panels: gl.constexpr = panels_of(QK0 + QK1)
    wide: gl.constexpr = is_wide(QK0)
    owners: gl.constexpr = 1 if wide else 2  # warpgroups that have separate keys
    stages: gl.constexpr = WIDE_STAGES if wide else STAGES
    q_tiles = gl.allocate_shared_memory(Q.dtype, [stages * panels, 1, 1, ROWS, PANEL], Q.layout)
    d_tiles = gl.allocate_shared_memory(Q.dtype, [stages * V_PANELS, 1, 1, ROWS, PANEL], Q.layout)
    k_tiles = gl.allocate_shared_memory(Q.dtype, [owners * panels, 1, 1, ROWS, PANEL], Q.layout)
    v_tiles = gl.allocate_shared_memory(Q.dtype, [owners * V_PANELS, 1, 1, ROWS, PANEL], Q.layout)
    lse_tiles = gl.allocate_shared_memory(gl.float32, [stages, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    delta_tiles = gl.allocate_shared_memory(gl.float32, [stages, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    records = gl.allocate_shared_memory(gl.int32, [RECORDS * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    r_full = gl.allocate_shared_memory(gl.int64, [RECORDS, 1], barrier)
    r_empty = gl.allocate_shared_memory(gl.int64, [RECORDS, 1], barrier)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    kv_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [stages, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [stages, 1], barrier)
    d_full = gl.allocate_shared_memory(gl.int64, [stages, 1], barrier)
    d_empty = gl.allocate_shared_memory(gl.int64, [stages, 1], barrier)
    for i in gl.static_range(RECORDS):
        mbarrier.init(r_full.index(i), count=1)
        mbarrier.init(r_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=1)
    for i in gl.static_range(stages):
        mbarrier.init(q_full.index(i), count=LOADERS)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(d_full.index(i), count=LOADERS)
        mbarrier.init(d_empty.index(i), count=2)
    # fmt: off
    tiles = (q_tiles, d_tiles, k_tiles, v_tiles, lse_tiles, delta_tiles, records)
    barriers = (r_full, r_empty, kv_full, kv_empty, q_full, q_empty, d_full, d_empty)
    exchange = ()
    if wide:  # one warpgroup sends P to the other
        p_tiles = gl.allocate_shared_memory(Q.dtype, [stages, ROWS, PANEL], matrix_layout(Q.dtype))
        p_full = gl.allocate_shared_memory(gl.int64, [stages, 1], barrier)
        p_empty = gl.allocate_shared_memory(gl.int64, [stages, 1], barrier)
        for i in gl.static_range(stages):
            mbarrier.init(p_full.index(i), count=1)
            mbarrier.init(p_empty.index(i), count=1)
        exchange = (p_tiles, p_full, p_empty)  # type: ignore[assignment]
    fence_async_shared()
    arguments = (
        DK, DV, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn, group, max_seqlen_kv,
        window_left, window_right, softmax_scale,
    )
    gl.warp_specialize(
        [
            (_compute, (
                tiles, barriers, exchange, arguments, 0, QK0, QK1, V_PANELS, PACKED, BOTTOM_RIGHT, HAS_LEFT, HAS_RIGHT,
            )),
            (_compute, (
                tiles, barriers, exchange, arguments, 1, QK0, QK1, V_PANELS, PACKED, BOTTOM_RIGHT, HAS_LEFT, HAS_RIGHT,
            )),
            (load_kv, (
                Q, K, V, DOut, Lse, Delta, tiles, barriers, Work, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded,
                cu_seqlens_kv_padded, num_tiles, num_tickets, num_heads, group, together, stride_lb, stride_lh,
                max_seqlen_q, max_seqlen_kv, window_left, window_right, panels, V_PANELS, wide, DYNAMIC, PACKED,
                HAS_LENGTHS, BOTTOM_RIGHT, HAS_LEFT, HAS_RIGHT,
            )),
        ],
        [4, 1],
        [240, REGISTERS],
    )
    # fmt: on
