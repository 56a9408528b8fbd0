"""Calls and sizes drawn from wide distributions: powers of two and their neighbours, multiples of 8, and any others."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from mla_plugin.conformance import checks
from mla_plugin.conformance.base import Suite

LevelT = TypeVar("LevelT")
COUNT, COUNT_OF_QUICK, COUNT_OF_SLOW = 40, 8, 2
DRAWS = 40
"""For each call, until the backend takes one."""


class Dice:
    """Draws numbers and levels; what it draws depends on the generator alone."""

    def __init__(self, generator: torch.Generator) -> None:
        self._random = random.Random(int(torch.randint(2**62, (), generator=generator)))

    def one_of(self, levels: Sequence[LevelT]) -> LevelT:
        """Any of them."""
        return self._random.choice(levels)

    def chance(self, share: float) -> bool:
        """True in so many of all draws."""
        return self._random.random() < share

    def between(self, least: int, most: int) -> int:
        """Any number in between, both included."""
        return self._random.randint(least, most)

    def size(self, most: int) -> int:
        """From 1 to ``most``, by its logarithm: a third around powers of two, a third multiples of 8."""
        size = min(most, int(2.0 ** self._random.uniform(0.0, math.log2(most + 1))))
        kind = self._random.randrange(3)
        if kind == 0:
            size = 2 ** max(0, round(math.log2(size))) + self._random.choice((-1, 0, 0, 1))
        elif kind == 1 and size > 8:
            size = size // 8 * 8
        return min(max(size, 1), most)

    def length(self, most: int) -> int:
        """None at all in one of eight, as many as there may be in another, and any other number."""
        kind = self._random.randrange(8)
        return 0 if kind == 0 else most if kind == 1 else self.size(most)

    def sizes(
        self, most: Sequence[int], few: Sequence[int], cost: Callable[[Sequence[int]], float], most_cost: float
    ) -> list[int]:
        """One size for each axis: one to three of them are anything up to ``most``, the others up to ``few``.

        While they cost too much, one of the others is halved.
        """
        wide = self._random.sample(range(len(most)), self._random.choice((1, 2, 3)))
        found = [self.size(largest if axis in wide else few[axis]) for axis, largest in enumerate(most)]
        while cost(found) > most_cost:
            above_1 = [axis for axis, size in enumerate(found) if size > 1]
            axis = self._random.choice([axis for axis in above_1 if axis not in wide] or above_1)
            found[axis] //= 2
        return found


def check_each(
    suite: Suite, draw: Callable[[Dice, str, float], Any], check: Callable[[Any], object], most: float, slow: float
) -> None:
    """Check so many drawn calls that the backend takes; an error names the whole case.

    ``most``: million multiplications of a call; ``slow``: for a suite that ``is_slow``.
    """
    count = COUNT_OF_SLOW if suite.is_slow else COUNT_OF_QUICK if suite.quick else COUNT
    most = slow if suite.is_slow else most
    dice = Dice(suite._generator())
    for index in range(count):
        drawn = (draw(dice, f"drawn-{index}", most) for _ in range(DRAWS))
        case = next((case for case in drawn if case.cost <= 2 * most and suite._accepts(case)), None)
        if case is None:
            continue
        try:
            check(case)
        except checks.ConformanceError as error:
            checks.fail(f"{case!r}: {error}")
