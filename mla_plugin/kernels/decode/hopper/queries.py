"""Queries of the Hopper decode where products are of float16: scaled and converted by the computing warpgroups."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mla_plugin.kernels.decode.hopper.common import FLOAT16_TOP, nonzero_scale, row_factor
from mla_plugin.kernels.hopper.common import PANEL, ROWS, synchronize
from mla_plugin.kernels.hopper.latent import PANELS, PANELS_OF_HALF, SCALE, panels_as_matrix

_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_LAYOUT_ROWS = gl.constexpr(gl.SliceLayout(1, _LAYOUT))


@gluon.jit
def _load_panel(copied, panel: gl.constexpr):
    return panels_as_matrix(copied, panel, PANEL).load(_LAYOUT).to(gl.float32)


@gluon.jit
def _convert_panel(copied, q_tiles, factor, panel: gl.constexpr):
    x = (_load_panel(copied, panel) * factor[:, None]).to(gl.float16)
    panels_as_matrix(q_tiles, panel, PANEL).store(x)


@gluon.jit
def scale_queries(tiles, q_converted, scale_log2, which: gl.constexpr, DTYPE: gl.constexpr):
    """Convert a piece's queries, which TMA has copied in DTYPE, to float16 in place, each row times a power of 2.

    Each warpgroup converts its half of the columns, warpgroup 0 those of q_rope too; a thread overwrites the 16 bytes
    that it has read. Both arrive at ``q_converted`` twice for each piece, so its phases are 0 and 1 in every piece:
    when ``maxima`` has the largest numbers of a warpgroup's columns, and when they are converted and fenced, so that
    the other's products may read them. ``maxima`` is free: before the previous piece was ``finished`` both have read
    the other's last reference. Warpgroup 0 writes the factor of the scores of each row to ``maxima[SCALE]``, when both
    have arrived here once, so that the other one has read that of the previous piece. Neither waits forever, as both
    come here for the same pieces.
    """
    q_tiles, _k_tiles, _p_tile, maxima, _sums = tiles
    copied = q_tiles._reinterpret(DTYPE, q_tiles.shape, q_tiles.layout)
    first: gl.constexpr = which * PANELS_OF_HALF
    largest = gl.full([ROWS], 0.0, gl.float32, _LAYOUT_ROWS)
    for i in gl.static_range(PANELS_OF_HALF):
        largest = gl.maximum(largest, gl.max(gl.abs(_load_panel(copied, first + i)), 1))
    if which == 0:
        largest = gl.maximum(largest, gl.max(gl.abs(_load_panel(copied, PANELS - 1)), 1))
    maxima.index(which).store(largest)
    synchronize()
    mbarrier.arrive(q_converted.index(0))
    mbarrier.wait(q_converted.index(0), 0)
    factor, inverse = row_factor(gl.maximum(largest, maxima.index(1 - which).load(_LAYOUT_ROWS)), FLOAT16_TOP)
    if which == 0:
        maxima.index(SCALE).store(nonzero_scale(inverse * scale_log2))
    for i in gl.static_range(PANELS_OF_HALF):
        _convert_panel(copied, q_tiles, factor, first + i)
    if which == 0:
        _convert_panel(copied, q_tiles, factor, PANELS - 1)
    fence_async_shared()
    synchronize()
    mbarrier.arrive(q_converted.index(0))
    mbarrier.wait(q_converted.index(0), 1)
