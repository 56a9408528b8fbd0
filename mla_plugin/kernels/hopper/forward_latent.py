"""The Hopper forward over latents: head dimensions 576/512, v being the first 512 columns of k in the same memory.

That is attention with absorbed weights: k is [c_kv | k_rope] and v is c_kv. Key tiles are loaded once for both
products.

Mathematics, the roles of the warps, and why it cannot deadlock: kernels/README.md.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mla_plugin.kernels.hopper.common import FIELDS, PANEL, RECORDS, ROWS, matrix_layout
from mla_plugin.kernels.hopper.computing_latent import compute
from mla_plugin.kernels.hopper.latent import KEYS, PANELS
from mla_plugin.kernels.hopper.loading_latent import load


@gluon.jit(do_not_specialize=["num_tiles", "num_tickets", "together", "max_seqlen_q", "max_seqlen_kv"])
def latent_forward_kernel(
    Q,
    K,
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
    window_right,
    softmax_scale,
    DYNAMIC: gl.constexpr,
    PACKED: gl.constexpr,
    HAS_LENGTHS: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Persistent: one program per SM takes query tiles of 64 rows until there are none left.

    Q, K: descriptors over [B, H, S, 576], packed over [1, H, T, 576], of tiles [1, 1, 64, 64]. Work: see plan.py; None
    unless PACKED or DYNAMIC. Tiles in shared memory and barriers: see ``latent.py``.
    """
    dtype: gl.constexpr = Q.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [PANELS, 1, 1, ROWS, PANEL], Q.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [2 * PANELS, 1, 1, KEYS, PANEL], K.layout)
    p_tile = gl.allocate_shared_memory(dtype, [ROWS, KEYS], matrix_layout(dtype))
    row: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    maxima = gl.allocate_shared_memory(gl.float32, [2, ROWS], row)
    sums = gl.allocate_shared_memory(gl.float32, [4, ROWS], row)
    records = gl.allocate_shared_memory(gl.int32, [RECORDS * FIELDS, 1], row)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    r_full = gl.allocate_shared_memory(gl.int64, [RECORDS, 1], barrier)
    r_empty = gl.allocate_shared_memory(gl.int64, [RECORDS, 1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [4, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [4, 1], barrier)
    published = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    finished = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    for i in gl.static_range(RECORDS):
        mbarrier.init(r_full.index(i), count=1)
        mbarrier.init(r_empty.index(i), count=2)
    mbarrier.init(q_full.index(0), count=1)
    mbarrier.init(q_empty.index(0), count=2)
    mbarrier.init(finished.index(0), count=2)
    for i in gl.static_range(4):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(published.index(i), count=1)
    fence_async_shared()
    # fmt: off
    tiles = (q_tiles, k_tiles, p_tile, maxima, sums)
    barriers = (q_full, q_empty, k_full, k_empty, published, finished)
    record_barriers = (r_full, r_empty)
    arguments = (
        Out, Lse, stride_ob, stride_oh, stride_om, stride_lb, stride_lh, max_seqlen_q, window_right, softmax_scale,
    )
    gl.warp_specialize(
        [
            (compute, (
                tiles, records, barriers, record_barriers, arguments, 0, PACKED, HAS_LENGTHS, BOTTOM_RIGHT, HAS_RIGHT,
            )),
            (compute, (
                tiles, records, barriers, record_barriers, arguments, 1, PACKED, HAS_LENGTHS, BOTTOM_RIGHT, HAS_RIGHT,
            )),
            (load, (
                Q, K, tiles, records, barriers, record_barriers, Work, cu_seqlens_q, cu_seqlens_kv,
                cu_seqlens_q_padded, cu_seqlens_kv_padded, num_tiles, num_tickets, num_heads, group, together,
                max_seqlen_q, max_seqlen_kv, window_right, DYNAMIC, PACKED, HAS_LENGTHS, BOTTOM_RIGHT, HAS_RIGHT,
            )),
        ],
        [4, 1],
        [240, REGISTERS],
    )
    # fmt: on
