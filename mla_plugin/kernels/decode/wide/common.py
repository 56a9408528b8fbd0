"""Sizes, layouts and shared memory of the wide decode kernel.

``tiles``, in shared memory:

- q_tiles, r_tiles_q: the queries of a piece in e4m3, [ROWS, RANK] and [ROWS, ROPE], two terms each, whose sum they are;
- c_tiles, r_tiles: ``STAGES`` slots, each of a key tile as TMA copies it, or of half of the queries in bfloat16;
- p_tiles: weights of an own tile of each warpgroup, [KEYS, ROWS], float16;
- vectors: float32 of each row, see the numbers below;
- largest: [2 * BLOCKS, BLOCK], the largest number of each row in the columns of each warpgroup;
- sums: [4, ROWS], of both warpgroups' tiles, two slots each in turn.

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

ROWS = gl.constexpr(64)
"""(query, head) pairs of a tile."""
HALF = gl.constexpr(256)
"""Columns of c_kv that a computing warpgroup accumulates."""
STAGES = gl.constexpr(3)
"""Slots in shared memory."""
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
"""Where ``vectors`` has the references of both warpgroups' last tiles, factors of earlier sums, and of the scores."""
VECTORS = gl.constexpr(5)


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
