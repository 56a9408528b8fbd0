"""Device functions that the kernels share: tiles of rows, the split of a head dimension, bounds, float16's scales.

A head dimension D is handled as two blocks of columns, D0 + D1, each a power of two (192 = 128 + 64), because a Triton
block size must be one: padding 192 to 256 would waste a quarter of the work. D1 == 0 means one block.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
"""log2(e): the softmax is computed with exp2."""
LN_2 = tl.constexpr(0.6931471805599453)
"""ln(2): turns a log-sum-exp in base 2 into the natural one."""
LOWEST_FLOAT32 = tl.constexpr(-3.4028234663852886e38)
"""Start of a running maximum where -inf - -inf would be NaN."""
FLOAT16_WEIGHT = tl.constexpr(15.0)
"""log2 of a tile's largest weight where weights are float16, which then holds those down to 2^-39 of it."""
FLOAT16_SPAN = tl.constexpr(64.0)
"""How far a tile's reference may be below the highest, in log2: earlier sums grow by 2^64 at most, within float32."""


def split_head_dim(head_dim: int) -> tuple[int, int]:
    """Two powers of two (the second may be 0) that hold ``head_dim`` columns, each at least 16 (for tl.dot).

    192 gives (128, 64), 128 (128, 0), 576 (512, 64), 24 (32, 0), 72 (128, 0). Only a single block may be
    padded: Triton 3.6 computes a product with a partly masked second block of 16 columns wrongly on an H200.
    """
    whole = max(16, triton.next_power_of_2(head_dim))
    first, second = whole // 2, head_dim - whole // 2
    if second >= 16 and first >= 16 and second == triton.next_power_of_2(second) < first:
        return first, second
    return whole, 0


@triton.jit
def tile_rows(R: tl.constexpr, WIDE: tl.constexpr):
    """0 .. R - 1: int64 when R rows span more than 2**31 elements, else int32.

    Tiles are addressed by one int64 scalar and small offsets: int64 in every element costs a tenth of the forward's
    speed on an H200 (476 against 515 TFLOP/s, full attention).
    """
    rows = tl.arange(0, R)
    if WIDE:
        rows = rows.to(tl.int64)
    return rows


@triton.jit
def load_rows(
    base,
    start,
    stride,
    num_rows,
    R: tl.constexpr,
    C0: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Rows start .. start + R, columns C0 .. C0 + C: [R, C]; rows from ``num_rows`` on and columns from D on are 0."""
    rows = tile_rows(R, WIDE)
    columns = C0 + tl.arange(0, C)
    pointers = base + tl.cast(start, tl.int64) * stride + (rows[:, None] * stride + columns[None, :])
    if MASK_ROWS:
        exists = rows[:, None] < num_rows - start
        if C0 + C > D:
            exists = exists & (columns[None, :] < D)
        return tl.load(pointers, mask=exists, other=0.0)
    elif C0 + C > D:
        return tl.load(pointers, mask=columns[None, :] < D, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_rows(
    base,
    start,
    stride,
    num_rows,
    x,
    R: tl.constexpr,
    C0: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Store x [R, C] into rows from ``start`` on, columns C0 .. C0 + C, except those that ``load_rows`` masks."""
    rows = tile_rows(R, WIDE)
    columns = C0 + tl.arange(0, C)
    pointers = base + tl.cast(start, tl.int64) * stride + (rows[:, None] * stride + columns[None, :])
    mask = rows[:, None] < num_rows - start
    if C0 + C > D:
        mask = mask & (columns[None, :] < D)
    tl.store(pointers, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def sequence(b, cu_seqlens, cu_seqlens_padded, seqlen, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr):
    """First token and number of tokens of sequence ``b``: (int64, int32).

    Packed sequences start at the padded offsets; a sequence of a dense batch starts at token 0 of its batch entry.
    """
    start = tl.cast(0, tl.int64)
    length = seqlen
    if HAS_LENGTHS:
        length = tl.load(cu_seqlens + b + 1) - tl.load(cu_seqlens + b)
        if PACKED:
            start = tl.load(cu_seqlens_padded + b).to(tl.int64)
    return start, length


@triton.jit
def load_tile(
    source,
    b,
    head,
    base,
    start,
    stride,
    num_rows,
    R: tl.constexpr,
    C0: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    TMA: tl.constexpr,
):
    """A tile [R, C] of one head, by pointers from ``base`` or by the tensor descriptor ``source`` over [B, H, S, D]."""
    if TMA:
        return source.load([b, head, start, C0]).reshape(R, C)
    else:
        return load_rows(base, start, stride, num_rows, R, C0, C, D, MASK_ROWS, WIDE)


@triton.jit
def grouped_tile(tiles, together):
    """(tile, batch * head) of this program: the tiles of ``together`` heads are interleaved."""
    pid = tl.program_id(0)
    per_group = together * tiles
    rest = pid % per_group
    return rest // together, pid // per_group * together + rest % together


@triton.jit
def tile_bounds(
    start_m,
    seqlen_kv,
    diagonal,
    window_left,
    window_right,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Key ranges of one query tile: (first, full_first, full_last, last).

    Keys in [first, last) are seen by some row; those in [full_first, full_last) by every row, so they need no mask.
    All but ``last`` are multiples of BLOCK_N.
    """
    first = 0
    full_first = 0
    last = seqlen_kv
    full_last = seqlen_kv // BLOCK_N * BLOCK_N
    if HAS_RIGHT:
        reach = start_m + diagonal + window_right  # the last key that the tile's first row sees
        last = tl.minimum(last, tl.maximum(reach + BLOCK_M, 0))
        full_last = tl.minimum(full_last, tl.maximum(reach + 1, 0) // BLOCK_N * BLOCK_N)
    if HAS_LEFT:
        reach = start_m + diagonal - window_left  # the first key that the tile's first row sees
        first = tl.maximum(reach, 0) // BLOCK_N * BLOCK_N
        full_first = tl.cdiv(tl.maximum(reach + BLOCK_M - 1, 0), BLOCK_N) * BLOCK_N
        full_first = tl.minimum(full_first, tl.maximum(tl.cdiv(last, BLOCK_N) * BLOCK_N, first))
    full_last = tl.maximum(full_last, full_first)
    return first, full_first, full_last, last


@triton.jit
def rows_with_keys(
    seqlen_q, seqlen_kv, diagonal, window_left, window_right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr
):
    """The queries [first, last) that see a key; a backward must not read the rows of the others.

    Their weights are 0, but 0 times an infinite gradient would put NaN into the sums over the queries.
    """
    first = 0
    last = seqlen_q
    if HAS_RIGHT:
        first = tl.maximum(-diagonal - window_right, 0)
    if HAS_LEFT:
        last = tl.minimum(last, seqlen_kv - diagonal + window_left)
    return first, last


@triton.jit
def nonzero_scale(scale):
    """A factor of scores; for 0 the smallest normal number: -inf * 0, of a masked score, would be NaN."""
    return tl.where(scale == 0.0, 2.0**-126, scale)


@triton.jit
def row_factor(largest, TOP: tl.constexpr):
    """(factor, its inverse): powers of 2 that bring rows, whose largest numbers are given, into a dtype's range.

    A row's largest number comes to lie between 2^TOP and 2^(TOP + 1) if it is at least 2^(TOP - 126). With 14, for
    float16, bfloat16 loses no bit of numbers down to 2^-28 of the row's largest. The factor of infinity is NaN: e4m3
    has no infinity, and the row's scores are NaN anyway.
    """
    of_largest = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.minimum(254 + TOP - of_largest, 253)
    factor = tl.where(of_largest == 255, float("nan"), (exponent << 23).to(tl.float32, bitcast=True))
    return factor, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def tile_reference(of_tile, reference, highest):
    """(reference, highest) after a tile, by row: the score, in log2, whose weight is 1, and the highest one so far.

    The largest score of a tile is ``of_tile``. It counts, and not that of all tiles: otherwise float16 would lose the
    weights beside that of a key that dominates, such as an attention sink.
    """
    own = of_tile - FLOAT16_WEIGHT
    # from 2^24 on the difference is rounded: no weight may exceed float16's largest number
    own = tl.where(of_tile - own > FLOAT16_WEIGHT, of_tile, own)
    highest = tl.maximum(highest, own)
    # a tile that a row does not see changes no bit of it, so that a query alone gives the same bits
    return tl.where(of_tile == float("-inf"), reference, tl.maximum(own, highest - FLOAT16_SPAN)), highest
