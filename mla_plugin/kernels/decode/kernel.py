"""The decode kernel: MLA with weight absorption, the key tiles of all sequences divided evenly among programs.

Mathematics and notation: kernels/README.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_plugin.kernels.decode.combine import list_of_split, lse_of_parts
from mla_plugin.kernels.decode.fold import fold_keys, fold_on_hopper
from mla_plugin.kernels.decode.plan import key_range, load_plan, part_range, tiles_between
from mla_plugin.kernels.tile_math import LN_2, LOG2_E, LOWEST_FLOAT32, nonzero_scale


@triton.jit
def load_queries(
    base, rows, num_rows, num_heads, stride_s, stride_h, C0: tl.constexpr, C: tl.constexpr, D: tl.constexpr
):
    """Columns C0 .. C0 + C of the (query, head) rows ``rows``: [len(rows), C]; rows and columns out of range are 0."""
    columns = C0 + tl.arange(0, C)
    offsets = (rows // num_heads).to(tl.int64) * stride_s + (rows % num_heads).to(tl.int64) * stride_h
    exists = rows[:, None] < num_rows
    if C0 + C > D:
        exists = exists & (columns[None, :] < D)
    return tl.load(base + offsets[:, None] + columns[None, :], mask=exists, other=0.0)


@triton.jit
def store_columns(base, rows, exists, x, C0: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    """Store x [len(rows), C] into columns C0 .. C0 + C of rows of D contiguous elements."""
    columns = C0 + tl.arange(0, C)
    mask = exists[:, None]
    if C0 + C > D:
        mask = mask & (columns[None, :] < D)
    tl.store(base + rows[:, None] * D + columns[None, :], x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _attend(
    Q_nope_abs,
    Q_rope,
    C_kv,
    K_rope,
    page_table,
    seqlens_kv,
    leftpad_kv,
    KV_scale,
    Parts,
    Out,
    Lse,
    desc_c0,
    desc_c1,
    desc_k,
    softmax_scale,
    batch,
    num_heads,
    seqlen_q,
    capacity,
    num_parts,
    b,
    tile,
    at,
    size,
    part,
    is_end,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_rb,
    stride_rs,
    stride_rh,
    stride_cb,
    stride_cn: tl.constexpr,
    stride_kb,
    stride_kn: tl.constexpr,
    stride_pt,
    R: tl.constexpr,
    R0: tl.constexpr,
    R1: tl.constexpr,
    D_ROPE: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    CAUSAL: tl.constexpr,
    TMA: tl.constexpr,
    HOPPER: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
    FORMAT: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Attention of BLOCK_M rows of sequence ``b`` to one piece of its keys; returns the sequence's number of tiles.

    The sequence's tiles begin at ``at`` among those of all sequences; the piece is those in this part, maybe none.
    """
    num_rows = seqlen_q * num_heads
    scale_log2 = softmax_scale * LOG2_E
    LEFTPAD: tl.constexpr = leftpad_kv is not None
    b64 = b.to(tl.int64)
    # at is never negative: adds 0, but stops Triton from hoisting the rows out of the loop over sequences
    rows = tile * BLOCK_M + (at < 0).to(tl.int32) + tl.arange(0, BLOCK_M)
    # before anything that depends on the length, so that the loads overlap
    q_base = Q_nope_abs + b64 * stride_qb
    q0 = load_queries(q_base, rows, num_rows, num_heads, stride_qs, stride_qh, 0, R0, R)
    q1 = q0
    if R1 > 0:
        q1 = load_queries(q_base, rows, num_rows, num_heads, stride_qs, stride_qh, R0, R1, R)
    q_rope = q0
    if ROPE > 0:
        q_rope_base = Q_rope + b64 * stride_rb
        q_rope = load_queries(q_rope_base, rows, num_rows, num_heads, stride_rs, stride_rh, 0, ROPE, D_ROPE)
    if FORMAT == "fp8":
        scale_log2 = nonzero_scale(scale_log2 * tl.load(KV_scale))
    origin, lowest, length = key_range(seqlens_kv, leftpad_kv, b, b < batch, capacity, BLOCK_N)
    tiles = tiles_between(origin, length, BLOCK_N)
    visible = tl.full([BLOCK_M], 0, tl.int32) + length  # keys that each row sees
    seen_by_all = length
    last = length
    if CAUSAL:
        visible += rows // num_heads + 1 - seqlen_q
        seen_by_all += tile * BLOCK_M // num_heads + 1 - seqlen_q
        last += tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // num_heads + 1 - seqlen_q, 0)
    low = tl.maximum(part * size - at, 0)
    high = tl.minimum(part * size + size - at, tiles)
    first_part = at // size
    count = (at + tiles - 1) // size - first_part + 1
    first = origin + low * BLOCK_N
    last = tl.minimum(last, origin + high * BLOCK_N)

    # not -inf: in a tile whose scores are all -inf, -inf - -inf would be NaN
    row_max = tl.full([BLOCK_M], LOWEST_FLOAT32, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc0 = tl.zeros([BLOCK_M, R0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, R1 if R1 > 0 else 1], tl.float32)
    pages = page_table
    if PAGE_SIZE > 0:
        pages = page_table + b64 * stride_pt
    no_sums = tl.zeros([BLOCK_M, 2], tl.float32)
    # fmt: off
    if TMA:
        full_last = tl.maximum(tl.minimum(seen_by_all, last) // BLOCK_N * BLOCK_N, first)
        if HOPPER:
            acc0, row_max, row_sum, sums = fold_on_hopper(
                acc0, row_max, row_sum, no_sums, q0, q_rope, C_kv, K_rope, desc_c0, desc_k, pages, b,
                first, lowest, full_last, visible, scale_log2, stride_cb, stride_cn, stride_kb, stride_kn,
                R, R0, D_ROPE, ROPE, PAGE_SIZE, BLOCK_N, STAGES, LEFTPAD, True, KV_scale, FORMAT, CONVERSION,
            )
            row_sum += tl.sum(sums, 1)
        else:
            acc0, acc1, row_max, row_sum = fold_keys(
                acc0, acc1, row_max, row_sum, q0, q1, q_rope, C_kv, K_rope, desc_c0, desc_c1, desc_k, pages, b,
                first, lowest, full_last, visible, scale_log2, stride_cb, stride_cn, stride_kb, stride_kn,
                R, R0, R1, D_ROPE, ROPE, PAGE_SIZE, BLOCK_N, STAGES, PRECISION, LEFTPAD, True,
                KV_scale, FORMAT, CONVERSION,
            )
        first = full_last
    if HOPPER:
        acc0, row_max, row_sum, sums = fold_on_hopper(
            acc0, row_max, row_sum, no_sums, q0, q_rope, C_kv, K_rope, desc_c0, desc_k, pages, b,
            first, lowest, last, visible, scale_log2, stride_cb, stride_cn, stride_kb, stride_kn,
            R, R0, D_ROPE, ROPE, PAGE_SIZE, BLOCK_N, STAGES, LEFTPAD, False, KV_scale, FORMAT, CONVERSION,
        )
        row_sum += tl.sum(sums, 1)
    else:
        acc0, acc1, row_max, row_sum = fold_keys(
            acc0, acc1, row_max, row_sum, q0, q1, q_rope, C_kv, K_rope, desc_c0, desc_c1, desc_k, pages, b,
            first, lowest, last, visible, scale_log2, stride_cb, stride_cn, stride_kb, stride_kn,
            R, R0, R1, D_ROPE, ROPE, PAGE_SIZE, BLOCK_N, STAGES, PRECISION, LEFTPAD, False,
            KV_scale, FORMAT, CONVERSION,
        )
    # fmt: on
    if DEPENDENT and is_end:
        # the combine kernel starts during the last stores; earlier it takes room from this one, 2 % at B 32, 4096
        tl.extra.cuda.gdc_launch_dependents()
    rows = tile * BLOCK_M + (at < 0).to(tl.int32) + tl.arange(0, BLOCK_M)
    exists = (rows < num_rows) & (low < high)
    empty = row_sum == 0.0
    inverse = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, row_sum))
    if FORMAT == "fp8":
        inverse *= tl.load(KV_scale)
    lse_log2 = tl.where(empty, float("-inf"), row_max + tl.log2(tl.where(empty, 1.0, row_sum)))
    acc0 *= inverse[:, None]
    acc1 *= inverse[:, None] if R1 > 0 else 1.0
    if count == 1:
        store_columns(Out, b64 * num_rows + rows, exists, acc0, 0, R0, R)
        if R1 > 0:
            store_columns(Out, b64 * num_rows + rows, exists, acc1, R0, R1, R)
        if Lse is not None:
            lse_rows = (b64 * num_heads + rows % num_heads) * seqlen_q + rows // num_heads
            tl.store(Lse + lse_rows, lse_log2 * LN_2, mask=exists)
    else:
        slot = tl.where(high == tiles, num_parts + first_part, part)
        slot_rows = slot.to(tl.int64) * num_rows + rows
        store_columns(Parts, slot_rows, exists, acc0, 0, R0, R)
        if R1 > 0:
            store_columns(Parts, slot_rows, exists, acc1, R0, R1, R)
        tl.store(lse_of_parts(Parts, num_parts, num_rows, R) + slot_rows, lse_log2, mask=exists)
    is_listed = (low == 0) & (high > 0) & (tile == 0)
    entry, other = b, first_part
    if batch > num_parts:
        is_listed = is_listed & (count > 1)
        entry, other = first_part, b
    entries = list_of_split(Parts, num_parts, num_rows, R)
    tl.store(entries + 2 * entry, other, mask=is_listed)
    tl.store(entries + 2 * entry + 1, count, mask=is_listed)
    return tiles


# sizes that change from step to step and must not trigger a recompilation
@triton.jit(do_not_specialize=["batch", "capacity", "num_parts", "overhead", "stride_pt"])
def decode_kernel(
    Q_nope_abs,
    Q_rope,
    C_kv,
    K_rope,
    page_table,
    seqlens_kv,
    leftpad_kv,
    KV_scale,
    Parts,
    Plan,
    Out,
    Lse,
    desc_c0,
    desc_c1,
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
    stride_cb,
    # constant row strides become immediate offsets of the loads; as arguments they take 70 registers more
    stride_cn: tl.constexpr,
    stride_kb,
    stride_kn: tl.constexpr,
    stride_pt,
    R: tl.constexpr,
    R0: tl.constexpr,
    R1: tl.constexpr,
    D_ROPE: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    CAUSAL: tl.constexpr,
    TMA: tl.constexpr,
    HOPPER: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
    FORMAT: tl.constexpr,
    CONVERSION: tl.constexpr,
    PLANNED: tl.constexpr,
):
    """One program computes BLOCK_M (query, head) rows over one part of the key tiles.

    Grid: (row tiles x parts,). The tiles of all sequences are concatenated and divided into equal parts
    (``part_range``; PLANNED: ``plan_kernel`` has done so, into Plan); the tiles of one sequence in a part are a piece.
    A sequence with one piece is written to Out and Lse (None: not wanted). Other sequences' partial results go to
    Parts, the workspace that ``combine_kernel`` describes.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()  # programmatic dependent launch: wait for the previous kernel
    row_tiles = tl.cdiv(seqlen_q * num_heads, BLOCK_M)
    tile = tl.program_id(0) % row_tiles
    part = tl.program_id(0) // row_tiles
    # with more sequences than parts the list is indexed by part: default to "no sequence is split here"
    unlisted = (batch > num_parts) & (tile == 0)
    tl.store(list_of_split(Parts, num_parts, seqlen_q * num_heads, R) + 2 * part + 1, 0, mask=unlisted)
    if PLANNED:
        first_b, last_b, begin, size = load_plan(Plan, part)
    else:
        first_b, last_b, begin, size = part_range(
            part, num_parts, seqlens_kv, leftpad_kv, batch, capacity, overhead, BLOCK_N
        )
    # fmt: off
    for sequence in range(first_b, last_b):
        b = tl.cast(sequence, tl.int32)  # a Python number in the interpreter
        begin += overhead
        begin += _attend(
            Q_nope_abs, Q_rope, C_kv, K_rope, page_table, seqlens_kv, leftpad_kv, KV_scale, Parts, Out, Lse,
            desc_c0, desc_c1, desc_k, softmax_scale, batch, num_heads, seqlen_q, capacity, num_parts,
            b, tile, begin, size, part, b == last_b - 1,
            stride_qb, stride_qs, stride_qh, stride_rb, stride_rs, stride_rh, stride_cb, stride_cn, stride_kb,
            stride_kn, stride_pt, R, R0, R1, D_ROPE, ROPE, PAGE_SIZE, BLOCK_M, BLOCK_N, STAGES, CAUSAL, TMA, HOPPER,
            PRECISION, DEPENDENT, FORMAT, CONVERSION,
        )
    # fmt: on
