"""Static tile tables: one configuration per kernel, shared-memory class and head dimensions, so that nothing is tuned.

A shared-memory class is what one thread block may use: 99 KiB (compute capability 8.6, 8.9, 12.0), 163 KiB (8.0),
227 KiB (9.0, 10.0). Every entry is compiled ahead of time for its cards in tests/kernels/test_ahead_of_time.py, which
holds its shared memory and its register spills to stated figures.
"""

from __future__ import annotations

from typing import NamedTuple

CLASSES: dict[int, tuple[int, ...]] = {99: (86, 89, 120), 163: (80,), 227: (90, 100)}
"""KiB of shared memory per block, and the compute capabilities (major * 10 + minor) that have them."""


class Tile(NamedTuple):
    """Launch configuration: BLOCK_M queries by BLOCK_N keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """Passed to the assembler; on compute capability 8.x it otherwise sometimes settles on 32 registers and spills."""


def shared_memory_class(bytes_per_block: int) -> int:
    """The largest class that fits a device's opt-in shared memory per block.

    Raises:
        ValueError: the device has less than 99 KiB.
    """
    for kib in sorted(CLASSES, reverse=True):
        if bytes_per_block >= kib * 1024:
            return kib
    raise ValueError(f"{bytes_per_block} bytes of shared memory per block; the kernels need at least {99 * 1024}")


INTERPRETED = 0
"""The class of Triton's interpreter, which has no shared memory and is fastest with few, large tiles."""
_INTERPRETED_TILE = Tile(64, 64, 4, 1)

# rows: (largest head_dim_qk + head_dim_v in columns, tile); the first row that is wide enough is taken
_Rows = tuple[tuple[int, Tile], ...]

FORWARD: dict[tuple[int, int], _Rows] = {
    (227, 2): (
        (256, Tile(128, 64, 8, 3)),
        (384, Tile(128, 64, 8, 3)),
        (512, Tile(128, 64, 8, 2)),
        (1088, Tile(64, 32, 8, 2)),
    ),
    (163, 2): (
        (256, Tile(128, 64, 8, 3)),
        (384, Tile(128, 64, 8, 2)),
        (512, Tile(64, 64, 8, 2)),
        (1088, Tile(32, 16, 8, 2)),
    ),
    (99, 2): (
        (256, Tile(64, 64, 4, 2)),
        (384, Tile(64, 32, 4, 2)),
        (512, Tile(64, 32, 8, 2)),
        (1088, Tile(16, 16, 4, 1)),
    ),
    (227, 4): ((256, Tile(64, 32, 4, 2)), (512, Tile(32, 32, 4, 2)), (1088, Tile(16, 16, 4, 2))),
    (163, 4): ((256, Tile(64, 32, 4, 2)), (512, Tile(32, 32, 4, 1)), (1088, Tile(16, 16, 4, 1))),
    (99, 4): ((256, Tile(32, 32, 4, 2)), (512, Tile(32, 16, 4, 1)), (1088, Tile(16, 16, 4, 1))),
}
BACKWARD_KV: dict[tuple[int, int], _Rows] = {
    (227, 2): (
        (256, Tile(64, 128, 8, 3)),
        (384, Tile(64, 128, 8, 3)),
        (512, Tile(32, 64, 8, 2)),
        (1088, Tile(16, 32, 8, 1)),
    ),
    (163, 2): (
        (256, Tile(32, 64, 4, 2, 255)),
        (384, Tile(32, 64, 4, 2, 255)),
        (512, Tile(32, 64, 8, 2, 255)),
        (1088, Tile(16, 16, 8, 1, 255)),
    ),
    (99, 2): (
        (256, Tile(32, 64, 4, 2, 255)),
        (384, Tile(32, 32, 4, 2)),
        (512, Tile(16, 32, 4, 1, 255)),
        (1088, Tile(16, 16, 8, 1, 255)),
    ),
    (227, 4): ((256, Tile(32, 32, 4, 2)), (512, Tile(16, 32, 4, 1)), (1088, Tile(16, 16, 8, 1))),
    (163, 4): ((256, Tile(32, 32, 4, 1)), (512, Tile(16, 16, 4, 1)), (1088, Tile(16, 16, 8, 1))),
    (99, 4): ((256, Tile(16, 32, 4, 1)), (512, Tile(16, 16, 4, 1)), (1088, Tile(16, 16, 8, 1))),
}
BACKWARD_Q: dict[tuple[int, int], _Rows] = {
    (227, 2): (
        (256, Tile(128, 64, 8, 3)),
        (384, Tile(128, 64, 8, 3)),
        (512, Tile(64, 32, 8, 2)),
        (1088, Tile(32, 16, 8, 1)),
    ),
    (163, 2): (
        (256, Tile(128, 32, 8, 2, 255)),
        (384, Tile(128, 32, 8, 2, 255)),
        (512, Tile(64, 32, 8, 2, 255)),
        (1088, Tile(16, 16, 8, 1, 255)),
    ),
    (99, 2): (
        (256, Tile(64, 32, 4, 2, 255)),
        (384, Tile(64, 32, 8, 2, 255)),
        (512, Tile(32, 16, 4, 1, 255)),
        (1088, Tile(16, 16, 8, 1, 255)),
    ),
    (227, 4): ((256, Tile(32, 32, 4, 2)), (512, Tile(32, 16, 4, 1)), (1088, Tile(16, 16, 8, 1))),
    (163, 4): ((256, Tile(32, 32, 4, 1)), (512, Tile(16, 16, 4, 1)), (1088, Tile(16, 16, 8, 1))),
    (99, 4): ((256, Tile(32, 16, 4, 1)), (512, Tile(16, 16, 4, 1)), (1088, Tile(16, 16, 8, 1))),
}


def tile_for(table: dict[tuple[int, int], _Rows], kib: int, itemsize: int, columns: int) -> Tile:
    """The table's tile for ``columns`` = head_dim_qk + head_dim_v in padded columns.

    Raises:
        ValueError: no entry is wide enough.
    """
    if kib == INTERPRETED:
        return _INTERPRETED_TILE
    for widest, tile in table[kib, itemsize]:
        if columns <= widest:
            return tile
    raise ValueError(f"head_dim_qk + head_dim_v = {columns} columns > {table[kib, itemsize][-1][0]}")
