"""The two computing warpgroups of the wide decode kernel: one owns the even key tiles, the other one the odd ones.

As in ``kernels/hopper/latent.py``: a warpgroup computes the scores and weights of its own tiles and hands the weights
to the other one; both accumulate every tile, each for half of the columns. Here both read the weights from shared
memory, and the values, converted from e4m3, are in registers. In all functions ``which`` is the warpgroup, 0 or 1.

``used`` is the number of slots before a tile, ``uses`` how many own tiles its owner had before. ``reference`` [ROWS] is
the score, in log2, whose weight is 1, ``highest`` the highest one so far: see ``tile_reference``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla_plugin.kernels.decode.transposed.common import KEYS
from mla_plugin.kernels.decode.transposed.operands import STEP
from mla_plugin.kernels.decode.wide.common import (
    OUT,
    OUT_ROWS,
    REFERENCE,
    RESCALE,
    SCALE,
    SCORES,
    SCORES_ROWS,
    STAGES,
    TERMS,
    keys_of_slot,
    rope_of_slot,
    terms_of_queries,
)
from mla_plugin.kernels.decode.wide.values import values_of, words_of_step, zero_rows
from mla_plugin.kernels.hopper.common import ROWS, synchronize, tile_reference
from mla_plugin.kernels.hopper.latent import HALF
from mla_plugin.kernels.tile_math import LOWEST_FLOAT32


@gluon.jit
def _wait_for_tile(full, used):
    mbarrier.wait(full.index(used % STAGES), used // STAGES & 1)


@gluon.jit
def _scores(tiles, full, used):
    """q keys^T of an own tile: [ROWS, KEYS]. The lower terms of the queries first, while the sums are small."""
    q_tiles, r_tiles_q, c_tiles, r_tiles, _p_tiles, _vectors, _largest, _sums = tiles
    _wait_for_tile(full, used)
    # used is never negative: adds 0, but stops the compiler from holding the queries' addresses in registers
    zero = gl.where(used < 0, 1, 0)
    rope = rope_of_slot(r_tiles, used % STAGES).permute((1, 0))
    keys = keys_of_slot(c_tiles, used % STAGES).permute((1, 0))
    s = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    for i in gl.static_range(TERMS):
        term = zero + (TERMS - 1 - i)
        s = warpgroup_mma(r_tiles_q.index(term), rope, s, use_acc=i > 0, is_async=True)
        s = warpgroup_mma(terms_of_queries(q_tiles, term), keys, s, is_async=True)
    return warpgroup_mma_wait(0, [s])


@gluon.jit
def _weights(s, reference, highest, row_sum, start, seen_by_all, visible, vectors):
    """Weights of the scores s of the keys from ``start`` on.

    Rows see the keys before ``visible``, every row those before ``seen_by_all``.

    Returns:
        (weights [ROWS, KEYS], reference, highest, row_sum, factor for the previous sums).
    """
    if start + KEYS > seen_by_all:
        keys = gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))[None, :]
        s = gl.where(keys < (visible - start)[:, None], s, float("-inf"))
    scale = vectors.index(SCALE).load(SCORES_ROWS)
    new_reference, highest = tile_reference(gl.max(s, 1) * scale, reference, highest)
    p = gl.exp2(s * scale[:, None] - new_reference[:, None])
    rescale = gl.exp2(reference - new_reference)
    return p, new_reference, highest, row_sum * rescale + gl.sum(p, 1), rescale


@gluon.jit
def _publish(p, reference, rescale, uses, tiles, barriers, which: gl.constexpr):
    """Hand an own tile's weights, reference and factor to both warpgroups, when the other one has taken the last."""
    _q_tiles, _r_tiles_q, _c_tiles, _r_tiles, p_tiles, vectors, _largest, _sums = tiles
    _full, _empty, published, taken, _converted, _finished = barriers
    mbarrier.wait(taken.index(which), (uses & 1) ^ 1)
    p_tiles.index(which).permute((1, 0)).store(p.to(gl.float16))
    vectors.index(REFERENCE + which).store(reference)
    vectors.index(RESCALE + which).store(rescale)
    fence_async_shared()
    synchronize()
    mbarrier.arrive(published.index(which))


@gluon.jit
def _take(reference, highest, row_sum, uses, tiles, barriers, other: gl.constexpr):
    """Reference, highest and row_sum after a tile of the other warpgroup, which has published it."""
    _q_tiles, _r_tiles_q, _c_tiles, _r_tiles, _p_tiles, vectors, _largest, _sums = tiles
    _full, _empty, published, _taken, _converted, _finished = barriers
    mbarrier.wait(published.index(other), uses & 1)
    new_reference = vectors.index(REFERENCE + other).load(SCORES_ROWS)
    # a reference held at FLOAT16_SPAN below the highest is lower than it: both warpgroups know the same highest one
    highest = gl.maximum(highest, new_reference)
    return new_reference, highest, row_sum * gl.exp2(reference - new_reference)


@gluon.jit
def _accumulate(acc, start, length, used, tiles, barriers, owner: gl.constexpr, which: gl.constexpr):
    """acc [HALF, ROWS] times the factors, plus V^T p^T of a tile that warpgroup ``owner`` has published."""
    _q_tiles, _r_tiles_q, c_tiles, _r_tiles, p_tiles, vectors, _largest, _sums = tiles
    full, empty, _published, taken, _converted, _finished = barriers
    slot = used % STAGES
    _wait_for_tile(full, used)
    if start + KEYS > length:
        zero_rows(c_tiles, slot, length - start, which)
        fence_async_shared()
        synchronize()
    words = words_of_step(c_tiles, slot, 0, which)
    acc *= vectors.index(RESCALE + owner).load(OUT_ROWS)[None, :]
    for step in gl.static_range(KEYS // STEP):
        following = words
        if step + 1 < KEYS // STEP:
            following = words_of_step(c_tiles, slot, step + 1, which)
        p = p_tiles.index(owner).slice(step * STEP, STEP, 0)
        acc = warpgroup_mma(values_of(words), p, acc, is_async=True)
        words = following
        if step > 0:  # the next values are converted while this product runs, into the registers of the one before
            acc = warpgroup_mma_wait(1, [acc])
    synchronize()  # all warps have read the tile; the last product runs from registers
    mbarrier.arrive(empty.index(slot))
    acc = warpgroup_mma_wait(0, [acc])
    synchronize()  # no warp's product reads p_tiles[owner] any more
    if owner != which:
        mbarrier.arrive(taken.index(owner))
    return acc


@gluon.jit
def _own_tile(acc, reference, highest, row_sum, start, used, uses, length, seen_by_all, visible, tiles, barriers):
    """Fold a tile that warpgroup 0, which calls this, owns into acc and into the reference and sum of each row."""
    _q_tiles, _r_tiles_q, _c_tiles, _r_tiles, _p_tiles, vectors, _largest, _sums = tiles
    full, _empty, _published, _taken, _converted, _finished = barriers
    s = _scores(tiles, full, used)
    p, reference, highest, row_sum, rescale = _weights(
        s, reference, highest, row_sum, start, seen_by_all, visible, vectors
    )
    _publish(p, reference, rescale, uses, tiles, barriers, 0)
    acc = _accumulate(acc, start, length, used, tiles, barriers, 0, 0)
    return acc, reference, highest, row_sum


@gluon.jit
def _others_tile(acc, reference, highest, row_sum, start, used, uses, length, tiles, barriers, which: gl.constexpr):
    """The same of a tile of the other warpgroup, with the weights that it publishes."""
    reference, highest, row_sum = _take(reference, highest, row_sum, uses, tiles, barriers, 1 - which)
    acc = _accumulate(acc, start, length, used, tiles, barriers, 1 - which, which)
    return acc, reference, highest, row_sum


@gluon.jit
def _two_tiles(
    acc,
    reference,
    highest,
    row_sum,
    start,
    used,
    even,
    odd,
    length,
    seen_by_all,
    visible,
    tiles,
    barriers,
    which: gl.constexpr,
):
    """An even tile, from key ``start`` on, and the odd one after it; ``even`` and ``odd`` are their ``uses``."""
    if which == 0:
        acc, reference, highest, row_sum = _own_tile(
            acc, reference, highest, row_sum, start, used, even, length, seen_by_all, visible, tiles, barriers
        )
        acc, reference, highest, row_sum = _others_tile(
            acc, reference, highest, row_sum, start + KEYS, used + 1, odd, length, tiles, barriers, 0
        )
    else:
        # its own weights first: the other warpgroup waits for them
        _q_tiles, _r_tiles_q, _c_tiles, _r_tiles, _p_tiles, vectors, _largest, _sums = tiles
        full, _empty, _published, _taken, _converted, _finished = barriers
        s = _scores(tiles, full, used + 1)
        reference, highest, row_sum = _take(reference, highest, row_sum, even, tiles, barriers, 0)
        p, reference, highest, row_sum, rescale = _weights(
            s, reference, highest, row_sum, start + KEYS, seen_by_all, visible, vectors
        )
        _publish(p, reference, rescale, odd, tiles, barriers, 1)
        acc = _accumulate(acc, start, length, used, tiles, barriers, 0, 1)
        acc = _accumulate(acc, start + KEYS, length, used + 1, tiles, barriers, 1, 1)
    return acc, reference, highest, row_sum


@gluon.jit
def no_keys():
    """acc [HALF, ROWS], reference and sum of each row before the first key."""
    acc = gl.zeros([HALF, ROWS], gl.float32, OUT)
    reference = gl.full([ROWS], LOWEST_FLOAT32, gl.float32, SCORES_ROWS)
    return acc, reference, gl.zeros([ROWS], gl.float32, SCORES_ROWS)


@gluon.jit
def fold_tiles(
    acc,
    reference,
    row_sum,
    low,
    steps,
    used,
    even,
    odd,
    length,
    seen_by_all,
    visible,
    tiles,
    barriers,
    which: gl.constexpr,
):
    """Fold ``steps`` tiles from tile ``low`` on; the first of them, in slot ``used``, is an even one.

    ``even`` and ``odd``: even and odd tiles folded so far; returned as well. ``row_sum`` is of the own tiles' weights.
    """
    highest = reference
    for pair in range(steps // 2):
        start = (low + 2 * pair) * KEYS
        # fmt: off
        acc, reference, highest, row_sum = _two_tiles(
            acc, reference, highest, row_sum, start, used, even, odd, length, seen_by_all, visible, tiles, barriers,
            which,
        )
        # fmt: on
        used += 2
        even += 1
        odd += 1
    if steps % 2 == 1:
        start = (low + steps - 1) * KEYS
        # fmt: off
        if which == 0:
            acc, reference, highest, row_sum = _own_tile(
                acc, reference, highest, row_sum, start, used, even, length, seen_by_all, visible, tiles, barriers,
            )
        else:
            acc, reference, highest, row_sum = _others_tile(
                acc, reference, highest, row_sum, start, used, even, length, tiles, barriers, 1,
            )
        # fmt: on
        even += 1
    return acc, reference, row_sum, even, odd
