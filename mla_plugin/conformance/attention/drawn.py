"""Calls of any size and with any options, drawn anew in each run: a kernel may fail at a size that no list has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mla_plugin.conformance.attention.case import Case
from mla_plugin.conformance.attention.factors import FACTORS, case_of, settle
from mla_plugin.conformance.covering import Row
from mla_plugin.conformance.drawn import Dice, check_each

if TYPE_CHECKING:
    from mla_plugin.conformance.attention.suite import BackendConformance

_MOST, _MOST_OF_SLOW = 1.5, 0.1
"""Million multiplications of a call."""
_MOST_OF_EACH, _FEW_OF_EACH = (1500, 3000, 80, 16, 32, 320, 320), (70, 140, 3, 2, 2, 48, 48)
"""Queries, keys, sequences, heads of keys, heads of queries for each, and widths."""
_USUAL = {"scores": "normal", "offsets": "contiguous", "bias_storage": "contiguous", "needs": "qkv", "gaps": "none"}
"""What half of the calls have, so that sizes are not always beside something rare."""


def check_drawn_calls(suite: BackendConformance) -> None:
    """Both passes of each call; only the forward where the backend takes no training."""

    def check(case: Case) -> None:
        if suite.takes(case.request(suite.device, is_training=True)):
            suite.test_backward(case)
        else:
            suite.test_forward(case)

    check_each(suite, draw, check, _MOST, _MOST_OF_SLOW)


def draw(dice: Dice, name: str, most: float) -> Case:
    """Any legal call of about so many million multiplications at most."""
    row: Row = {factor: dice.one_of(levels) for factor, levels in FACTORS.items()}
    if dice.chance(0.5):
        row |= _USUAL
    if dice.chance(0.6):
        row["bias"] = None
    if row["dout"] == "expanded":  # equal numbers over a single key: their sum's roundings are no longer independent
        row["dout"] = "contiguous"
    len_q, len_kv, row["batch"], kv_heads, group, *dims = dice.sizes(_MOST_OF_EACH, _FEW_OF_EACH, _cost, most)
    if dice.chance(0.3):
        len_kv = len_q
    if dice.chance(0.8):  # few kernels take fewer
        dims = [max(dim, 8) for dim in dims]
    if dice.chance(0.3):
        row["head_dims"] = dice.one_of(FACTORS["head_dims"])
    else:
        row["head_dims"] = (dims[0], dims[0] if dice.chance(0.5) else dims[1])
    row |= {"lengths": (len_q, len_kv), "heads": (kv_heads * group, kv_heads), "has_own_lengths": True}
    row["window"] = _window(dice, max(len_q, len_kv)) if dice.chance(0.5) else (-1, -1)
    return case_of(name, _settled(row))


def _cost(sizes: Sequence[int]) -> float:
    """Of a call of these sizes, as ``Case.cost``."""
    return math.prod(sizes[:5]) * sum(sizes[5:]) / 1e6


def _settled(row: Row) -> Row:
    """``settle`` makes calls that cost too much smaller, but those that are too large are drawn again."""
    sizes: dict[str, Any] = {name: row[name] for name in ("batch", "lengths")}
    return settle(row) | sizes


def _window(dice: Dice, most: int) -> tuple[int, int]:
    """Either side is open in a quarter of all windows, or ends at the diagonal."""
    left, right = (dice.one_of((-1, 0, dice.size(most), dice.size(most))) for _ in range(2))
    return left, right
