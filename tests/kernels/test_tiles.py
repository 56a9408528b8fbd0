"""The static tables' lookup, the split of head dimensions, and the GPU classes."""

import pytest

from mla_plugin.kernels import tiles
from mla_plugin.kernels.prefill.packing import columns_of
from mla_plugin.kernels.tile_math import split_head_dim


@pytest.mark.parametrize(
    ("head_dim", "blocks"),
    [
        (1, (16, 0)),
        (16, (16, 0)),
        (24, (32, 0)),
        (48, (32, 16)),
        (64, (64, 0)),
        (72, (128, 0)),
        (80, (64, 16)),
        (96, (64, 32)),
        (128, (128, 0)),
        (192, (128, 64)),
        (448, (512, 0)),
        (512, (512, 0)),
        (520, (1024, 0)),
        (528, (512, 16)),
        (576, (512, 64)),
    ],
)
def test_split_of_a_head_dimension(head_dim: int, blocks: tuple[int, int]) -> None:
    assert split_head_dim(head_dim) == blocks


def test_blocks_are_powers_of_two_that_hold_the_columns_and_two_of_them_exactly() -> None:
    for head_dim in range(1, 600):
        first, second = split_head_dim(head_dim)
        assert first >= 16
        assert first.bit_count() == 1
        if second:
            assert 16 <= second < first
            assert second.bit_count() == 1
            assert first + second == head_dim
        else:
            assert head_dim <= first < max(2 * head_dim, 17)


def test_columns_of_both_head_dimensions() -> None:
    assert columns_of(192, 128) == (128, 64, 128, 0)


@pytest.mark.parametrize("kernel", tiles.TABLES)
@pytest.mark.parametrize(("gpu_class", "itemsize"), tiles.FORWARD)
def test_the_first_row_that_is_wide_enough_is_taken(kernel: str, gpu_class: str, itemsize: int) -> None:
    table = tiles.TABLES[kernel]
    narrower = 0
    for widest, tile in table[gpu_class, itemsize]:
        for columns in (narrower + 1, widest):
            assert tiles.tile_for(table, gpu_class, itemsize, columns) is tile
        narrower = widest


def test_too_many_columns_are_refused_with_the_most_that_a_gpu_class_takes() -> None:
    with pytest.raises(ValueError, match=r"1089 padded columns of 2 bytes.*163 KiB.*at most 1088"):
        tiles.tile_for(tiles.FORWARD, "163 KiB", 2, 1089)
    with pytest.raises(ValueError, match=r"1088 padded columns of 4 bytes.*99 KiB.*at most 768"):
        tiles.tile_for(tiles.BACKWARD_Q, "99 KiB", 4, 1088)


def test_the_interpreter_takes_one_tile_for_all() -> None:
    found = {
        tiles.tile_for(table, tiles.INTERPRETED, itemsize, columns)
        for table in tiles.TABLES.values()
        for itemsize in (2, 4)
        for columns in (32, 320, 2000)
    }
    assert len(found) == 1


def test_the_measured_tiles_of_deepseek_on_hopper() -> None:
    """380 to 505 TFLOP/s forward on an H200; a change needs a measurement."""
    found = [tiles.tile_for(table, "Hopper", 2, 320)[:4] for table in tiles.TABLES.values()]
    assert found == [(128, 64, 8, 3), (64, 128, 8, 3), (128, 64, 8, 3)]


@pytest.mark.parametrize(("tile", "suits"), [((64, 16), True), ((32, 128), True), ((32, 32), False), ((16, 48), False)])
def test_small_tiles_are_not_read_by_descriptors(tile: tuple[int, int], suits: bool) -> None:
    assert tiles.Tile(*tile, 8, 2).suits_descriptors == suits
