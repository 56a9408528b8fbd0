"""Where ``batch_invariant`` decode splits a sequence: at fixed positions, further apart the further from its first key.

A chunk has CHUNK keys among the first, then 2 * CHUNK, then 4 * CHUNK. So a short sequence keeps many programs busy,
and a long one has few partial results for its keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_plugin.kernels.tiles import ceil_div

_SINGLE, _DOUBLE = 32, 48
SINGLE = tl.constexpr(_SINGLE)
"""Chunks of CHUNK keys at the start of a sequence."""
DOUBLE = tl.constexpr(_DOUBLE)
"""Chunks of 2 * CHUNK keys after them."""


@triton.jit
def first_key(chunk, CHUNK: tl.constexpr):
    """Where a chunk begins, counted from the first visible key."""
    doubled = tl.maximum(chunk - SINGLE, 0)
    fourfold = tl.maximum(chunk - SINGLE - DOUBLE, 0)
    return (chunk + doubled + 2 * fourfold) * CHUNK


@triton.jit
def chunks_from(units):
    """How many chunks begin within the first ``units`` * CHUNK keys; the inverse of ``first_key``, rounded up."""
    doubled = tl.maximum(units - SINGLE, 0)
    fourfold = tl.maximum(doubled - 2 * DOUBLE, 0)
    return tl.minimum(units, SINGLE) + (tl.minimum(doubled, 2 * DOUBLE) + 1) // 2 + (fourfold + 3) // 4


def most_chunks(capacity: int, chunk: int) -> int:
    """Chunks of a sequence of ``capacity`` keys, at least one: ``chunks_from`` on the host."""
    units = max(1, ceil_div(capacity, chunk))
    doubled = min(max(units - _SINGLE, 0), 2 * _DOUBLE)
    return min(units, _SINGLE) + ceil_div(doubled, 2) + ceil_div(max(units - _SINGLE - 2 * _DOUBLE, 0), 4)
