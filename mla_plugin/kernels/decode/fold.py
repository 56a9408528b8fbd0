"""The loops over key tiles: load a tile of the cache once, use it as keys and as values.

Mathematics and notation: kernels/README.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_plugin.arguments import cache_format
from mla_plugin.kernels.decode import tiles
from mla_plugin.kernels.decode.e4m3 import from_e4m3

PAGES_OF_A_TILE = tl.constexpr(tiles.PAGES_OF_A_TILE)
TILE = tl.constexpr(cache_format.TILE)
SCALES = tl.constexpr(cache_format.SCALES)


@triton.jit
def _locate(page_table, b, start, last, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """(block, row in the block) of a tile of keys: two scalars if one block holds all of them, else one pair per key.

    A block is a page, or one sequence of a contiguous cache (PAGE_SIZE 0). Entries from ``last`` on are not read.
    """
    if PAGE_SIZE == 0:
        return b, start
    elif PAGE_SIZE % BLOCK_N == 0:
        return tl.load(page_table + start // PAGE_SIZE), start % PAGE_SIZE
    elif BLOCK_N % PAGE_SIZE == 0 and BLOCK_N // PAGE_SIZE <= PAGES_OF_A_TILE:
        # start is a multiple of BLOCK_N: one load per page, and the page of each key is known at compile time
        rows = tl.arange(0, BLOCK_N)
        entries = page_table + start // PAGE_SIZE
        pages = tl.zeros([BLOCK_N], tl.int32) + tl.load(entries)
        for n in tl.static_range(1, BLOCK_N // PAGE_SIZE):
            page = tl.load(entries + n, mask=start + n * PAGE_SIZE < last, other=0)
            pages = tl.where(rows >= n * PAGE_SIZE, page, pages)
        return pages, rows % PAGE_SIZE
    else:
        keys = start + tl.arange(0, BLOCK_N)
        return tl.load(page_table + keys // PAGE_SIZE, mask=keys < last, other=0), keys % PAGE_SIZE


@triton.jit
def _load_scales(
    base,
    block,
    row,
    keys,
    rows,
    lowest,
    last,
    stride_block,
    stride_row: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEFTPAD: tl.constexpr,
):
    """The scales of BLOCK_N keys of ``fp8_ds_mla``: [BLOCK_N, SCALES], 0 for masked keys; strides in bytes."""
    tiles = tl.arange(0, SCALES)
    if PAGE_SIZE % BLOCK_N == 0:
        if stride_row * BLOCK_N >= 2**31:
            rows = rows.to(tl.int64)
        base += tl.cast(block, tl.int64) * (stride_block // 4) + tl.cast(row, tl.int64) * (stride_row // 4)
        pointers = base + (rows[:, None] * (stride_row // 4) + tiles[None, :])
    else:
        offsets = block.to(tl.int64) * (stride_block // 4) + row.to(tl.int64) * (stride_row // 4)
        pointers = base + offsets[:, None] + tiles[None, :]
    exists = keys[:, None] < last
    if LEFTPAD:
        exists = exists & (keys[:, None] >= lowest)
    return tl.load(pointers, mask=exists, other=0.0)


@triton.jit
def _load_keys(
    base,
    descriptor,
    block,
    row,
    keys,
    rows,
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
    KV_scale,
    FORMAT: tl.constexpr,
    CONVERSION: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Columns C0 .. C0 + C of BLOCK_N keys: [BLOCK_N, C]; ``rows`` are 0 .. BLOCK_N - 1.

    FULL tiles are loaded through the descriptor. Others are loaded by pointers, and keys outside ``lowest`` .. ``last``
    are set to 0 (memory there may hold NaN). e4m3 bytes are converted to DTYPE: ``fp8`` without its scale, which the
    caller applies, ``fp8_ds_mla`` with the key's scales from KV_scale.
    """
    if FULL:
        return descriptor.load([block, row, C0]).reshape(BLOCK_N, C)
    else:
        columns = C0 + tl.arange(0, C)
        if PAGE_SIZE % BLOCK_N == 0:
            # one int64 scalar and int32 offsets: int64 for each element costs registers
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
        x = tl.load(pointers, mask=exists, other=0.0)
        if x.dtype != tl.uint8:
            return x.to(DTYPE)
        elif FORMAT != "fp8_ds_mla":
            return from_e4m3(x, DTYPE, CONVERSION)
        else:
            x = from_e4m3(x, tl.float32, CONVERSION).reshape(BLOCK_N, C // TILE, TILE)
            scales = _load_scales(
                KV_scale, block, row, keys, rows, lowest, last, stride_block, stride_row, PAGE_SIZE, BLOCK_N, LEFTPAD
            )
            return (x * scales[:, :, None]).reshape(BLOCK_N, C).to(DTYPE)


@triton.jit
def _scores(q, keys, PRECISION: tl.constexpr):
    """q keys^T [BLOCK_M, BLOCK_N]. In float32, blocks of 128 columns are summed separately, then added.

    The rounding error of one sum over 512 columns is three times that of PyTorch's matmul.
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
    """acc + a b. In float32 the product is summed first: acc is rounded once, not once per term."""
    if PRECISION == "ieee":
        return acc + tl.dot(a, b, input_precision=PRECISION)
    else:
        return tl.dot(a.to(b.dtype), b, acc)


@triton.jit
def fold_keys(
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
    KV_scale,
    FORMAT: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Update the online softmax with the keys first .. last; a tile of c_kv is loaded once, as keys and as values.

    In FULL tiles every row sees every key; in others a row sees the keys from ``lowest`` to below its ``visible``.
    """
    DTYPE: tl.constexpr = q0.dtype
    # first is never negative: this is 0 .. BLOCK_N - 1, but stops Triton from hoisting it into registers
    rows = (first < 0).to(tl.int32) + tl.arange(0, BLOCK_N)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        keys = start + tl.arange(0, BLOCK_N)
        block, row = _locate(page_table, b, start, last, PAGE_SIZE, BLOCK_N)
        # fmt: off
        c0 = _load_keys(
            C_kv, desc_c0, block, row, keys, rows, lowest, last, stride_cb, stride_cn,
            0, R0, R, PAGE_SIZE, BLOCK_N, LEFTPAD, FULL, KV_scale, FORMAT, CONVERSION, DTYPE,
        )  # [BLOCK_N, R0]
        s = _scores(q0, c0, PRECISION)  # [BLOCK_M, BLOCK_N]
        if R1 > 0:
            c1 = _load_keys(
                C_kv, desc_c1, block, row, keys, rows, lowest, last, stride_cb, stride_cn,
                R0, R1, R, PAGE_SIZE, BLOCK_N, LEFTPAD, FULL, KV_scale, FORMAT, CONVERSION, DTYPE,
            )  # [BLOCK_N, R1]
            s = _add_product(s, q1, c1.T, PRECISION)
        if ROPE > 0:
            k = _load_keys(
                K_rope, desc_k, block, row, keys, rows, lowest, last, stride_kb, stride_kn,
                0, ROPE, D_ROPE, PAGE_SIZE, BLOCK_N, LEFTPAD, FULL, KV_scale, FORMAT, CONVERSION, DTYPE,
            )  # [BLOCK_N, ROPE]
            s = _add_product(s, q_rope, k.T, PRECISION)
        # fmt: on
        if not FULL:
            s = tl.where(keys[None, :] < visible[:, None], s, float("-inf"))
            if LEFTPAD:
                s = tl.where(keys[None, :] >= lowest, s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
        p = tl.exp2(s * scale_log2 - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc0 = _add_product(acc0 * rescale[:, None], p, c0, PRECISION)
        if R1 > 0:
            acc1 = _add_product(acc1 * rescale[:, None], p, c1, PRECISION)
        row_max = new_max
    return acc0, acc1, row_max, row_sum


@triton.jit
def fold_on_hopper(
    acc,
    row_max,
    row_sum,
    sums,
    q0,
    q_rope,
    C_kv,
    K_rope,
    desc_c0,
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
    D_ROPE: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    LEFTPAD: tl.constexpr,
    FULL: tl.constexpr,
    KV_scale,
    FORMAT: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """``fold_keys`` for WGMMA, with c_kv in one block of columns; returns acc, row_max, row_sum, sums.

    Both conditions are always true and leave no instruction in the machine code. They change what Triton generates:

    - Outside a conditional, Triton makes both warpgroups compute the full product q keys^T, because its result feeds
      another tl.dot and 64 rows are one warpgroup's. With the first condition each computes half of the keys. Without
      rope the condition is empty, and both compute the full product.
    - Triton schedules a conditional whose results only the next iteration needs after the loads of the next tile. So
      these start before the softmax, not after the product with the values, and arrive in time.

    The two halves of the row sum are kept apart in ``sums``, [BLOCK_M, 2]: adding them would exchange data between the
    warpgroups in every tile.
    """
    DTYPE: tl.constexpr = q0.dtype
    # first is never negative: this is 0 .. BLOCK_N - 1, but stops Triton from hoisting it into registers
    rows = (first < 0).to(tl.int32) + tl.arange(0, BLOCK_N)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        keys = start + tl.arange(0, BLOCK_N)
        block, row = _locate(page_table, b, start, last, PAGE_SIZE, BLOCK_N)
        # fmt: off
        c = _load_keys(
            C_kv, desc_c0, block, row, keys, rows, lowest, last, stride_cb, stride_cn,
            0, R0, R, PAGE_SIZE, BLOCK_N, LEFTPAD, FULL, KV_scale, FORMAT, CONVERSION, DTYPE,
        )  # [BLOCK_N, R0]
        if ROPE > 0:
            k = _load_keys(
                K_rope, desc_k, block, row, keys, rows, lowest, last, stride_kb, stride_kn,
                0, ROPE, D_ROPE, PAGE_SIZE, BLOCK_N, LEFTPAD, FULL, KV_scale, FORMAT, CONVERSION, DTYPE,
            )  # [BLOCK_N, ROPE]
            s_rope = tl.dot(q_rope, k.T) * scale_log2
        # fmt: on
        s = tl.dot(q0, c.T) * scale_log2
        if first < last:
            if ROPE > 0:
                s += s_rope
        if start < last:
            if not FULL:
                s = tl.where(keys[None, :] < visible[:, None], s, float("-inf"))
                if LEFTPAD:
                    s = tl.where(keys[None, :] >= lowest, s, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(s, 1))
            p = tl.exp2(s - new_max[:, None])
            rescale = tl.exp2(row_max - new_max)
            sums = sums * rescale[:, None] + tl.sum(p.reshape(p.shape[0], 2, BLOCK_N // 2), 2)
            row_sum = row_sum * rescale
            acc = tl.dot(p.to(c.dtype), c, acc * rescale[:, None])
            row_max = new_max
    return acc, row_max, row_sum, sums
