"""The transposed decode kernel: the same parts and pieces as ``decode_kernel``, in Gluon, for few rows over e4m3.

Mathematics, the roles of the warps, and why it cannot deadlock: kernels/README.md.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mla_plugin.kernels.decode.transposed.common import (
    E4M3,
    KEYS,
    PANEL,
    PANELS,
    RANK,
    ROPE,
    STAGES,
    bytes_layout,
    panel_layout,
    splits_queries,
)
from mla_plugin.kernels.decode.transposed.computing import compute
from mla_plugin.kernels.decode.transposed.gathering import gather
from mla_plugin.kernels.decode.transposed.loading import load
from mla_plugin.kernels.hopper.common import gdc_wait


@gluon.jit
def _produce(
    desc_c,
    desc_k,
    C_kv,
    K_rope,
    page_table,
    seqlens_kv,
    Plan,
    tiles,
    barriers,
    batch,
    num_heads,
    seqlen_q,
    capacity,
    num_parts,
    overhead,
    stride_pt,
    stride_cb,
    stride_cn: gl.constexpr,
    stride_kb,
    stride_kn: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    CAUSAL: gl.constexpr,
    DEPENDENT: gl.constexpr,
    PLANNED: gl.constexpr,
):
    """The loading warp, or the gathering warps."""
    if DEPENDENT:
        gdc_wait()
    # fmt: off
    if C_kv is None:
        load(
            desc_c, desc_k, page_table, seqlens_kv, Plan, tiles, barriers, batch, num_heads, seqlen_q, capacity,
            num_parts, overhead, stride_pt, PAGE_SIZE, CAUSAL, PLANNED,
        )
    else:
        gather(
            C_kv, K_rope, page_table, seqlens_kv, Plan, tiles, barriers, batch, num_heads, seqlen_q, capacity,
            num_parts, overhead, stride_pt, stride_cb, stride_cn, stride_kb, stride_kn, PAGE_SIZE, CAUSAL,
            PLANNED,
        )
    # fmt: on


@gluon.jit(
    do_not_specialize=["batch", "capacity", "num_parts", "overhead", "stride_pt", "stride_cb", "stride_kb"],
)
def transposed_decode_kernel(
    Parts,
    Plan,
    Out,
    Lse,
    Q_nope_abs,
    Q_rope,
    C_kv,
    K_rope,
    KV_scale,
    page_table,
    seqlens_kv,
    desc_c,
    desc_k,
    softmax_scale,
    batch,
    num_heads,
    seqlen_q,
    capacity,
    num_parts,
    overhead,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_rb,
    stride_rs,
    stride_rh,
    stride_pt,
    stride_cb,
    stride_cn: gl.constexpr,
    stride_kb,
    stride_kn: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    CAUSAL: gl.constexpr,
    DEPENDENT: gl.constexpr,
    REGISTERS: gl.constexpr,
    PLANNED: gl.constexpr,
):
    """One program computes all rows of each sequence, at most ROWS, over one part of the key tiles. Grid: (parts,).

    Descriptors of bytes: desc_c of tiles [1, 64, 128] over c_kv [pages or B, page_size or S_kv, 512], desc_k of tiles
    [1, 64, 64] over k_rope [pages or B, page_size or S_kv, 64]. With C_kv and K_rope in place of both their rows are
    gathered; the strides of both are in units of 16 bytes. REGISTERS is what a thread of the warps that load has. The
    other arguments, and what is written to Parts: see ``decode_kernel``. PLANNED: ``plan_kernel`` has run before.
    Where ``splits_queries`` says so, the results depend on whether Lse is None. The warps wait for the kernel before
    this one after all else has been set up.
    """
    if splits_queries(Out.dtype.element_ty, ROWS, Lse is not None):
        gl.static_assert(C_kv is None)  # a product would read what threads copied, and they do not fence it
        q_tile = gl.allocate_shared_memory(E4M3, [2 * ROWS, RANK], panel_layout(RANK))
        r_tile = gl.allocate_shared_memory(E4M3, [2 * ROWS, ROPE], panel_layout(ROPE))
    else:
        q_tile = gl.allocate_shared_memory(gl.float16, [ROWS, RANK], gl.NVMMASharedLayout(128, 16, 2))
        r_tile = gl.allocate_shared_memory(gl.float16, [ROWS, ROPE], gl.NVMMASharedLayout(128, 16, 2))
    p_tile = gl.allocate_shared_memory(gl.float16, [KEYS, ROWS], gl.NVMMASharedLayout(2 * ROWS, 16, 2))
    c_tiles = gl.allocate_shared_memory(gl.uint8, [STAGES * PANELS, 1, KEYS, PANEL], bytes_layout(PANEL))
    r_tiles = gl.allocate_shared_memory(gl.uint8, [STAGES, 1, KEYS, ROPE], bytes_layout(ROPE))
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 if C_kv is None else 128)  # each thread that copies arrives
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    tiles = (q_tile, r_tile, c_tiles, r_tiles, p_tile)
    barriers = (full, empty)
    # fmt: off
    gl.warp_specialize(
        [
            (compute, (
                Q_nope_abs, Q_rope, seqlens_kv, KV_scale, Parts, Plan, Out, Lse, tiles, barriers, softmax_scale, batch,
                num_heads, seqlen_q, capacity, num_parts, overhead, stride_qb, stride_qs, stride_qh, stride_rb,
                stride_rs, stride_rh, ROWS, CAUSAL, DEPENDENT, PLANNED,
            )),
            (_produce, (
                desc_c, desc_k, C_kv, K_rope, page_table, seqlens_kv, Plan, tiles, barriers, batch, num_heads,
                seqlen_q, capacity, num_parts, overhead, stride_pt, stride_cb, stride_cn, stride_kb, stride_kn,
                PAGE_SIZE, CAUSAL, DEPENDENT, PLANNED,
            )),
        ],
        [1 if C_kv is None else 4],
        [REGISTERS],
    )
    # fmt: on
