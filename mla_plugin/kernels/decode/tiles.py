"""Static tile table of the decode kernel: configurations per GPU class, element size, cache width and number of rows.

A row is one (query, head) pair of a sequence; the GPU classes are those of ``tiles.py``.
tests/kernels/test_decode_ahead_of_time.py compiles every entry for the GPUs of its class and checks its shared memory,
registers and spills against stated figures.
"""

from __future__ import annotations

import functools
from typing import NamedTuple


class DecodeTile(NamedTuple):
    """Launch configuration: BLOCK_M rows by BLOCK_N keys.

    Attributes:
        block_m, block_n: rows and keys of a tile.
        num_warps: warps of a program.
        num_stages: pipeline stages of the loop over a contiguous cache: tiles in flight plus one (with 64 rows on
            Hopper just the tiles in flight).
        paged_stages: the same when a page number must be loaded before a tile, which takes as many stages again.
        gathered_stages: the same when a page number is loaded for every key.
        programs: programs that one SM runs at a time.
        planned: whether ``plan_kernel`` computes the share of each program of a plain kernel, or the program itself.
        max_registers: ``maxnreg`` of the launch; None: chosen by ptxas.
        large_gathered: (block_n, gathered_stages) of large batches, see ``for_batch``; None: the same as of others.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    paged_stages: int
    gathered_stages: int
    programs: int
    planned: bool = False
    max_registers: int | None = None
    large_gathered: tuple[int, int] | None = None


# (most columns of c_kv and k_rope together, tile); the first entry with enough columns whose block_m holds all rows is
# taken, or the one with the largest block_m
_Entries = tuple[tuple[int, DecodeTile], ...]

DECODE: dict[tuple[str, int], _Entries] = {
    # measured on an H200 in us, log-normal lengths of 6k in the mean, B 64, pages of 64 unless said:
    # 16 rows: 32 keys a tile 131, 64 keys 148, 9 stages 162, 16 keys 181; the plan in a separate kernel 2 us more
    # 17 to 32 rows (H 24): 64 x 64 with half of its rows empty 160, 32 x 32 172, 32 x 64 188: WGMMA has 64 rows
    # 64 rows (H 128): the plan in a separate kernel 289, in the kernel 327; 32 keys a tile a third slower; pages of 1:
    # 3 stages 374, 2 stages 600; pages of 16: 2 stages 360, 3 stages 375
    # 16 rows in pages of 1: 64 keys and 3 stages 141, 32 keys and 6 stages 142; B 256 475 and 529, but B 8 33 and 29
    ("Hopper", 2): (
        (320, DecodeTile(16, 64, 4, 3, 5, 5, 2)),
        (320, DecodeTile(32, 64, 8, 3, 5, 5, 1)),
        (320, DecodeTile(64, 64, 8, 3, 3, 3, 1, planned=True)),
        (576, DecodeTile(16, 32, 4, 3, 6, 6, 2, large_gathered=(64, 3))),
        (576, DecodeTile(64, 64, 8, 2, 2, 3, 1, planned=True)),
    ),
    ("227 KiB", 2): (
        (320, DecodeTile(16, 64, 4, 3, 5, 5, 2)),
        (320, DecodeTile(32, 64, 8, 3, 5, 5, 1)),
        (320, DecodeTile(64, 64, 8, 2, 2, 2, 1, planned=True)),
        (576, DecodeTile(16, 32, 4, 3, 6, 6, 2)),
        (576, DecodeTile(32, 64, 8, 3, 5, 5, 1)),
        (576, DecodeTile(64, 32, 8, 2, 2, 2, 1, planned=True)),
    ),
    ("163 KiB", 2): (
        (320, DecodeTile(16, 64, 4, 2, 3, 3, 2)),
        (320, DecodeTile(32, 64, 8, 3, 5, 5, 1)),
        (320, DecodeTile(64, 64, 8, 2, 3, 3, 1, planned=True)),
        (576, DecodeTile(16, 64, 4, 2, 3, 3, 1)),
        (576, DecodeTile(32, 32, 8, 3, 5, 5, 1)),
        (576, DecodeTile(64, 32, 8, 3, 5, 5, 1, planned=True)),
    ),
    ("99 KiB", 2): (
        (320, DecodeTile(16, 64, 4, 2, 3, 3, 1)),
        (320, DecodeTile(32, 64, 8, 2, 3, 3, 1)),
        (576, DecodeTile(16, 64, 4, 2, 3, 3, 1)),
        (576, DecodeTile(32, 32, 8, 2, 3, 3, 1)),
    ),
    # e4m3 caches, 2-byte queries: a tile in flight takes half the memory, plus one converted tile
    ("Hopper", 1): (
        (320, DecodeTile(16, 64, 4, 4, 5, 5, 2)),
        (320, DecodeTile(32, 64, 8, 4, 5, 5, 1)),
        (320, DecodeTile(64, 64, 8, 3, 3, 3, 1, planned=True)),
        (576, DecodeTile(16, 32, 4, 4, 6, 6, 2)),
        (576, DecodeTile(64, 64, 8, 2, 2, 3, 1, planned=True)),
    ),
    ("227 KiB", 1): (
        (320, DecodeTile(16, 64, 4, 3, 5, 5, 2)),
        (320, DecodeTile(32, 64, 8, 3, 5, 5, 1)),
        (320, DecodeTile(64, 64, 8, 2, 2, 2, 1, planned=True)),
        (576, DecodeTile(16, 32, 4, 3, 6, 6, 2)),
        (576, DecodeTile(32, 32, 8, 3, 5, 5, 1, max_registers=255)),
        (576, DecodeTile(64, 32, 8, 2, 2, 2, 1, planned=True)),
    ),
    ("163 KiB", 1): (
        (320, DecodeTile(16, 64, 4, 2, 3, 3, 2)),
        (320, DecodeTile(32, 64, 8, 3, 5, 5, 1)),
        (576, DecodeTile(16, 32, 4, 2, 4, 4, 2)),
        (576, DecodeTile(32, 32, 8, 3, 5, 5, 1, max_registers=255)),
    ),
    ("99 KiB", 1): (
        (320, DecodeTile(16, 64, 4, 2, 3, 3, 1)),
        (320, DecodeTile(32, 64, 8, 2, 3, 3, 1)),
        (576, DecodeTile(16, 32, 4, 2, 3, 3, 1)),
        (576, DecodeTile(32, 32, 8, 2, 3, 3, 1, max_registers=255)),
    ),
    # float32 products run on the CUDA cores: small tiles keep the unrolled products short
    ("Hopper", 4): ((576, DecodeTile(8, 16, 8, 1, 1, 1, 2)),),
    ("227 KiB", 4): ((576, DecodeTile(8, 16, 8, 1, 1, 1, 2)),),
    ("163 KiB", 4): ((576, DecodeTile(8, 16, 8, 1, 1, 1, 1)),),
    ("99 KiB", 4): ((576, DecodeTile(8, 16, 8, 1, 1, 1, 1)),),
}


@functools.cache
def tile_for(gpu_class: str, itemsize: int, columns: int, rows: int) -> DecodeTile:
    """The table's tile for ``columns`` padded columns of the cache and ``rows`` rows of one sequence.

    Raises:
        ValueError: no entry is wide enough.
    """
    entries = DECODE[gpu_class, itemsize]
    widest = max(most for most, _ in entries)
    if columns > widest:
        raise ValueError(f"kv_lora_rank and rope take {columns} columns; the kernel has tiles for at most {widest}")
    width = min(most for most, _ in entries if columns <= most)
    fitting = [tile for most, tile in entries if most == width]
    return next((tile for tile in fitting if rows <= tile.block_m), fitting[-1])


def choose_parts(row_tiles: int, slots: int) -> int:
    """Number of parts of all key tiles, so that ``row_tiles`` programs per part fill ``slots`` concurrent programs."""
    return max(1, slots // max(row_tiles, 1))


PAGES_OF_A_TILE = 4
"""A tile of at most so many whole pages loads one page number per page."""


def _gathers(tile: DecodeTile, page_size: int) -> bool:
    """Whether a page number is loaded for every key."""
    if page_size == 0 or page_size % tile.block_n == 0:
        return False
    return tile.block_n % page_size != 0 or tile.block_n // page_size > PAGES_OF_A_TILE


def stages_for(tile: DecodeTile, page_size: int) -> int:
    """Pipeline stages for pages of ``page_size``; 0: contiguous."""
    if page_size == 0:
        return tile.num_stages
    return tile.gathered_stages if _gathers(tile, page_size) else tile.paged_stages


_LARGE_BATCH = 64
_TILES_OF_LARGE = 64
"""Tiles a part could have in a large batch: with 31, a mean of 1k keys, larger ones were 6 % slower, with 124 equal."""


def for_batch(tile: DecodeTile, page_size: int, batch: int, capacity: int, slots: int) -> DecodeTile:
    """The tile of a call: that of ``large_gathered`` in a large batch, if a page number is loaded for every key.

    Lengths are on the device, so a batch is large if it has many sequences, and each of ``slots`` parts many tiles of
    their ``capacity``. Not for ``batch_invariant``, whose tile must not depend on the batch.
    """
    is_large = batch >= _LARGE_BATCH and batch * capacity >= slots * _TILES_OF_LARGE * tile.block_n
    if tile.large_gathered is None or not is_large or not _gathers(tile, page_size):
        return tile
    block_n, stages = tile.large_gathered
    return tile._replace(block_n=block_n, gathered_stages=stages, large_gathered=None)
