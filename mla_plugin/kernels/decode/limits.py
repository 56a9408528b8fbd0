"""What the decode kernels can count in int32."""

from __future__ import annotations

from mla_plugin.kernels.tiles import ceil_div

OVERHEAD = 4
"""Fixed cost of a sequence in the division of work, in tiles."""
_MOST_KEYS = 2**31 - 2**15
"""Two of the largest chunks of a batch-invariant call may reach beyond the last key."""
_MOST_ROWS = 2**31 - 2**10
"""A tile of rows may reach beyond the last one."""


def count_tiles(batch: int, capacity: int, block_n: int) -> int:
    """The most key tiles that a sequence can have.

    Raises:
        ValueError: those of all sequences exceed the plan's int32, or the keys of one do.
    """
    if capacity > _MOST_KEYS:
        raise ValueError(
            f"sequences of up to {capacity} keys, expected at most {_MOST_KEYS}, which the kernels count in int32: "
            "give them a narrower page table"
        )
    key_tiles: int = max(1, ceil_div(capacity, block_n))
    # the parts, fewer than 2**16, are of one length, and may reach beyond the end by a tile each
    if batch * (key_tiles + OVERHEAD) >= 2**31 - 2**16:
        raise ValueError(
            f"batch={batch} sequences of up to {capacity} keys are {batch * key_tiles} tiles of {block_n}; the "
            "kernel counts fewer than 2**31: give it a smaller batch or a narrower page table"
        )
    return key_tiles


def check_rows(seqlen_q: int, heads: int) -> None:
    """Raise ValueError if the kernels cannot count the (query, head) pairs of a sequence."""
    if seqlen_q * heads > _MOST_ROWS:
        raise ValueError(
            f"{seqlen_q} queries of {heads} heads are {seqlen_q * heads} rows of a sequence, expected at most "
            f"{_MOST_ROWS}, which the kernels count in int32: give them fewer queries at a time"
        )
