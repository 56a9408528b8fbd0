"""Which of a backend's small cases run: all of them, or the selections of ``quick`` and ``is_slow``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

QUICK_COST = 5.0
"""Million multiplications of an edge in the quick selection: two fifths of the edges have four fifths of the cost."""


class HasCost(Protocol):
    """What a selection needs of a case."""

    @property
    def cost(self) -> float:
        """Million multiplications."""


CaseT = TypeVar("CaseT", bound=HasCost)


@dataclass(frozen=True)
class Catalogue(Generic[CaseT]):
    """The small cases for one backend, by kind."""

    edges: tuple[CaseT, ...]
    pairs: tuple[CaseT, ...]
    of_sizes: tuple[CaseT, ...]
    of_extremes: tuple[CaseT, ...]

    def all(self) -> tuple[CaseT, ...]:
        """Every case."""
        return (*self.edges, *self.pairs, *self.of_sizes, *self.of_extremes)

    def selected(self, *, is_quick: bool, is_slow: bool) -> tuple[CaseT, ...]:
        """The cases to run.

        Args:
            is_quick: every fourth pair, every sixth case of sizes and of extremes, and the edges that cost little.
            is_slow: every fourth case of sizes and of extremes.
        """
        if is_quick:
            cheap = (case for case in self.edges if case.cost <= QUICK_COST)
            return (*cheap, *self.pairs[::4], *self.of_sizes[::6], *self.of_extremes[::6])
        step = 4 if is_slow else 1
        return (*self.edges, *self.pairs, *self.of_sizes[::step], *self.of_extremes[::step])
