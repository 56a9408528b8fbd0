"""Two computing warpgroups over tiles of latents: one owns the even key tiles, the other one the odd ones.

A warpgroup computes the scores and weights of its own tiles, and hands the weights to the other one through shared
memory. Both accumulate every tile, each for half of the columns of c_kv (as in FlashMLA, DeepSeek 2025). The decode
kernel and the forward of the same head dimensions share this; kernels/README.md says why it cannot deadlock.

In all functions ``which`` is the warpgroup, 0 or 1: the stage of its own tiles, and its half of the columns. ``uses``
is how many tiles the tile's stage held before; its parity is the phase of the stage's barriers. ``reference`` [ROWS] is
the score, in log2, whose weight is 1: the running maximum, or, of a format ``in_float16``, that of ``tile_reference``.

``tiles``, in shared memory: q_tiles [PANELS] and k_tiles [2 * PANELS], panels of 64 x 64, those of a key tile in one of
two stages, the even tiles in stage 0; p_tile [ROWS, KEYS], weights; maxima [2, ROWS], references of both warpgroups,
in decode a third row, ``SCALE``; sums [4, ROWS].
``barriers``, and who arrives at them:

- q_full, q_empty: TMA has copied the queries of a piece, in the forward of a query tile; both warpgroups have read
  them.
- k_full[2 * stage + half], k_empty[...]: that half of a tile's c_kv has been written, with k_rope if half == stage; the
  warpgroup of that half, which reads it last, has multiplied by it.
- published[w]: warpgroup w has written its tile's weights to p_tile and their reference to maxima[w].
- finished: both warpgroups have written the sums of a piece's rows.
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

from mla_plugin.kernels.hopper.common import PANEL, ROWS, matrix_layout, product_layout, synchronize, tile_reference
from mla_plugin.kernels.hopper.latent_sums import hand_over_sums, sums_of
from mla_plugin.kernels.tile_math import LOWEST_FLOAT32

KEYS = gl.constexpr(64)
"""Keys of a tile."""
HALF = gl.constexpr(256)
"""Columns of c_kv that a computing warpgroup accumulates: half of the rank."""
PANELS = gl.constexpr(9)
"""Panels of 64 columns of a tile: four of each half of c_kv, then k_rope's."""
PANELS_OF_HALF = gl.constexpr(4)
OUT_ROWS = gl.constexpr(gl.SliceLayout(1, product_layout(HALF)))
SCORES_ROWS = gl.constexpr(gl.SliceLayout(1, product_layout(KEYS)))
_WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, product_layout(HALF), 2))
SCALE = gl.constexpr(2)
"""Where ``maxima`` has the factor of the scores of each row, of a format ``in_float16``."""
_ZEROED_ROWS = gl.constexpr(16)
"""Rows of a tile that are set to 0 per step."""


@gluon.constexpr_function
def in_float16(kv_format):
    """Whether products over such a cache are in float16: rows of queries are scaled, weights relative to their tile."""
    return kv_format == "fp8"


@gluon.jit
def panels_as_matrix(panels, first, COLUMNS: gl.constexpr):
    """COLUMNS columns of 64 rows, from panel ``first`` on."""
    return panels.index(first)._reinterpret(panels.dtype, [ROWS, COLUMNS], matrix_layout(panels.dtype))


@gluon.jit
def _add_scores(s, q_tiles, k_tiles, zero, stage: gl.constexpr, panel: gl.constexpr, is_first: gl.constexpr):
    """s + q keys^T over one panel of columns: [ROWS, KEYS]."""
    q = panels_as_matrix(q_tiles, zero + panel, PANEL)
    k = panels_as_matrix(k_tiles, zero + (stage * PANELS + panel), PANEL)
    return warpgroup_mma(q, k.permute((1, 0)), s, use_acc=not is_first, is_async=True)


@gluon.jit
def _scores(q_tiles, k_tiles, k_full, uses, which: gl.constexpr):
    """q keys^T of an own tile, in stage ``which``: [ROWS, KEYS]. Its own half arrives first, with k_rope."""
    phase = uses & 1
    # uses is never negative: adds 0, but stops the compiler from hoisting the tiles' addresses into registers
    zero = gl.where(uses < 0, 1, 0)
    s = gl.zeros([ROWS, KEYS], gl.float32, product_layout(KEYS))
    mbarrier.wait(k_full.index(2 * which + which), phase)
    for i in gl.static_range(PANELS_OF_HALF):
        s = _add_scores(s, q_tiles, k_tiles, zero, which, which * PANELS_OF_HALF + i, i == 0)
    s = _add_scores(s, q_tiles, k_tiles, zero, which, PANELS - 1, False)
    mbarrier.wait(k_full.index(2 * which + 1 - which), phase)
    for i in gl.static_range(PANELS_OF_HALF):
        s = _add_scores(s, q_tiles, k_tiles, zero, which, (1 - which) * PANELS_OF_HALF + i, False)
    return warpgroup_mma_wait(0, [s])


@gluon.jit
def _zero_rows(k_tiles, stage: gl.constexpr, half: gl.constexpr, first):
    """Write 0 to half of the columns of the rows from ``first`` on: they may be NaN, and 0 * NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    blocks: gl.constexpr = KEYS // _ZEROED_ROWS
    rows = gl.arange(0, _ZEROED_ROWS, gl.SliceLayout(1, layout))
    parts = k_tiles._reinterpret(
        k_tiles.dtype, [k_tiles.shape[0] * blocks, _ZEROED_ROWS, PANEL], matrix_layout(k_tiles.dtype)
    )
    for block in range(first // _ZEROED_ROWS, blocks):
        exists = rows < first - block * _ZEROED_ROWS
        # the panels as [16, 64]: the swizzle repeats every 8 rows, so a part of a tile is a tile
        for i in gl.static_range(PANELS_OF_HALF):
            rows_of_panel = parts.index((stage * PANELS + half * PANELS_OF_HALF + i) * blocks + block)
            rows_of_panel.store(gl.where(exists[:, None], rows_of_panel.load(layout), 0.0))
    fence_async_shared()
    synchronize()


@gluon.jit
def _accumulate(
    acc, p, rescale, start, length, k_tiles, k_empty, stage: gl.constexpr, half: gl.constexpr, FORMAT: gl.constexpr
):
    """acc * rescale + p V: [ROWS, HALF]; V is the half's columns of the tile in ``stage``, which is free afterwards."""
    if FORMAT == "plain":  # of other formats the gathering warpgroup writes zeros
        if start + KEYS > length:
            _zero_rows(k_tiles, stage, half, length - start)
    acc = acc * gl.convert_layout(rescale, OUT_ROWS)[:, None]
    v = panels_as_matrix(k_tiles, stage * PANELS + half * PANELS_OF_HALF, HALF)
    acc = warpgroup_mma(p, v, acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(k_empty.index(2 * stage + half))
    return acc


@gluon.jit
def _weights(s, reference, highest, row_sum, start, seen_by_all, visible, scale_log2, maxima, FORMAT: gl.constexpr):
    """Weights of the scores s of the keys from ``start`` on.

    Rows see the keys before ``visible``, every row those before ``seen_by_all``.

    Returns:
        (weights [ROWS, KEYS], reference, highest, row_sum, factor for the previous sums).
    """
    if start + KEYS > seen_by_all:
        keys = gl.arange(0, KEYS, gl.SliceLayout(0, s.type.layout))[None, :]
        s = gl.where(keys < (visible - start)[:, None], s, float("-inf"))
    if in_float16(FORMAT):
        # in registers it would take two more of each thread: then ptxas serialises the products, or spills
        scale_log2 = maxima.index(SCALE).load(SCORES_ROWS)
    of_tile = gl.max(s, 1) * scale_log2
    if in_float16(FORMAT):
        new_reference, highest = tile_reference(of_tile, reference, highest)
        s = s * scale_log2[:, None]
    else:
        new_reference = gl.maximum(reference, of_tile)
        s = s * scale_log2
    p = gl.exp2(s - new_reference[:, None])
    rescale = gl.exp2(reference - new_reference)
    return p, new_reference, highest, row_sum * rescale + gl.sum(p, 1), rescale


@gluon.jit
def _publish(p, reference, row_sum, tiles, barriers, exchanges, hands_over, which: gl.constexpr):
    """Hand an own tile's weights and reference to the other warpgroup, which has read the previous ones.

    hands_over: and ``row_sum``, which is complete. As ``hand_over_sums``, but one ``synchronize`` is for both arrivals.
    """
    _q_tiles, _k_tiles, p_tile, maxima, sums = tiles
    _q_full, _q_empty, _k_full, _k_empty, published, finished = barriers
    p_tile.store(p)
    maxima.index(which).store(reference)
    if hands_over:
        sums_of(sums, exchanges, which).store(row_sum)
    synchronize()
    mbarrier.arrive(published.index(which))
    if hands_over:
        mbarrier.arrive(finished.index(0))


@gluon.jit
def _take(reference, highest, row_sum, uses, p_tile, maxima, published, other: gl.constexpr, FORMAT: gl.constexpr):
    """The other warpgroup's weights [ROWS, KEYS], then as ``_weights``; they are not added to the sum."""
    mbarrier.wait(published.index(other), uses & 1)
    p = p_tile.load(_WEIGHTS)
    new_reference = maxima.index(other).load(SCORES_ROWS)
    if in_float16(FORMAT):
        # one held at FLOAT16_SPAN below the highest is not the highest: so both warpgroups know the same
        highest = gl.maximum(highest, new_reference)
    rescale = gl.exp2(reference - new_reference)
    return p, new_reference, highest, row_sum * rescale, rescale


@gluon.jit
def _own_tile(
    acc,
    reference,
    highest,
    row_sum,
    start,
    uses,
    length,
    seen_by_all,
    visible,
    scale_log2,
    tiles,
    barriers,
    exchanges,
    hands_over,
    releases,
    which: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """Fold an own tile into acc [ROWS, HALF] and into the reference and sum of each row.

    ``hands_over`` and ``releases``: see ``_two_tiles``.
    """
    q_tiles, k_tiles, _p_tile, maxima, _sums = tiles
    _q_full, q_empty, k_full, k_empty, _published, _finished = barriers
    s = _scores(q_tiles, k_tiles, k_full, uses, which)
    if releases:
        mbarrier.arrive(q_empty.index(0))
    p, reference, highest, row_sum, rescale = _weights(
        s, reference, highest, row_sum, start, seen_by_all, visible, scale_log2, maxima, FORMAT
    )
    p = gl.convert_layout(p.to(k_tiles.dtype), _WEIGHTS)
    _publish(p, reference, row_sum, tiles, barriers, exchanges, hands_over, which)
    acc = _accumulate(acc, p, rescale, start, length, k_tiles, k_empty, which, which, FORMAT)
    return acc, reference, highest, row_sum


@gluon.jit
def _others_tile(
    acc,
    reference,
    highest,
    row_sum,
    start,
    uses,
    length,
    tiles,
    barriers,
    exchanges,
    hands_over,
    releases,
    which: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """The same of a tile of the other warpgroup, with the weights that it publishes."""
    _q_tiles, k_tiles, p_tile, maxima, sums = tiles
    _q_full, q_empty, k_full, k_empty, published, finished = barriers
    if releases:  # the last tile is the other warpgroup's, so the own scores are computed
        synchronize()  # without own scores the warps have not met since they waited for the queries
        mbarrier.arrive(q_empty.index(0))
    other: gl.constexpr = 1 - which
    p, reference, highest, row_sum, rescale = _take(
        reference, highest, row_sum, uses, p_tile, maxima, published, other, FORMAT
    )
    if hands_over:
        hand_over_sums(row_sum, sums, finished, exchanges, which)
    mbarrier.wait(k_full.index(2 * other + which), uses & 1)
    acc = _accumulate(acc, p, rescale, start, length, k_tiles, k_empty, other, which, FORMAT)
    return acc, reference, highest, row_sum


@gluon.jit
def _two_tiles(
    acc,
    reference,
    highest,
    row_sum,
    start,
    even,
    odd,
    length,
    seen_by_all,
    visible,
    scale_log2,
    tiles,
    barriers,
    exchanges,
    hands_over,
    releases,
    which: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """An even tile, from key ``start`` on, and the odd one after it; ``even`` and ``odd`` are their ``uses``.

    hands_over: whether the sums are complete after these tiles, and handed over; releases: whether their scores are the
    last ones with these queries.
    """
    q_tiles, k_tiles, p_tile, maxima, _sums = tiles
    _q_full, q_empty, k_full, k_empty, published, _finished = barriers
    if which == 0:
        # fmt: off
        acc, reference, highest, row_sum = _own_tile(
            acc, reference, highest, row_sum, start, even, length, seen_by_all, visible, scale_log2, tiles, barriers,
            exchanges, False, releases, 0, FORMAT,
        )
        acc, reference, highest, row_sum = _others_tile(
            acc, reference, highest, row_sum, start + KEYS, odd, length, tiles, barriers, exchanges, hands_over, False,
            0, FORMAT,
        )
        # fmt: on
    else:
        # its own weights first: the other warpgroup waits for them
        s = _scores(q_tiles, k_tiles, k_full, odd, 1)
        if releases:
            mbarrier.arrive(q_empty.index(0))
        p0, reference, highest, row_sum, rescale0 = _take(
            reference, highest, row_sum, even, p_tile, maxima, published, 0, FORMAT
        )
        p1, reference, highest, row_sum, rescale1 = _weights(
            s, reference, highest, row_sum, start + KEYS, seen_by_all, visible, scale_log2, maxima, FORMAT
        )
        p1 = gl.convert_layout(p1.to(k_tiles.dtype), _WEIGHTS)
        _publish(p1, reference, row_sum, tiles, barriers, exchanges, hands_over, 1)
        mbarrier.wait(k_full.index(1), even & 1)
        acc = _accumulate(acc, p0, rescale0, start, length, k_tiles, k_empty, 0, 1, FORMAT)
        acc = _accumulate(acc, p1, rescale1, start + KEYS, length, k_tiles, k_empty, 1, 1, FORMAT)
    return acc, reference, highest, row_sum


@gluon.jit
def no_keys():
    """acc [ROWS, HALF], reference and sum of each row before the first key."""
    acc = gl.zeros([ROWS, HALF], gl.float32, product_layout(HALF))
    reference = gl.full([ROWS], LOWEST_FLOAT32, gl.float32, SCORES_ROWS)
    return acc, reference, gl.zeros([ROWS], gl.float32, SCORES_ROWS)


@gluon.jit
def fold_tiles(
    acc,
    reference,
    row_sum,
    low,
    steps,
    even,
    odd,
    length,
    seen_by_all,
    visible,
    scale_log2,
    tiles,
    barriers,
    exchanges,
    releases,
    which: gl.constexpr,
    FORMAT: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Fold ``steps`` tiles from tile ``low`` on, the first of which is in stage 0; returns ``even`` and ``odd``, too.

    The sums are those of the own tiles, and handed over for ``sum_of_both``.

    Args:
        scale_log2: not used in a format ``in_float16``, where each row has its own in ``maxima[SCALE]``.
        exchanges: how often sums were handed over before.
        releases: whether no other tiles need these queries. Not used unless EARLY.
        EARLY: hand over the sums before the last products, so that neither warpgroup waits for the other one's, and
            release the queries after the last scores, so that TMA can copy the next ones. Otherwise the sums follow the
            last products, and the caller releases the queries.
    """
    _q_tiles, _k_tiles, _p_tile, _maxima, sums = tiles
    _q_full, _q_empty, _k_full, _k_empty, _published, finished = barriers
    highest = reference  # not used, and never changed, unless ``in_float16``
    for pair in range(steps // 2):
        start = (low + 2 * pair) * KEYS
        is_last = (2 * pair + 2 == steps) if EARLY else False
        # fmt: off
        acc, reference, highest, row_sum = _two_tiles(
            acc, reference, highest, row_sum, start, even, odd, length, seen_by_all, visible, scale_log2, tiles,
            barriers, exchanges, is_last, is_last & releases, which, FORMAT,
        )
        # fmt: on
        even += 1
        odd += 1
    if steps % 2 == 1:
        start = (low + steps - 1) * KEYS
        # fmt: off
        if which == 0:
            acc, reference, highest, row_sum = _own_tile(
                acc, reference, highest, row_sum, start, even, length, seen_by_all, visible, scale_log2, tiles,
                barriers, exchanges, EARLY, releases & EARLY, 0, FORMAT,
            )
        else:
            acc, reference, highest, row_sum = _others_tile(
                acc, reference, highest, row_sum, start, even, length, tiles, barriers, exchanges, EARLY,
                releases & EARLY, 1, FORMAT,
            )
        # fmt: on
        even += 1
    if not EARLY:
        hand_over_sums(row_sum, sums, finished, exchanges, which)
    return acc, reference, row_sum, even, odd
