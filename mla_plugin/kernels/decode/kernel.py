"""The decode kernel: absorbed MLA over the compressed cache, split over the keys.

Mathematics and notation: README.md beside this file.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_plugin.kernels.decode.combine import lse_of_parts


@triton.jit
def _load_queries(
    base, rows, num_rows, num_heads, stride_s, stride_h, C0: tl.constexpr, C: tl.constexpr, D: tl.constexpr
):
    """Columns C0 .. C0 + C of some (query, head) rows: [len(rows), C]; what does not exist is 0."""
    columns = C0 + tl.arange(0, C)
    offsets = (rows // num_heads).to(tl.int64) * stride_s + (rows % num_heads) * stride_h
    exists = rows[:, None] < num_rows
    if C0 + C > D:
        exists = exists & (columns[None, :] < D)
    return tl.load(base + offsets[:, None] + columns[None, :], mask=exists, other=0.0)


@triton.jit
def _locate(page_table, b, start, last, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """(block, row in the block) of the keys from ``start``: two numbers when one block holds them, else one pair a key.

    A block is a page, or one sequence of a contiguous cache (PAGE_SIZE 0). No entry from ``last`` on is looked up.
    """
    if PAGE_SIZE == 0:
        return b, start
    elif PAGE_SIZE % BLOCK_N == 0:
        return tl.load(page_table + start // PAGE_SIZE), start % PAGE_SIZE
    else:
        keys = start + tl.arange(0, BLOCK_N)
        return tl.load(page_table + keys // PAGE_SIZE, mask=keys < last, other=0), keys % PAGE_SIZE


@triton.jit
def _load_keys(
    base,
    descriptor,
    block,
    row,
    keys,
    lowest,
    last,
    stride_block,
    stride_row: tl.constexpr,
    C0: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEFTPAD: tl.constexpr,
    FULL: tl.constexpr,
):
    """Columns C0 .. C0 + C of BLOCK_N keys: [BLOCK_N, C].

    FULL tiles come through the descriptor; others by pointers, and keys outside ``lowest`` .. ``last`` are 0 whatever
    memory holds.
    """
    if FULL:
        return descriptor.load([block, row, C0]).reshape(BLOCK_N, C)
    else:
        columns = C0 + tl.arange(0, C)
        if PAGE_SIZE % BLOCK_N == 0:
            # one int64 scalar and small offsets: int64 in every element costs registers
            rows = tl.arange(0, BLOCK_N)
            if stride_row * BLOCK_N >= 2**31:
                rows = rows.to(tl.int64)
            base += tl.cast(block, tl.int64) * stride_block + tl.cast(row, tl.int64) * stride_row
            pointers = base + (rows[:, None] * stride_row + columns[None, :])
        else:
            offsets = block.to(tl.int64) * stride_block + row.to(tl.int64) * stride_row
            pointers = base + offsets[:, None] + columns[None, :]
        exists = keys[:, None] < last
        if LEFTPAD:
            exists = exists & (keys[:, None] >= lowest)
        if C0 + C > D:
            exists = exists & (columns[None, :] < D)
        return tl.load(pointers, mask=exists, other=0.0)


@triton.jit
def _scores(q, keys, PRECISION: tl.constexpr):
    """q keys^T [BLOCK_M, BLOCK_N]. In float32 blocks of 128 columns are summed on their own, then together.

    One sum over 512 columns rounds three times as much as PyTorch's product.
    """
    if PRECISION == "ieee" and q.shape[1] > 128:
        blocks: tl.constexpr = q.shape[1] // 128
        q_blocks = q.reshape(q.shape[0], blocks, 128).permute(1, 0, 2)
        key_blocks = keys.reshape(keys.shape[0], blocks, 128).permute(1, 2, 0)
        return tl.sum(tl.dot(q_blocks, key_blocks, input_precision=PRECISION), 0)
    else:
        return tl.dot(q, keys.T, input_precision=PRECISION)


@triton.jit
def _add_product(acc, a, b, PRECISION: tl.constexpr):
    """acc + a b. In float32 the product is summed on its own: one rounding of the long sum instead of one a term."""
    if PRECISION == "ieee":
        return acc + tl.dot(a, b, input_precision=PRECISION)
    else:
        return tl.dot(a.to(b.dtype), b, acc)


@triton.jit
def _fold_keys(
    acc0,
    acc1,
    row_max,
    row_sum,
    q0,
    q1,
    q_rope,
    C_kv,
    K_rope,
    desc_c0,
    desc_c1,
    desc_k,
    page_table,
    b,
    first,
    lowest,
    last,
    visible,
    scale_log2,
    stride_cb,
    stride_cn: tl.constexpr,
    stride_kb,
    stride_kn: tl.constexpr,
    R: tl.constexpr,
    R0: tl.constexpr,
    R1: tl.constexpr,
    D_ROPE: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    LEFTPAD: tl.constexpr,
    FULL: tl.constexpr,
):
    """Fold the keys first .. last into the running softmax; a tile of c_kv is loaded once, as keys and as values.

    FULL tiles are seen whole by every row; in others a row sees the keys from ``lowest`` to below its ``visible``.
    """
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        keys = start + tl.arange(0, BLOCK_N)
        block, row = _locate(page_table, b, start, last, PAGE_SIZE, BLOCK_N)
        # fmt: off
        c0 = _load_keys(
            C_kv, desc_c0, block, row, keys, lowest, last, stride_cb, stride_cn,
            0, R0, R, PAGE_SIZE, BLOCK_N, LEFTPAD, FULL,
        )  # [BLOCK_N, R0]
        s = _scores(q0, c0, PRECISION)  # [BLOCK_M, BLOCK_N]
        if R1 > 0:
            c1 = _load_keys(
                C_kv, desc_c1, block, row, keys, lowest, last, stride_cb, stride_cn,
                R0, R1, R, PAGE_SIZE, BLOCK_N, LEFTPAD, FULL,
            )  # [BLOCK_N, R1]
            s = _add_product(s, q1, c1.T, PRECISION)
        if ROPE > 0:
            k = _load_keys(
                K_rope, desc_k, block, row, keys, lowest, last, stride_kb, stride_kn,
                0, ROPE, D_ROPE, PAGE_SIZE, BLOCK_N, LEFTPAD, FULL,
            )  # [BLOCK_N, ROPE]
            s = _add_product(s, q_rope, k.T, PRECISION)
        # fmt: on
        if not FULL:
            s = tl.where(keys[None, :] < visible[:, None], s, float("-inf"))
            if LEFTPAD:
                s = tl.where(keys[None, :] >= lowest, s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
        # a row that has seen no key yet keeps -inf: subtract 0 there, so that exp2 gives 0 and not NaN
        shift = new_max if FULL else tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(s * scale_log2 - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc0 = _add_product(acc0 * rescale[:, None], p, c0, PRECISION)
        if R1 > 0:
            acc1 = _add_product(acc1 * rescale[:, None], p, c1, PRECISION)
        row_max = new_max
    return acc0, acc1, row_max, row_sum


@triton.jit
def _store_columns(base, rows, exists, x, C0: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    """Store x [len(rows), C] into columns C0 .. C0 + C of rows of D contiguous elements."""
    columns = C0 + tl.arange(0, C)
    mask = exists[:, None]
    if C0 + C > D:
        mask = mask & (columns[None, :] < D)
    tl.store(base + rows[:, None] * D + columns[None, :], x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _fold_full_tiles(
    acc,
    row_max,
    q0,
    q_rope,
    desc_c0,
    desc_k,
    page_table,
    b,
    first,
    last,
    scale_log2,
    R0: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``_fold_keys`` of FULL tiles with c_kv in one block of columns, from no sum: acc, row_max, row_sum.

    Both conditions are always true, and nothing of them is left in the machine code. They steer Triton on Hopper:

    - A product that feeds another, outside a condition, is computed whole by both warpgroups (their warps stand in one
      column, twice as long as 64 rows need). Through the first condition each computes half of the keys. It is empty
      without rope: both compute the whole.
    - A condition whose results only the next iteration needs goes behind the loads of the next tile. So these start
      before the softmax, not after the product with the values, and arrive in time.

    The halves of the sum stay apart until the end: together they would be exchanged in every tile.
    """
    sums = tl.zeros([q0.shape[0], 2], tl.float32)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        block, row = _locate(page_table, b, start, last, PAGE_SIZE, BLOCK_N)
        c = desc_c0.load([block, row, 0]).reshape(BLOCK_N, R0)
        if ROPE > 0:
            k = desc_k.load([block, row, 0]).reshape(BLOCK_N, ROPE)
            s_rope = tl.dot(q_rope, k.T) * scale_log2
        s = tl.dot(q0, c.T) * scale_log2
        if first < last:
            if ROPE > 0:
                s += s_rope
        if start < last:
            new_max = tl.maximum(row_max, tl.max(s, 1))
            p = tl.exp2(s - new_max[:, None])
            rescale = tl.exp2(row_max - new_max)
            sums = sums * rescale[:, None] + tl.sum(p.reshape(p.shape[0], 2, BLOCK_N // 2), 2)
            acc = tl.dot(p.to(c.dtype), c, acc * rescale[:, None])
            row_max = new_max
    return acc, row_max, tl.sum(sums, 1)


# extents that change from step to step, and must not compile anew
@triton.jit(do_not_specialize=["capacity", "num_splits", "stride_pt"])
def decode_kernel(
    Q_nope_abs,
    Q_rope,
    C_kv,
    K_rope,
    page_table,
    seqlens_kv,
    leftpad_kv,
    Out,
    Lse,
    desc_c0,
    desc_c1,
    desc_k,
    softmax_scale,
    num_heads,
    seqlen_q,
    capacity,
    num_splits,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_rb,
    stride_rs,
    stride_rh,
    stride_cb,
    # row strides as constants are part of the load instructions; as arguments they take 70 registers more
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
    ONE_SPLIT: tl.constexpr,
    TMA: tl.constexpr,
    HOPPER: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: BLOCK_M (query, head) rows of one sequence over one split of its keys.

    Grid: (row tiles x splits x sequences,). With one split, Out and Lse (None: not wanted) are the results. With more,
    Out is the workspace: the splits' results [B, num_splits, S_q * H, R] and after them their lse in log2, float32
    [B, num_splits, S_q * H]; a split without keys writes -inf there and leaves its result as it is.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()  # launched while the kernel before is still running: wait for what it writes
    num_rows = seqlen_q * num_heads
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    tile = tl.program_id(0) % row_tiles
    split = tl.program_id(0) // row_tiles % num_splits
    b = tl.program_id(0) // row_tiles // num_splits
    b64 = b.to(tl.int64)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = rows < num_rows

    # before anything that depends on the length, so that both are fetched at the same time
    q_base = Q_nope_abs + b64 * stride_qb
    q0 = _load_queries(q_base, rows, num_rows, num_heads, stride_qs, stride_qh, 0, R0, R)
    q1 = q0
    if R1 > 0:
        q1 = _load_queries(q_base, rows, num_rows, num_heads, stride_qs, stride_qh, R0, R1, R)
    q_rope = q0
    if ROPE > 0:
        q_rope_base = Q_rope + b64 * stride_rb
        q_rope = _load_queries(q_rope_base, rows, num_rows, num_heads, stride_rs, stride_rh, 0, ROPE, D_ROPE)
    length = capacity
    if seqlens_kv is not None:
        length = tl.minimum(tl.load(seqlens_kv + b), capacity)
    visible = tl.full([BLOCK_M], 0, tl.int32) + length  # keys that each row sees
    seen_by_all = length
    last = length
    if CAUSAL:
        visible += rows // num_heads + 1 - seqlen_q
        seen_by_all += tile * BLOCK_M // num_heads + 1 - seqlen_q
        last += tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // num_heads + 1 - seqlen_q, 0)
    # the true length is shared out, so a sequence far below the capacity still fills all the splits it can
    lowest = 0
    if leftpad_kv is not None:
        lowest = tl.maximum(tl.load(leftpad_kv + b), 0)
    origin = lowest // BLOCK_N * BLOCK_N
    tiles_per_split = tl.cdiv(tl.cdiv(tl.maximum(last - origin, 0), BLOCK_N), num_splits)
    first = origin + split * tiles_per_split * BLOCK_N
    last = tl.minimum(last, first + tiles_per_split * BLOCK_N)

    out_rows = (b64 * num_splits + split) * num_rows + rows
    if not ONE_SPLIT:
        parts_lse = lse_of_parts(Out, tl.num_programs(0) // row_tiles * num_rows, R)
        if first >= last:
            tl.store(parts_lse + out_rows, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=exists)
            return
    scale_log2 = softmax_scale * 1.4426950408889634
    # before full tiles the lowest finite number: nothing guards their softmax from a tile whose scores are all -inf
    row_max = tl.full([BLOCK_M], -3.4028234663852886e38 if TMA else float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc0 = tl.zeros([BLOCK_M, R0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, R1 if R1 > 0 else 1], tl.float32)
    pages = page_table
    if PAGE_SIZE > 0:
        pages = page_table + b64 * stride_pt
    LEFTPAD: tl.constexpr = leftpad_kv is not None
    # fmt: off
    if TMA:
        full_last = tl.maximum(tl.minimum(seen_by_all, last) // BLOCK_N * BLOCK_N, first)
        if HOPPER and R1 == 0:
            acc0, row_max, row_sum = _fold_full_tiles(
                acc0, row_max, q0, q_rope, desc_c0, desc_k, pages, b, first, full_last, scale_log2,
                R0, ROPE, PAGE_SIZE, BLOCK_N, STAGES,
            )
        else:
            acc0, acc1, row_max, row_sum = _fold_keys(
                acc0, acc1, row_max, row_sum, q0, q1, q_rope, C_kv, K_rope, desc_c0, desc_c1, desc_k, pages, b,
                first, lowest, full_last, visible, scale_log2, stride_cb, stride_cn, stride_kb, stride_kn,
                R, R0, R1, D_ROPE, ROPE, PAGE_SIZE, BLOCK_N, STAGES, PRECISION, LEFTPAD, True,
            )
        first = full_last
    acc0, acc1, row_max, row_sum = _fold_keys(
        acc0, acc1, row_max, row_sum, q0, q1, q_rope, C_kv, K_rope, desc_c0, desc_c1, desc_k, pages, b,
        first, lowest, last, visible, scale_log2, stride_cb, stride_cn, stride_kb, stride_kn,
        R, R0, R1, D_ROPE, ROPE, PAGE_SIZE, BLOCK_N, STAGES, PRECISION, LEFTPAD, False,
    )
    # fmt: on
    if DEPENDENT:
        # the combine kernel starts beside the stores below; earlier it takes room from this one, 2 % at B 32, S_kv 4096
        tl.extra.cuda.gdc_launch_dependents()
    empty = row_sum == 0.0
    inverse = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, row_sum))
    lse_log2 = tl.where(empty, float("-inf"), row_max + tl.log2(tl.where(empty, 1.0, row_sum)))
    _store_columns(Out, out_rows, exists, acc0 * inverse[:, None], 0, R0, R)
    if R1 > 0:
        _store_columns(Out, out_rows, exists, acc1 * inverse[:, None], R0, R1, R)
    if not ONE_SPLIT:
        tl.store(parts_lse + out_rows, lse_log2, mask=exists)
    elif Lse is not None:
        lse_rows = (b64 * num_heads + rows % num_heads) * seqlen_q + rows // num_heads
        tl.store(Lse + lse_rows, lse_log2 * 0.6931471805599453, mask=exists)
