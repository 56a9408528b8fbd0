"""The wide decode kernel: the same parts and pieces as ``decode_kernel``, in Gluon, for many rows over e4m3.

Mathematics, the roles of the warps, and why it cannot deadlock: kernels/README.md.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mla_plugin.kernels.decode.transposed.common import E4M3, KEYS, PANEL, PANELS, ROPE, bytes_layout, panel_layout
from mla_plugin.kernels.decode.wide.common import BLOCK, BLOCKS, STAGES, TERMS, VECTOR, VECTORS
from mla_plugin.kernels.decode.wide.computing import compute
from mla_plugin.kernels.decode.wide.loading import load
from mla_plugin.kernels.hopper.common import ROWS
from mla_plugin.kernels.hopper.tickets import LOADING_REGISTERS

_COMPUTING, _LOADING = gl.constexpr(240), gl.constexpr(LOADING_REGISTERS)
"""Registers of a thread."""


@gluon.jit(do_not_specialize=["batch", "capacity", "num_parts", "overhead", "stride_pt"])
def wide_decode_kernel(
    Parts,
    Plan,
    Out,
    KV_scale,
    page_table,
    seqlens_kv,
    desc_q,
    desc_r,
    desc_c,
    desc_k,
    softmax_scale,
    batch,
    num_heads,
    seqlen_q,
    capacity,
    num_parts,
    overhead,
    stride_pt,
    PAGE_SIZE: gl.constexpr,
    CAUSAL: gl.constexpr,
    DEPENDENT: gl.constexpr,
    PLANNED: gl.constexpr,
):
    """One program computes 64 (query, head) rows over one part of the key tiles. Grid: (row tiles x parts,).

    Descriptors of bfloat16: desc_q over q_nope_abs and desc_r over q_rope, of 64 rows or blocks of them (``QueryRows``)
    and of 64 and 32 columns. Of bytes: desc_c of tiles [1, 64, 128] over c_kv [pages or B, page_size or S_kv, 512],
    desc_k of tiles [1, 64, 64] over k_rope [pages or B, page_size or S_kv, 64]. The other arguments, and what is
    written to Parts: see ``decode_kernel``. PLANNED: ``plan_kernel`` has run before. Tiles in shared memory and
    barriers: see ``common.py``. The warps wait for the kernel before this one after all else has been set up.
    """
    q_tiles = gl.allocate_shared_memory(E4M3, [TERMS * PANELS, ROWS, PANEL], panel_layout(PANEL))
    r_tiles_q = gl.allocate_shared_memory(E4M3, [TERMS, ROWS, ROPE], panel_layout(ROPE))
    c_tiles = gl.allocate_shared_memory(gl.uint8, [STAGES * PANELS, 1, KEYS, PANEL], bytes_layout(PANEL))
    r_tiles = gl.allocate_shared_memory(gl.uint8, [STAGES, 1, KEYS, ROPE], bytes_layout(ROPE))
    p_tiles = gl.allocate_shared_memory(gl.float16, [2, KEYS, ROWS], gl.NVMMASharedLayout(128, 16, 2))
    vectors = gl.allocate_shared_memory(gl.float32, [VECTORS, ROWS], VECTOR)
    largest = gl.allocate_shared_memory(gl.float32, [2 * BLOCKS, BLOCK], VECTOR)
    sums = gl.allocate_shared_memory(gl.float32, [4, ROWS], VECTOR)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    published = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    converted = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    finished = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(published.index(i), count=1)
        mbarrier.init(taken.index(i), count=1)
    mbarrier.init(converted.index(0), count=2)
    mbarrier.init(finished.index(0), count=2)
    fence_async_shared()
    tiles = (q_tiles, r_tiles_q, c_tiles, r_tiles, p_tiles, vectors, largest, sums)
    barriers = (full, empty, published, taken, converted, finished)
    # fmt: off
    gl.warp_specialize(
        [
            (compute, (
                seqlens_kv, KV_scale, Parts, Plan, Out, tiles, barriers, softmax_scale, batch, num_heads, seqlen_q,
                capacity, num_parts, overhead, 0, CAUSAL, DEPENDENT, PLANNED,
            )),
            (compute, (
                seqlens_kv, KV_scale, Parts, Plan, Out, tiles, barriers, softmax_scale, batch, num_heads, seqlen_q,
                capacity, num_parts, overhead, 1, CAUSAL, DEPENDENT, PLANNED,
            )),
            (load, (
                desc_q, desc_r, desc_c, desc_k, page_table, seqlens_kv, Plan, tiles, barriers, batch, num_heads,
                seqlen_q, capacity, num_parts, overhead, stride_pt, PAGE_SIZE, CAUSAL, DEPENDENT, PLANNED,
            )),
        ],
        [4, 1],
        [_COMPUTING, _LOADING],
    )
    # fmt: on
