"""Sizes and layouts of the transposed decode kernel."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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


@gluon.constexpr_function
def product_layout(rows):
    """The layout of a WGMMA accumulator with ``rows`` (query, head) pairs as its columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16])


@gluon.constexpr_function
def bytes_layout(columns):
    """The layout of a panel [1, KEYS, columns] of e4m3, as TMA writes it."""
    return gl.NVMMASharedLayout(columns, 8, 3)
