"""Where the wide decode kernel has the keys and columns of a tile's values, and which rows it sets to 0."""

from __future__ import annotations

import pytest
import torch
from triton.experimental.gluon import language as gl

from mla_plugin.kernels.decode.transposed.common import KEYS, PANELS, RANK
from mla_plugin.kernels.decode.transposed.operands import STEP
from mla_plugin.kernels.decode.wide import values
from mla_plugin.kernels.decode.wide.common import OUT, STAGES
from mla_plugin.kernels.hopper.common import ROWS
from mla_plugin.kernels.hopper.latent import HALF
from tests.kernels.gluon.values import Value
from tests.kernels.test_transposed_operands import STAGE, drawn, interpreted, numbers, tiles_of

BOTH = pytest.mark.parametrize("half", [0, 1])


@BOTH
def test_values_give_columns_in_order(half: int) -> None:
    """A product with the identity picks each key's row."""
    tile = drawn(KEYS.value, RANK.value)
    words_of_step, program = interpreted(values.words_of_step)
    values_of, _ = interpreted(values.values_of)
    in_columns, _ = interpreted(values.in_columns)
    tiles = tiles_of(program, tile, STAGES.value, PANELS.value)
    for step in range(KEYS.value // STEP.value):
        found = values_of(words_of_step(tiles, STAGE, step, half))
        assert found.layout == gl.DotOperandLayout(0, OUT.value, 2)
        picked = torch.nn.functional.pad(found.data, (0, ROWS.value - STEP.value))
        keys = numbers(tile)[step * STEP.value :][: STEP.value, half * HALF.value :][:, : HALF.value]
        assert torch.equal(in_columns(Value(picked)).data[: STEP.value], keys)


@BOTH
@pytest.mark.parametrize("first", [1, 15, 16, 17, 48, 63])
def test_rows_behind_the_last_key_are_zero(first: int, half: int) -> None:
    """In the tile's own slot and half alone."""
    tile = drawn(KEYS.value, RANK.value)
    zero_rows, program = interpreted(values.zero_rows)
    tiles = tiles_of(program, tile, STAGES.value, PANELS.value)
    zero_rows(tiles, STAGE, first, half)
    found = torch.cat([tiles.index(STAGE * PANELS.value + panel).read()[0] for panel in range(PANELS.value)], 1)
    expected = tile.clone()
    expected[first:, half * HALF.value : (half + 1) * HALF.value] = 0
    assert torch.equal(found, expected)
    others = [panel for panel in range(STAGES.value * PANELS.value) if panel // PANELS.value != STAGE]
    assert all((tiles.index(panel).read() == 0x7F).all() for panel in others)
