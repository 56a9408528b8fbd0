"""Shared by the Hopper kernels: sizes, layouts, waiting for other kernels, and which key tiles a query tile needs."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra import cuda

from mla_plugin.kernels import tile_math

_tile_bounds = gluon.jit(tile_math.tile_bounds.fn)
rows_with_keys = gluon.jit(tile_math.rows_with_keys.fn)
tile_reference = gluon.jit(tile_math.tile_reference.fn)
gdc_wait, gdc_launch_dependents = cuda.gdc_wait, cuda.gdc_launch_dependents
synchronize = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # renamed in Triton 3.7

PANEL = gl.constexpr(64)
"""Columns of one TMA copy: 128 bytes, the widest swizzle. 192 columns are three panels, 96 one and a half."""
ROWS = gl.constexpr(64)
"""Rows of a warpgroup's tile."""
STAGES = gl.constexpr(3)
"""Pipeline stages of the backward kernels: tiles in shared memory of each tensor that they loop over."""
WIDE_STAGES = gl.constexpr(2)
"""The same for head dimensions of 256."""
RECORDS = gl.constexpr(2)
"""Records in shared memory: how many tiles the loading warp may publish ahead."""
FIELDS = gl.constexpr(8)
"""int32 values per record, of which six are used."""


@gluon.constexpr_function
def panels_of(columns):
    """Panels that hold so many columns; TMA pads the last one with zeros."""
    return -(-columns // PANEL.value)


@gluon.constexpr_function
def width_of(panel, columns):
    """How many of ``columns`` are in this panel."""
    return min(PANEL.value, columns - panel * PANEL.value)


@gluon.constexpr_function
def is_wide(columns):
    """Whether an accumulator of so many columns leaves a warpgroup no registers for a second one."""
    return columns > 2 * PANEL.value


@gluon.constexpr_function
def tile_layout(dtype):
    """The layout of a tile [1, 1, rows, columns] of a [B, H, S, D] tensor, or a block [1, queries, heads, columns]."""
    return gl.NVMMASharedLayout(128, dtype.primitive_bitwidth, 4)


@gluon.constexpr_function
def block_layout(dtype):
    """The layout of a tile [1, rows, columns] of a cache or of the queries that decode."""
    return gl.NVMMASharedLayout(128, dtype.primitive_bitwidth, 3)


@gluon.constexpr_function
def matrix_layout(dtype):
    """The layout of the same memory as [rows, columns]."""
    return gl.NVMMASharedLayout(128, dtype.primitive_bitwidth, 2)


@gluon.constexpr_function
def scalar_layout(num_warps):
    """The layout of a single value that every thread holds."""
    return gl.BlockedLayout([1], [32], [num_warps], [0])


@gluon.constexpr_function
def product_layout(columns):
    """The layout of a WGMMA accumulator [64, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def _row_layout(registers, lanes, columns):
    """[64, columns]: bits of the column that a thread's first registers, and the threads of a row, stand for."""
    registers = [[0, column] for column in registers] + [[8, 0]]
    registers += [[0, 32 << i] for i in range((columns // 64).bit_length())]
    lanes = [[0, column] for column in lanes] + [[1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, columns])


@gluon.constexpr_function
def store_layout(columns):
    """The layout of [64, columns] with 8 adjacent columns per thread, for 16-byte stores."""
    return _row_layout((1, 2, 4), (8, 16), columns)


@gluon.jit
def as_stored(x):
    """x [64, columns] from ``product_layout`` to ``store_layout``, by shuffles between the four threads of a row.

    The compiler's single conversion uses 2 KB of shared memory for each warpgroup. Where these fit, as at 192/128, it
    is 1 % faster.
    """
    between: gl.constexpr = _row_layout((1, 2, 16), (8, 4), x.shape[1])
    return gl.convert_layout(gl.convert_layout(x, between), store_layout(x.shape[1]))


@gluon.jit
def columns_of(panels, first, COLUMNS: gl.constexpr):
    """COLUMNS columns, from panel ``first`` on, as a matrix."""
    layout: gl.constexpr = matrix_layout(panels.dtype)
    whole: gl.constexpr = panels_of(COLUMNS) * PANEL
    matrix = panels.index(first)._reinterpret(panels.dtype, [panels.shape[3], whole], layout)
    if whole > COLUMNS:
        matrix = matrix.slice(0, COLUMNS, 1)
    return matrix


@gluon.jit
def read_record(records, field):
    """A field that the loading warp has written, as a scalar in a computing warpgroup."""
    return gl.max(records.index(field).load(scalar_layout(4)), 0)


@gluon.jit
def kv_tiles(
    start_m,
    seqlen_q,
    seqlen_kv,
    window_left,
    window_right,
    BLOCK_N: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """The key tiles of a query tile, processed from the last to the first: (last, whole_last, whole_first, first).

    In [first, last) some row sees a key; [whole_first, whole_last) need no mask. Tile last - 1 is always masked, so
    whole_last < last. Without any tile last == first.
    """
    diagonal = 0
    if BOTTOM_RIGHT:
        diagonal = seqlen_kv - seqlen_q
    low, whole_low, whole_high, high = _tile_bounds(
        start_m, seqlen_kv, diagonal, window_left, window_right, 2 * ROWS, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    first = low // BLOCK_N
    last = gl.cdiv(high, BLOCK_N)
    if start_m >= seqlen_q:  # rows of a dense batch past the end of their sequence
        last = 0
    last = gl.maximum(last, first)
    whole_last = gl.maximum(gl.minimum(whole_high // BLOCK_N, last - 1), first)
    whole_first = gl.minimum(gl.maximum(whole_low // BLOCK_N, first), whole_last)
    return last, whole_last, whole_first, first


@gluon.jit
def query_tiles(
    start_n,
    seqlen_q,
    seqlen_kv,
    window_left,
    window_right,
    BLOCK_N: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """The query tiles of 64 rows of a key tile: (first, whole_first, whole_last, last, lowest, highest).

    In [first, last) some row sees a key; [whole_first, whole_last) need no mask. Tile first is always masked, so
    whole_first > first. Without any tile last == first. Rows in [lowest, highest) see a key of the sequence.
    """
    diagonal = 0
    if BOTTOM_RIGHT:
        diagonal = seqlen_kv - seqlen_q
    lowest, highest = rows_with_keys(seqlen_q, seqlen_kv, diagonal, window_left, window_right, HAS_LEFT, HAS_RIGHT)
    low, whole_low, whole_high, high = lowest, lowest, highest, highest
    if HAS_RIGHT:
        reach = start_n - diagonal - window_right  # the first query that sees the tile's first key
        low = gl.maximum(low, reach)
        whole_low = gl.maximum(low, reach + BLOCK_N - 1)
    if HAS_LEFT:
        reach = start_n - diagonal + window_left + 1  # the first query that no longer sees it
        whole_high = gl.minimum(high, reach)
        high = gl.minimum(high, reach + BLOCK_N - 1)
    first = low // ROWS
    last = gl.cdiv(gl.maximum(high, 0), ROWS)
    if start_n >= seqlen_kv:  # keys of a dense batch past the end of their sequence
        last = 0
    last = gl.maximum(last, first)
    whole_first = gl.minimum(gl.maximum(gl.cdiv(whole_low, ROWS), first + 1), last)
    whole_last = gl.maximum(gl.minimum(gl.maximum(whole_high, 0) // ROWS, last), whole_first)
    return first, whole_first, whole_last, last, lowest, highest
