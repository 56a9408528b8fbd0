"""The Hopper decode kernel: the same parts and pieces as ``decode_kernel``, or chunks as ``chunks_kernel``, in Gluon.

Mathematics, the roles of the warps, and why it cannot deadlock: kernels/README.md.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mla_plugin.kernels.decode.hopper.chunks import compute_chunks
from mla_plugin.kernels.decode.hopper.computing import compute
from mla_plugin.kernels.decode.hopper.gathering import gather
from mla_plugin.kernels.decode.hopper.loading import load
from mla_plugin.kernels.hopper.common import PANEL, ROWS, block_layout, gdc_wait, matrix_layout
from mla_plugin.kernels.hopper.latent import KEYS, PANELS, in_float16

_REGISTERS = gl.constexpr(504)
"""Of a thread of each of the three groups of four warps, together: 65,536 in a multiprocessor, in eights."""


@gluon.jit
def _produce(
    desc_q,
    desc_r,
    desc_c,
    desc_k,
    C_kv,
    K_rope,
    KV_scale,
    page_table,
    seqlens_kv,
    leftpad_kv,
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
    FORMAT: gl.constexpr,
    CHUNK: gl.constexpr,
    PLANNED: gl.constexpr,
):
    """The loading warp, or the gathering warpgroup."""
    if DEPENDENT:
        gdc_wait()
    # fmt: off
    if C_kv is None:
        load(
            desc_q, desc_r, desc_c, desc_k, page_table, seqlens_kv, leftpad_kv, Plan, tiles, barriers,
            batch, num_heads, seqlen_q, capacity, num_parts, overhead, stride_pt, PAGE_SIZE, CAUSAL, CHUNK, PLANNED,
        )
    else:
        gather(
            desc_q, desc_r, C_kv, K_rope, KV_scale, page_table, seqlens_kv, leftpad_kv, Plan, tiles, barriers,
            batch, num_heads, seqlen_q, capacity, num_parts, overhead, stride_pt, stride_cb, stride_cn, stride_kb,
            stride_kn, PAGE_SIZE, CAUSAL, FORMAT, CHUNK, PLANNED,
        )
    # fmt: on


@gluon.jit
def _consume(
    seqlens_kv,
    leftpad_kv,
    KV_scale,
    Parts,
    Plan,
    Out,
    Lse,
    tiles,
    barriers,
    q_converted,
    softmax_scale,
    batch,
    num_heads,
    seqlen_q,
    capacity,
    num_parts,
    overhead,
    slots,
    which: gl.constexpr,
    R: gl.constexpr,
    CAUSAL: gl.constexpr,
    DEPENDENT: gl.constexpr,
    FORMAT: gl.constexpr,
    CHUNK: gl.constexpr,
    PLANNED: gl.constexpr,
):
    """A computing warpgroup."""
    if DEPENDENT:
        gdc_wait()
    # fmt: off
    if CHUNK == 0:
        compute(
            seqlens_kv, KV_scale, Parts, Plan, Out, Lse, tiles, barriers, q_converted, softmax_scale, batch,
            num_heads, seqlen_q, capacity, num_parts, overhead, which, R, CAUSAL, DEPENDENT, FORMAT, PLANNED,
        )
    else:
        compute_chunks(
            seqlens_kv, leftpad_kv, KV_scale, Parts, Plan, Out, Lse, tiles, barriers, q_converted, softmax_scale,
            batch, num_heads, seqlen_q, capacity, num_parts, slots, which, R, CAUSAL, DEPENDENT, FORMAT, CHUNK,
            PLANNED,
        )
    # fmt: on


@gluon.jit(
    do_not_specialize=[
        *("batch", "capacity", "num_parts", "overhead", "slots", "stride_pt", "stride_cb", "stride_kb"),
    ]
)
def hopper_decode_kernel(
    Parts,
    Plan,
    Out,
    Lse,
    C_kv,
    K_rope,
    KV_scale,
    page_table,
    seqlens_kv,
    leftpad_kv,
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
    slots,
    stride_pt,
    stride_cb,
    stride_cn: gl.constexpr,
    stride_kb,
    stride_kn: gl.constexpr,
    R: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    CAUSAL: gl.constexpr,
    DEPENDENT: gl.constexpr,
    FORMAT: gl.constexpr,
    REGISTERS: gl.constexpr,
    CHUNK: gl.constexpr,
    PLANNED: gl.constexpr,
):
    """One program computes 64 (query, head) rows over one part of the key tiles. Grid: (row tiles x parts,).

    Descriptors: desc_q over q_nope_abs and desc_r over q_rope, of 64 rows or blocks of them (``QueryRows``) and 64
    columns; of tiles [1, 64, 64] desc_c over c_kv [pages or B, page_size or S_kv, R] and desc_k over k_rope [pages or
    B, page_size or S_kv, 64]. With C_kv, K_rope and, by the FORMAT, KV_scale in place of desc_c and desc_k their rows
    are gathered; the strides of both are in units of 16 bytes. REGISTERS is what a thread of the warps that load has.
    The other arguments, and what is written to Parts: see ``decode_kernel``. With CHUNK: as ``chunks_kernel``;
    otherwise leftpad_kv is None. PLANNED: ``plan_kernel`` has written Plan, with CHUNK ``plan_chunks_kernel``; if not,
    with CHUNK, this kernel writes the list of sequences there.

    Tiles in shared memory and barriers: see ``latent.py``; a gathering warpgroup fills k_tiles in place of TMA. Where
    products are ``in_float16``, q_tiles hold the queries as TMA copies them, then in float16 (``scale_queries``).
    Every warp that reads what the previous kernels wrote waits for them by itself, after all this has been set up.
    With CHUNK q_full and q_empty are of a sequence's chunks in this part together, and finished is of a chunk.
    """
    dtype: gl.constexpr = gl.float16 if in_float16(FORMAT) else desc_q.dtype
    layout: gl.constexpr = block_layout(dtype)
    q_tiles = gl.allocate_shared_memory(desc_q.dtype, [PANELS, 1, ROWS, PANEL], layout)
    k_tiles = gl.allocate_shared_memory(dtype, [2 * PANELS, 1, KEYS, PANEL], layout)
    p_tile = gl.allocate_shared_memory(dtype, [ROWS, KEYS], matrix_layout(dtype))
    row: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    maxima = gl.allocate_shared_memory(gl.float32, [3, ROWS], row)
    sums = gl.allocate_shared_memory(gl.float32, [4, ROWS], row)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [4, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [4, 1], barrier)
    published = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    finished = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    q_converted = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    mbarrier.init(q_full.index(0), count=1)
    mbarrier.init(q_empty.index(0), count=2)
    mbarrier.init(finished.index(0), count=2)
    mbarrier.init(q_converted.index(0), count=2)
    for i in gl.static_range(4):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(published.index(i), count=1)
    fence_async_shared()
    # fmt: off
    tiles = (q_tiles, k_tiles, p_tile, maxima, sums)
    # the computing warpgroups' tiles, in the products' dtype
    operands = (q_tiles._reinterpret(dtype, q_tiles.shape, layout), k_tiles, p_tile, maxima, sums)
    barriers = (q_full, q_empty, k_full, k_empty, published, finished)
    gl.warp_specialize(
        [
            (_consume, (
                seqlens_kv, leftpad_kv, KV_scale, Parts, Plan, Out, Lse, operands, barriers, q_converted,
                softmax_scale, batch, num_heads, seqlen_q, capacity, num_parts, overhead, slots, 0, R, CAUSAL,
                DEPENDENT, FORMAT, CHUNK, PLANNED,
            )),
            (_consume, (
                seqlens_kv, leftpad_kv, KV_scale, Parts, Plan, Out, Lse, operands, barriers, q_converted,
                softmax_scale, batch, num_heads, seqlen_q, capacity, num_parts, overhead, slots, 1, R, CAUSAL,
                DEPENDENT, FORMAT, CHUNK, PLANNED,
            )),
            (_produce, (
                desc_q, desc_r, desc_c, desc_k, C_kv, K_rope, KV_scale, page_table, seqlens_kv, leftpad_kv, Plan,
                tiles, barriers, batch, num_heads, seqlen_q, capacity, num_parts, overhead, stride_pt, stride_cb,
                stride_cn, stride_kb, stride_kn, PAGE_SIZE, CAUSAL, DEPENDENT, FORMAT, CHUNK, PLANNED,
            )),
        ],
        [4, 1 if C_kv is None else 4],
        [(_REGISTERS - REGISTERS) // 2, REGISTERS],
    )
    # fmt: on
