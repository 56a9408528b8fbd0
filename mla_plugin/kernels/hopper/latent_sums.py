"""The sums of rows, which both computing warpgroups over latents need of each other's tiles, see ``latent.py``.

``sums``, in shared memory: [4, ROWS]. ``finished`` is the barrier at which both warpgroups arrive for each exchange.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mla_plugin.kernels.hopper.common import synchronize


@gluon.jit
def sums_of(sums, exchanges, which: gl.constexpr):
    """Where warpgroup ``which`` writes its sums: two places in turn, as the other one may still read the previous."""
    return sums.index(2 * (exchanges & 1) + which)


@gluon.jit
def hand_over_sums(row_sum, sums, finished, exchanges, which: gl.constexpr):
    """Write a warpgroup's sums of a piece, or of a chunk of it; ``exchanges``: how often that was done before."""
    sums_of(sums, exchanges, which).store(row_sum)
    synchronize()
    # one barrier for both: with two, one warpgroup could end two of the other's phases while that waits for one
    mbarrier.arrive(finished.index(0))


@gluon.jit
def sum_of_both(row_sum, sums, finished, exchanges, which: gl.constexpr):
    """The sums of both warpgroups' tiles, after both have handed them over."""
    mbarrier.wait(finished.index(0), exchanges & 1)
    return row_sum + sums_of(sums, exchanges, 1 - which).load(row_sum.type.layout)
