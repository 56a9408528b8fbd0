"""Static tile tables: one configuration per kernel, GPU class, element size and head dimensions.

A GPU class is named after the shared memory per block. Hopper is a class by itself: WGMMA reads both operands from
shared memory, while on compute capability 10.0, with as much memory, copies are kept. Every entry is compiled ahead of
time for the GPUs of its class in tests/kernels/test_prefill_ahead_of_time.py, which checks its shared memory and its
register spills against stated figures; docs/kernels_ahead_of_time.md lists them. Only the 2-byte Hopper entries for up
to 320 columns were chosen by timing (H200); the others are the tiles with the most reuse that fit with few spills.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

GPU_CLASSES: dict[str, tuple[int, ...]] = {
    "99 KiB": (86, 89, 120),
    "163 KiB": (80,),
    "227 KiB": (100,),
    "Hopper": (90,),
}
"""GPU classes, and the compute capabilities (major * 10 + minor) that the entries of each are compiled for."""


class Tile(NamedTuple):
    """Launch configuration: BLOCK_M queries by BLOCK_N keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """``maxnreg`` of the launch: without it ptxas sometimes limits itself to 32 registers and spills thousands."""

    @property
    def suits_descriptors(self) -> bool:
        """Whether tensor descriptors are faster: small tiles keep the resident operand in registers and spill it."""
        return max(self.block_m, self.block_n) >= 64


def gpu_class(capability: tuple[int, int], shared_memory_per_block: int) -> str:
    """The GPU class of a device.

    Raises:
        ValueError: the device has less than 99 KiB of shared memory per block.
    """
    if capability[0] == 9:
        return "Hopper"
    for kib in (227, 163, 99):
        if shared_memory_per_block >= kib * 1024:
            return f"{kib} KiB"
    raise ValueError(f"{shared_memory_per_block} bytes of shared memory per block; the kernels need {99 * 1024}")


INTERPRETED = "interpreter"
"""Triton's interpreter, which has no shared memory and is fastest with few, large tiles."""
_INTERPRETED_TILE = Tile(64, 64, 4, 1)

# rows: (largest head_dim_qk + head_dim_v in columns, tile); the first row that is wide enough is used
Rows: TypeAlias = tuple[tuple[int, Tile], ...]
Table: TypeAlias = dict[tuple[str, int], Rows]

# float32 products are unrolled into multiply-adds: larger tiles take half a minute to compile and spill heavily
_FORWARD_FLOAT32: Rows = ((256, Tile(32, 32, 8, 1, 255)), (768, Tile(16, 16, 8, 2, 255)))
_BACKWARD_KV_FLOAT32: Rows = ((256, Tile(32, 32, 8, 1, 255)), (768, Tile(16, 16, 8, 1, 255)))
_BACKWARD_Q_FLOAT32: Rows = ((256, Tile(32, 16, 8, 2, 255)), (768, Tile(16, 16, 8, 2, 255)))

FORWARD: Table = {
    ("Hopper", 2): (
        (320, Tile(128, 64, 8, 3)),
        (512, Tile(128, 64, 8, 2, 255)),
        (1088, Tile(64, 32, 8, 2, 255)),
    ),
    ("227 KiB", 2): (
        (320, Tile(128, 64, 8, 3)),
        (512, Tile(128, 64, 8, 2, 255)),
        (1088, Tile(64, 32, 8, 2, 255)),
    ),
    ("163 KiB", 2): (
        (320, Tile(128, 64, 8, 3, 255)),
        (512, Tile(64, 64, 8, 2, 255)),
        (1088, Tile(32, 32, 8, 2, 255)),
    ),
    ("99 KiB", 2): (
        (320, Tile(128, 32, 8, 2, 255)),
        (512, Tile(64, 32, 8, 2, 255)),
        (1088, Tile(32, 16, 8, 2, 255)),
    ),
    ("Hopper", 4): (*_FORWARD_FLOAT32, (1088, Tile(16, 16, 8, 2, 255))),
    ("227 KiB", 4): (*_FORWARD_FLOAT32, (1088, Tile(16, 16, 8, 2, 255))),
    ("163 KiB", 4): (*_FORWARD_FLOAT32, (1088, Tile(16, 16, 8, 2, 255))),
    ("99 KiB", 4): _FORWARD_FLOAT32,
}
BACKWARD_KV: Table = {
    ("Hopper", 2): (
        (320, Tile(64, 128, 8, 3)),
        (512, Tile(32, 64, 8, 2, 255)),
        (1088, Tile(16, 32, 8, 2, 255)),
    ),
    ("227 KiB", 2): (
        (256, Tile(64, 128, 8, 3)),
        (320, Tile(32, 128, 8, 3)),
        (512, Tile(32, 64, 8, 2, 255)),
        (1088, Tile(16, 16, 8, 2, 255)),
    ),
    ("163 KiB", 2): (
        (256, Tile(64, 128, 8, 2, 255)),
        (320, Tile(32, 128, 8, 2, 255)),
        (448, Tile(32, 32, 4, 2, 255)),
        (512, Tile(32, 64, 8, 2, 255)),
        (1088, Tile(16, 16, 8, 2, 255)),
    ),
    ("99 KiB", 2): (
        (256, Tile(32, 128, 8, 2, 255)),
        (320, Tile(16, 64, 8, 2, 255)),
        (448, Tile(32, 32, 8, 2, 255)),
        (512, Tile(16, 64, 8, 2, 255)),
        (1088, Tile(16, 16, 8, 2, 255)),
    ),
    ("Hopper", 4): (*_BACKWARD_KV_FLOAT32, (1088, Tile(16, 16, 8, 1, 255))),
    ("227 KiB", 4): (*_BACKWARD_KV_FLOAT32, (1088, Tile(16, 16, 8, 1, 255))),
    ("163 KiB", 4): (*_BACKWARD_KV_FLOAT32, (1088, Tile(16, 16, 8, 1, 255))),
    ("99 KiB", 4): _BACKWARD_KV_FLOAT32,
}
BACKWARD_Q: Table = {
    ("Hopper", 2): (
        (320, Tile(128, 64, 8, 3)),
        (512, Tile(128, 32, 8, 2, 255)),
        (1088, Tile(32, 32, 8, 2, 255)),
    ),
    ("227 KiB", 2): (
        (256, Tile(128, 64, 8, 3)),
        (320, Tile(128, 64, 8, 2)),
        (512, Tile(128, 32, 8, 2, 255)),
        (1088, Tile(32, 32, 8, 2, 255)),
    ),
    ("163 KiB", 2): (
        (256, Tile(128, 64, 8, 2, 255)),
        (320, Tile(128, 32, 8, 2, 255)),
        (512, Tile(64, 64, 8, 2, 255)),
        (1088, Tile(32, 16, 8, 2, 255)),
    ),
    ("99 KiB", 2): (
        (256, Tile(128, 32, 8, 2, 255)),
        (320, Tile(128, 16, 8, 2, 255)),
        (512, Tile(64, 16, 8, 2, 255)),
        (1088, Tile(16, 16, 8, 2, 255)),
    ),
    ("Hopper", 4): (*_BACKWARD_Q_FLOAT32, (1088, Tile(16, 16, 8, 2, 255))),
    ("227 KiB", 4): (*_BACKWARD_Q_FLOAT32, (1088, Tile(16, 16, 8, 2, 255))),
    ("163 KiB", 4): (*_BACKWARD_Q_FLOAT32, (1088, Tile(16, 16, 8, 2, 255))),
    ("99 KiB", 4): _BACKWARD_Q_FLOAT32,
}
TABLES: dict[str, Table] = {"forward": FORWARD, "backward_kv": BACKWARD_KV, "backward_q": BACKWARD_Q}


def tile_for(table: Table, gpu_class: str, itemsize: int, columns: int) -> Tile:
    """The table's tile for ``columns`` = head_dim_qk + head_dim_v in padded columns.

    Raises:
        ValueError: no entry is wide enough.
    """
    if gpu_class == INTERPRETED:
        return _INTERPRETED_TILE
    for widest, tile in table[gpu_class, itemsize]:
        if columns <= widest:
            return tile
    raise ValueError(
        f"head_dim_qk and head_dim_v take {columns} padded columns of {itemsize} bytes; "
        f"GPUs of the class {gpu_class} have tiles for at most {table[gpu_class, itemsize][-1][0]}"
    )


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up. Triton's ``cdiv``, wrapped for kernels, takes 4 us on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n, and at least 1; Triton's own takes 4 us on the host too."""
    return 1 << max(n - 1, 0).bit_length()
