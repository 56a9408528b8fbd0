"""Sizes, layouts and shared memory of the wide decode kernel.

``tiles``, in shared memory:

- q_tiles [TERMS * PANELS, ROWS, PANEL], r_tiles_q [TERMS, ROWS, ROPE]: the queries of a piece in e4m3, as two terms
  whose sum they are;
- c_tiles [STAGES * PANELS, 1, KEYS, PANEL], r_tiles [STAGES, 1, KEYS, ROPE]: bytes, ``STAGES`` slots. A slot has a key
  tile as TMA copies it, or half of the columns of a piece's queries in bfloat16;
- p_tiles [2, KEYS, ROWS]: the weights of each warpgroup's last own tile, float16;
- vectors [VECTORS, ROWS]: float32, see ``REFERENCE`` and the others;
- largest [2 * BLOCKS, BLOCK]: the largest number of each row in the columns of each warpgroup;
- sums [4, ROWS]: as in ``kernels/hopper/latent.py``.

``barriers``, and who arrives at them:

- full[slot], empty[slot]: TMA has filled a slot; both warpgroups have read it.
- published[w]: warpgroup w has written p_tiles[w] and its vectors.
- taken[w]: the other warpgroup has read them, and multiplied by p_tiles[w].
- converted, twice for each piece: both warpgroups have written ``largest``; both have converted their queries.
- finished: both have written their sums of a piece.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_plugin.kernels.decode.transposed.common import (
    E4M3,
    KEYS,
    PANEL,
    PANELS,
    RANK,
    ROPE,
    panel_layout,
    product_layout,
    scores_layout,
)
from mla_plugin.kernels.decode.wide.rule import SLOTS
from mla_plugin.kernels.hopper.common import ROWS

STAGES = gl.constexpr(SLOTS)
"""Slots in shared memory."""
QUERY_COLUMNS = gl.constexpr(64)
"""Of a panel of queries in bfloat16: 128 bytes. Of q_rope a panel has half as many."""
TERMS = gl.constexpr(2)
"""e4m3 numbers whose sum is an element of the queries."""
BLOCK, BLOCKS = gl.constexpr(16), gl.constexpr(4)
"""Rows of queries that are converted at a time, and how many such blocks there are."""
SCORES = gl.constexpr(scores_layout(KEYS.value))
SCORES_ROWS = gl.constexpr(gl.SliceLayout(1, SCORES))
OUT = gl.constexpr(product_layout(ROWS.value))
"""The accumulator's layout: [HALF, ROWS], transposed."""
OUT_ROWS = gl.constexpr(gl.SliceLayout(0, OUT))
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
REFERENCE, RESCALE, SCALE = gl.constexpr(0), gl.constexpr(2), gl.constexpr(4)
"""Rows of ``vectors``: references of both warpgroups' last tiles, their factors of earlier sums, factor of scores."""
VECTORS = gl.constexpr(5)


@gluon.constexpr_function
def query_layout(columns, rank):
    """The layout of a tile of queries in bfloat16, of so many columns and dimensions."""
    return gl.NVMMASharedLayout(2 * columns, 16, rank)


@gluon.jit
def terms_of_queries(q_tiles, term):
    """One term of the queries as a matrix [ROWS, RANK]."""
    return q_tiles.index(term * PANELS)._reinterpret(E4M3, [ROWS, RANK], panel_layout(PANEL))


@gluon.jit
def keys_of_slot(c_tiles, slot):
    """c_kv of a key tile as a matrix [KEYS, RANK]."""
    return c_tiles.index(slot * PANELS)._reinterpret(E4M3, [KEYS, RANK], panel_layout(PANEL))


@gluon.jit
def rope_of_slot(r_tiles, slot):
    """k_rope of a key tile as a matrix [KEYS, ROPE]."""
    return r_tiles.index(slot)._reinterpret(E4M3, [KEYS, ROPE], panel_layout(ROPE))
