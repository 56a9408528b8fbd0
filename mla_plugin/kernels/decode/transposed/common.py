"""Sizes and layouts of the transposed and the wide decode kernel."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_plugin.kernels.decode.transposed.rule import FEW_ROWS

KEYS = gl.constexpr(64)
"""Keys of a tile: the rows of a WGMMA."""
RANK = gl.constexpr(512)
"""Columns of c_kv."""
ROPE = gl.constexpr(64)
"""Columns of k_rope."""
PANEL = gl.constexpr(128)
"""Columns of one TMA copy of e4m3: 128 bytes, the widest swizzle."""
PANELS = gl.constexpr(4)
"""Panels of a tile of c_kv."""
STAGES = gl.constexpr(2)
"""Tiles in shared memory."""

E4M3 = gl.constexpr(gl.float8e4nv)
E4M3_TOP = gl.constexpr(7)
"""Of ``row_factor``: the largest number of a row of queries in e4m3 lies between 2^7 and 2^8."""


LOW = gl.constexpr(32.0)
"""What the lower terms of queries in e4m3 are multiplied by.

At most 2^3, they stay below 448, e4m3's largest number, and their last bits down to 2^-14 are held.
"""


@gluon.constexpr_function
def splits_queries(dtype, rows, has_lse):
    """Whether the scores are products over e4m3, of two terms of the queries.

    These are too inexact for the log-sum-exp, and with few rows hardly faster; float16 would need a third term.
    """
    return dtype == gl.bfloat16 and rows > FEW_ROWS and not has_lse


@gluon.constexpr_function
def product_layout(rows):
    """The layout of a WGMMA accumulator with ``rows`` (query, head) pairs as its columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16])


@gluon.constexpr_function
def scores_layout(rows):
    """The same of a product over e4m3."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 32])


@gluon.constexpr_function
def panel_layout(columns):
    """The layout of [rows, columns] of e4m3, in panels."""
    return gl.NVMMASharedLayout(min(columns, PANEL.value), 8, 2)


@gluon.constexpr_function
def bytes_layout(columns):
    """The layout of a panel [1, KEYS, columns] of e4m3, as TMA writes it."""
    return gl.NVMMASharedLayout(columns, 8, 3)
