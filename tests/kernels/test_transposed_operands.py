"""The orders in which the transposed decode kernel calls keys and columns by the places of their bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.experimental.gluon import language as gl

from mla_plugin.kernels.decode.transposed import operands
from mla_plugin.kernels.decode.transposed.common import KEYS, PANEL, PANELS, RANK, ROPE, STAGES, product_layout
from tests.kernels.gluon.memory import Shared
from tests.kernels.gluon.schedule import Partition
from tests.kernels.gluon.translate import Program
from tests.kernels.gluon.values import Value

ROWS = pytest.mark.parametrize("rows", [16, 32])
STAGE = 1


def interpreted(function: Any) -> tuple[Any, Program]:
    """A function of the kernel, and its program, one of whose partitions is this thread."""
    program = Program((1,), (0,), 0)
    partition = Partition(lambda: None, "partition")
    partition.bit = 1
    program._scheduler.local.partition = partition
    return program.translated(function), program


def drawn(*shape: int) -> torch.Tensor:
    """Bytes of e4m3, none of them NaN."""
    found = torch.randint(0, 256, shape, dtype=torch.uint8)
    return torch.where(found & 127 == 127, 1, found).to(torch.uint8)


def tiles_of(program: Program, tile: torch.Tensor, stages: int, panels: int) -> Shared:
    """Shared memory as in the kernel, ``tile`` in stage 1 as TMA writes it: by panels."""
    columns = tile.shape[1] // panels
    found: Shared = program._allocate(
        gl.uint8, [stages * panels, 1, KEYS.value, columns], gl.NVMMASharedLayout(columns, 8, 3)
    )
    for panel in range(panels):
        part = tile[:, panel * columns : (panel + 1) * columns]
        found.index(STAGE * panels + panel).write(part[None])
    return found


def numbers(tile: torch.Tensor) -> torch.Tensor:
    return tile.view(torch.float8_e4m3fn).half()


@ROWS
def test_scores_have_every_key_once(rows: int) -> None:
    key_of_rows, _ = interpreted(operands.key_of_rows)
    assert sorted(key_of_rows(rows).data.tolist()) == list(range(KEYS.value))


@ROWS
def test_weights_in_the_order_of_keys(rows: int) -> None:
    key_of_rows, _ = interpreted(operands.key_of_rows)
    in_order_of_keys, _ = interpreted(operands.in_order_of_keys)
    weights = torch.randn(KEYS.value, rows)
    assert torch.equal(in_order_of_keys(Value(weights[key_of_rows(rows).data])).data, weights)


@ROWS
@pytest.mark.parametrize("panel", [*range(PANELS.value), None])
def test_keys_and_queries_are_in_one_order(rows: int, panel: int | None) -> None:
    """Column for column, and keys in that of the scores; None: of k_rope."""
    key_of_rows, _ = interpreted(operands.key_of_rows)
    as_operand_of_scores, _ = interpreted(operands.as_operand_of_scores)
    if panel is None:
        tile = drawn(KEYS.value, ROPE.value)
        keys_of_rope, program = interpreted(operands.keys_of_rope)
        found = keys_of_rope(tiles_of(program, tile, STAGES.value, 1), STAGE, rows)
        columns = slice(0, ROPE.value)
    else:
        tile = drawn(KEYS.value, RANK.value)
        keys_of_panel, program = interpreted(operands.keys_of_panel)
        found = keys_of_panel(tiles_of(program, tile, STAGES.value, PANELS.value), STAGE, panel, rows)
        columns = slice(panel * PANEL.value, (panel + 1) * PANEL.value)
    assert found.layout == gl.DotOperandLayout(0, product_layout.fn(rows), 2)
    order = as_operand_of_scores(Value(torch.arange(tile.shape[1]).expand(rows, -1))).data
    assert (order == order[0]).all()
    assert sorted(order[0].tolist()) == list(range(tile.shape[1]))
    assert torch.equal(found.data, numbers(tile)[key_of_rows(rows).data][:, order[0, columns]])


@ROWS
def test_values_give_columns_in_order(rows: int) -> None:
    """A product with the identity picks each key's row."""
    tile = drawn(KEYS.value, RANK.value)
    values_of_step, program = interpreted(operands.values_of_step)
    as_columns, _ = interpreted(operands.as_columns)
    tiles = tiles_of(program, tile, STAGES.value, PANELS.value)
    for step in range(KEYS.value // operands.STEP.value):
        values = values_of_step(tiles, STAGE, step, rows)
        assert values.layout == gl.DotOperandLayout(0, product_layout.fn(rows), 2)
        picked = torch.nn.functional.pad(values.data, (0, rows - operands.STEP.value))
        keys = numbers(tile)[step * operands.STEP.value :][: operands.STEP.value]
        assert torch.equal(as_columns(Value(picked)).data[: operands.STEP.value], keys)


@pytest.mark.parametrize("first", [1, 15, 16, 17, 48, 63])
def test_rows_behind_the_last_key_are_zero(first: int) -> None:
    """In the tile's own stage alone."""
    tile = drawn(KEYS.value, RANK.value)
    zero_rows, program = interpreted(operands.zero_rows)
    tiles = tiles_of(program, tile, STAGES.value, PANELS.value)
    zero_rows(tiles, STAGE, first)
    found = torch.cat([tiles.index(STAGE * PANELS.value + panel).read()[0] for panel in range(PANELS.value)], 1)
    assert torch.equal(found[:first], tile[:first])
    assert (found[first:] == 0).all()
    assert all((tiles.index(panel).read() == 0x7F).all() for panel in range(PANELS.value))
