"""Shared by the warps of the decode kernels in Gluon: the plan's functions, copies of queries, the keys of a piece."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from mla_plugin.kernels import tile_math
from mla_plugin.kernels.decode import combine, plan
from mla_plugin.kernels.hopper.common import ROWS
from mla_plugin.kernels.hopper.latent import KEYS

# functions of the plain kernels, compiled as Gluon: both sides must agree on the workspace
load_plan = gluon.jit(plan.load_plan.fn)
_part_range_of_few = gluon.jit(plan.part_range_of_few.fn)
list_of_split = gluon.jit(combine.list_of_split.fn)
in_order = gluon.jit(combine.in_order.fn)
lse_of_parts = gluon.jit(combine.lse_of_parts.fn)
key_range = gluon.jit(plan.key_range.fn)
tiles_between = gluon.jit(plan.tiles_between.fn)
nonzero_scale = gluon.jit(tile_math.nonzero_scale.fn)
row_factor = gluon.jit(tile_math.row_factor.fn)
FLOAT16_TOP = gl.constexpr(14)
"""Of ``row_factor``: the largest number of a row of queries in float16 lies between 2^14 and 2^15."""


@gluon.jit
def share_of_tiles(Plan, seqlens_kv, part, batch, capacity, num_parts, overhead, PLANNED: gl.constexpr):
    """(first, last, begin, size) of a part, see ``part_range``; PLANNED: ``plan_kernel`` has worked it out."""
    if PLANNED:
        return load_plan(Plan, part)
    else:
        return _part_range_of_few(part, num_parts, seqlens_kv, batch, capacity, overhead, KEYS)


@gluon.jit
def piece_of(seqlens_kv, b, tile, at, size, part, batch, capacity, num_heads, seqlen_q, CAUSAL: gl.constexpr):
    """The piece of sequence ``b`` in this part, as ``decode_kernel`` computes it, but without left padding.

    Args:
        tile: row tile of the program.
        at: where the sequence's tiles begin among those of all sequences.
        size: tiles of a part.

    Returns:
        (length, tiles, low, high, steps): the sequence's keys and tiles; the piece is its tiles low .. high - 1, maybe
        none; the first ``steps`` of them have a key that a row of the row tile sees.
    """
    _, _, length = key_range(seqlens_kv, None, b, b < batch, capacity, KEYS)
    tiles = tiles_between(0, length, KEYS)
    low = gl.maximum(part * size - at, 0)
    high = gl.minimum(part * size + size - at, tiles)  # not above 0 where this part has the overhead alone
    last = length
    if CAUSAL:  # the last row of the tile sees most keys
        last += gl.minimum((tile * ROWS + ROWS - 1) // num_heads + 1 - seqlen_q, 0)
    last = gl.minimum(last, high * KEYS)
    steps = gl.maximum(last - low * KEYS + KEYS - 1, 0) // KEYS
    return length, tiles, low, high, steps


@gluon.constexpr_function
def _panel_in_blocks(block):
    """The shape of a panel of ROWS rows as blocks [1, queries, heads, columns], one after another."""
    return [ROWS.value // (block[1] * block[2]), *block]


@gluon.jit
def copy_rows(desc, b, first, column, num_heads, full, panel):
    """Start the copies of ROWS rows of sequence ``b``, from row ``first`` on, a multiple of ROWS.

    Args:
        desc: a descriptor of one of ``QueryRows``' tensors.
        column: the first of the panel.
        full: the barrier at which the bytes count.
        panel: [1, ROWS, columns] in shared memory. Rows past the end of the queries are 0.
    """
    if len(desc.block_shape) == 3:
        tma.async_copy_global_to_shared(desc, [b, first, column], full, panel)
    else:
        shape: gl.constexpr = _panel_in_blocks(desc.block_shape)
        copies: gl.constexpr = shape[0]
        blocks = panel._reinterpret(panel.dtype, shape, desc.layout)
        for i in gl.static_range(copies):
            row = first + i * (ROWS // copies)
            at = [b, row // num_heads, row % num_heads, column]
            tma.async_copy_global_to_shared(desc, at, full, blocks.index(i))
