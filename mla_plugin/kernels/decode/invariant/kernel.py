"""The batch-invariant decode kernel: one partial result for each chunk of a sequence's keys.

Mathematics and notation: kernels/README.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_plugin.kernels.decode.fold import fold_keys, fold_on_hopper
from mla_plugin.kernels.decode.invariant.chunks import chunks_from, first_key
from mla_plugin.kernels.decode.invariant.combine import lse_of_slots
from mla_plugin.kernels.decode.invariant.plan import chunk_range, load_chunk_range
from mla_plugin.kernels.decode.kernel import load_queries, store_columns
from mla_plugin.kernels.decode.plan import key_range, tiles_between
from mla_plugin.kernels.tile_math import LN_2, LOG2_E, LOWEST_FLOAT32, nonzero_scale


@triton.jit
def _without_sign_of_zero(x, dtype: tl.constexpr):
    """x with -0 (after rounding to ``dtype``) replaced by +0, as a sum over chunks gives it."""
    return x.to(dtype).to(tl.float32) + 0.0


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
    slots,
    b,
    tile,
    slot,
    start,
    end,
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
    CHUNK: tl.constexpr,
):
    """Attention of BLOCK_M rows of sequence ``b`` to those of its chunks that lie in [start, end).

    The sequence's first chunk has the index ``slot``. Returns the sequence's number of chunks.
    """
    num_rows = seqlen_q * num_heads
    scale_log2 = softmax_scale * LOG2_E
    b64 = b.to(tl.int64)
    # slot is never negative: adds 0, but stops Triton from hoisting the rows out of the loop over sequences
    rows = tile * BLOCK_M + (slot < 0).to(tl.int32) + tl.arange(0, BLOCK_M)
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
    # chunks are counted from the first visible key, so that left padding does not shift them
    origin, lowest, length = key_range(seqlens_kv, leftpad_kv, b, b < batch, capacity, 1)
    count = chunks_from(tiles_between(origin, length, CHUNK))
    visible = tl.full([BLOCK_M], 0, tl.int32) + length  # keys that each row sees
    seen_by_all = length
    last = length
    if CAUSAL:
        visible += rows // num_heads + 1 - seqlen_q
        seen_by_all += tile * BLOCK_M // num_heads + 1 - seqlen_q
        last += tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // num_heads + 1 - seqlen_q, 0)
    pages = page_table
    if PAGE_SIZE > 0:
        pages = page_table + b64 * stride_pt
    for n in range(tl.maximum(start - slot, 0), tl.minimum(end - slot, count)):
        chunk = tl.cast(n, tl.int32)  # a Python number in the interpreter
        first = origin + first_key(chunk, CHUNK)
        # the difference first: the next chunk's first key may be beyond int32
        stop = first + tl.minimum(last - first, first_key(chunk + 1, CHUNK) - first_key(chunk, CHUNK))
        # not -inf: in a tile whose scores are all -inf, -inf - -inf would be NaN
        row_max = tl.full([BLOCK_M], LOWEST_FLOAT32, tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        # one accumulator for both loops: where the unmasked loop ends depends on the other rows of the tile
        sums = tl.zeros([BLOCK_M, 2], tl.float32)
        acc0 = tl.zeros([BLOCK_M, R0], tl.float32)
        acc1 = tl.zeros([BLOCK_M, R1 if R1 > 0 else 1], tl.float32)
        # fmt: off
        if TMA:
            full_stop = tl.maximum(tl.minimum(seen_by_all, stop) // BLOCK_N * BLOCK_N, first)
            if HOPPER:
                acc0, row_max, row_sum, sums = fold_on_hopper(
                    acc0, row_max, row_sum, sums, q0, q_rope, C_kv, K_rope, desc_c0, desc_k, pages, b,
                    first, lowest, full_stop, visible, scale_log2, stride_cb, stride_cn, stride_kb, stride_kn,
                    R, R0, D_ROPE, ROPE, PAGE_SIZE, BLOCK_N, STAGES, False, True, KV_scale, FORMAT, CONVERSION,
                )
            else:
                acc0, acc1, row_max, row_sum = fold_keys(
                    acc0, acc1, row_max, row_sum, q0, q1, q_rope, C_kv, K_rope, desc_c0, desc_c1, desc_k, pages, b,
                    first, lowest, full_stop, visible, scale_log2, stride_cb, stride_cn, stride_kb, stride_kn,
                    R, R0, R1, D_ROPE, ROPE, PAGE_SIZE, BLOCK_N, STAGES, PRECISION, False, True,
                    KV_scale, FORMAT, CONVERSION,
                )
            first = full_stop
        if HOPPER:
            acc0, row_max, row_sum, sums = fold_on_hopper(
                acc0, row_max, row_sum, sums, q0, q_rope, C_kv, K_rope, desc_c0, desc_k, pages, b,
                first, lowest, stop, visible, scale_log2, stride_cb, stride_cn, stride_kb, stride_kn,
                R, R0, D_ROPE, ROPE, PAGE_SIZE, BLOCK_N, STAGES, False, False, KV_scale, FORMAT, CONVERSION,
            )
        else:
            acc0, acc1, row_max, row_sum = fold_keys(
                acc0, acc1, row_max, row_sum, q0, q1, q_rope, C_kv, K_rope, desc_c0, desc_c1, desc_k, pages, b,
                first, lowest, stop, visible, scale_log2, stride_cb, stride_cn, stride_kb, stride_kn,
                R, R0, R1, D_ROPE, ROPE, PAGE_SIZE, BLOCK_N, STAGES, PRECISION, False, False,
                KV_scale, FORMAT, CONVERSION,
            )
        # fmt: on
        if HOPPER:
            row_sum += tl.sum(sums, 1)
        if DEPENDENT and slot + chunk == end - 1:
            tl.extra.cuda.gdc_launch_dependents()
        out_rows = tile * BLOCK_M + (slot < 0).to(tl.int32) + tl.arange(0, BLOCK_M)
        exists = out_rows < num_rows
        empty = row_sum == 0.0
        inverse = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, row_sum))
        if FORMAT == "fp8":
            inverse *= tl.load(KV_scale)
        lse_log2 = tl.where(empty, float("-inf"), row_max + tl.log2(tl.where(empty, 1.0, row_sum)))
        acc0 *= inverse[:, None]
        acc1 *= inverse[:, None] if R1 > 0 else 1.0
        if count == 1:
            whole = _without_sign_of_zero(acc0, Out.dtype.element_ty)
            store_columns(Out, b64 * num_rows + out_rows, exists, whole, 0, R0, R)
            if R1 > 0:
                rest = _without_sign_of_zero(acc1, Out.dtype.element_ty)
                store_columns(Out, b64 * num_rows + out_rows, exists, rest, R0, R1, R)
            if Lse is not None:
                lse_rows = (b64 * num_heads + out_rows % num_heads) * seqlen_q + out_rows // num_heads
                tl.store(Lse + lse_rows, lse_log2 * LN_2, mask=exists)
        else:
            slot_rows = (slot + chunk).to(tl.int64) * num_rows + out_rows
            store_columns(Parts, slot_rows, exists, acc0, 0, R0, R)
            if R1 > 0:
                store_columns(Parts, slot_rows, exists, acc1, R0, R1, R)
            tl.store(lse_of_slots(Parts, slots, num_rows, R) + slot_rows, lse_log2, mask=exists)
    return count


# sizes that change from step to step and must not trigger a recompilation
@triton.jit(do_not_specialize=["batch", "capacity", "num_parts", "slots", "begin", "size", "stride_pt"])
def chunks_kernel(
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
    slots,
    begin,
    size,
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
    PLANNED: tl.constexpr,
    CHUNK: tl.constexpr,
    SINGLE_ROUND: tl.constexpr,
):
    """One program computes BLOCK_M (query, head) rows over one part of the chunks (``chunks.py``).

    Grid: (row tiles x parts,). A round takes the sequences whose first chunk has an index in begin .. begin + size - 1
    among the chunks of all sequences, and shares their chunks out (``chunk_range``; PLANNED: ``plan_chunks_kernel``
    has done so, into Plan). A sequence of one chunk is written to Out and Lse (None: not wanted). Other
    sequences' chunk results go to Parts, the workspace that ``combine_chunks_kernel`` describes.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()  # programmatic dependent launch: wait for the previous kernel's writes
    row_tiles = tl.cdiv(seqlen_q * num_heads, BLOCK_M)
    tile = tl.program_id(0) % row_tiles
    part = tl.program_id(0) // row_tiles
    # fmt: off
    if PLANNED:
        first_b, last_b, slot, start, end = load_chunk_range(Plan, part, batch)
    else:
        first_b, last_b, slot, start, end = chunk_range(
            part, tl.program_id(0) == 0, Plan, num_parts, seqlens_kv, leftpad_kv, batch, capacity, begin, size, CHUNK,
            SINGLE_ROUND,
        )
    for sequence in range(first_b, last_b):
        b = tl.cast(sequence, tl.int32)  # a Python number in the interpreter
        slot += _attend(
            Q_nope_abs, Q_rope, C_kv, K_rope, page_table, seqlens_kv, leftpad_kv, KV_scale, Parts, Out, Lse,
            desc_c0, desc_c1, desc_k, softmax_scale, batch, num_heads, seqlen_q, capacity, slots,
            b, tile, slot, start, end,
            stride_qb, stride_qs, stride_qh, stride_rb, stride_rs, stride_rh, stride_cb, stride_cn, stride_kb,
            stride_kn, stride_pt, R, R0, R1, D_ROPE, ROPE, PAGE_SIZE, BLOCK_M, BLOCK_N, STAGES, CAUSAL, TMA, HOPPER,
            PRECISION, DEPENDENT, FORMAT, CONVERSION, CHUNK,
        )
    # fmt: on
