"""A covering array: few rows with every pair of levels of the factors, built greedily and deterministically.

Cases that vary one thing at a time miss a fault that needs two (a window and grouped heads). All combinations are too
many; a covering array of strength two has every pair of levels in some row, and here also every triple of ``aspects``.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Row = dict[str, Any]
Marks = tuple[tuple[int, ...], int]
CaseT = TypeVar("CaseT")

_POOL = 1200
"""Number of random rows, to find what is possible and to start from."""


class _Coverage:
    """What rows cover, as bit sets: pairs of levels, and triples of aspects."""

    def __init__(self, aspects: Callable[[Row], Mapping[str, Any]]) -> None:
        self._aspects = aspects
        self._bits: dict[Any, int] = {}
        self._of_aspects: dict[tuple[Any, ...], Marks] = {}
        self._gains: dict[tuple[int, ...], int] = {}  # of aspects, of which few rows differ in; until missing changes
        self.missing: dict[int, int] = {}

    def _bit(self, thing: Any) -> int:
        bits = self._bits
        number = bits.get(thing)
        if number is None:
            number = bits[thing] = len(bits)
        return number

    def _levels(self, row: Row) -> Marks:
        """Numbers of the levels, and their set of bits."""
        numbers = tuple(map(self._bit, row.items()))
        return numbers, _set_of(numbers)

    def _pairs(self, row: Row) -> Marks:
        """Numbers of the pairs of aspects, and the set of the aspects' own bits."""
        found = tuple(self._aspects(row).items())
        marks = self._of_aspects.get(found)
        if marks is None:
            aspects = [self._bit((self._aspects, name, value)) for name, value in found]
            pairs = tuple(self._bit(first << 32 | second) for first, second in itertools.combinations(aspects, 2))
            marks = self._of_aspects[found] = pairs, _set_of(aspects)
        return marks

    def add(self, row: Row) -> None:
        """Mark what the row covers as possible, so that it has to be covered."""
        self._gains.clear()
        for numbers, bits in (self._levels(row), self._pairs(row)):
            for number in numbers:
                self.missing[number] = self.missing.get(number, 0) | bits & ~(1 << number)

    def gain(self, row: Row) -> int:
        """How much of what is still missing the row covers."""
        pairs = self._pairs(row)
        of_pairs = self._gains.get(pairs[0])
        if of_pairs is None:
            of_pairs = self._gains[pairs[0]] = self._count(pairs)
        return self._count(self._levels(row)) + of_pairs

    def _count(self, marks: Marks) -> int:
        missing, (numbers, bits) = self.missing, marks
        return sum([(missing.get(number, 0) & bits).bit_count() for number in numbers])

    def remove(self, row: Row) -> None:
        """Remove what a chosen row covers from what is missing."""
        self._gains.clear()
        for numbers, bits in (self._levels(row), self._pairs(row)):
            for number in numbers:
                self.missing[number] &= ~bits


def _set_of(numbers: Any) -> int:
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return bits


def covering_rows(
    factors: Mapping[str, Sequence[Any]],
    *,
    settle: Callable[[Row], Row],
    aspects: Callable[[Row], Mapping[str, Any]],
    accepts: Callable[[Row], bool] | None,
    seed: str,
) -> list[Row]:
    """Rows in which every pair of levels occurs, and every triple of aspects.

    Args:
        factors: name to levels.
        settle: makes a row possible where its levels exclude one another; it returns a new row.
        aspects: coarse facts of a settled row, of which all triples are covered.
        accepts: whether a settled row may be used; None for all.
        seed: any text; rows depend on the arguments alone.

    Returns:
        settled rows. Combinations that ``settle`` changes or ``accepts`` rejects in every row are omitted.
    """
    rng, coverage = random.Random(seed), _Coverage(aspects)
    drawn = (settle({name: rng.choice(levels) for name, levels in factors.items()}) for _ in range(_POOL))
    pool = [row for row in drawn if accepts is None or accepts(row)]
    for row in pool:
        coverage.add(row)
    rows = []
    for start in pool:
        if not coverage.gain(start):
            continue
        row = _climb(start, factors, settle, coverage, accepts, rng)
        rows.append(row)
        coverage.remove(row)
        if coverage.gain(start):  # climbing has lost what the start covered
            rows.append(start)
            coverage.remove(start)
    return rows


def _climb(
    row: Row,
    factors: Mapping[str, Sequence[Any]],
    settle: Callable[[Row], Row],
    coverage: _Coverage,
    accepts: Callable[[Row], bool] | None,
    rng: random.Random,
) -> Row:
    """Change one factor after another to the level with which the row covers most."""
    best = coverage.gain(row)
    for name in rng.sample(list(factors), len(factors)):
        for level in factors[name]:
            other = settle(row | {name: level})
            gain = coverage.gain(other)
            if gain > best and (accepts is None or accepts(other)):
                row, best = other, gain
    return row


@dataclass(frozen=True)
class Space(Generic[CaseT]):
    """All the calls of one operation.

    Attributes:
        name: of its cases.
        factors: name to levels; the first ones together are the plainest call.
        settle, aspects: as for ``covering_rows``.
        case_of: a name and a settled row to a case.
        needing: a factor to the levels of others that give it a meaning.
        plain: the factors that are changed to find a call that a backend accepts.
        labels: a row to the words in its case's name.
        shows_refusals: each level that a backend refuses gets a case too.
    """

    name: str
    factors: Mapping[str, Sequence[Any]]
    settle: Callable[[Row], Row]
    aspects: Callable[[Row], Mapping[str, Any]]
    case_of: Callable[[str, Row], CaseT]
    needing: Callable[[str], Row]
    plain: Sequence[str]
    labels: Callable[[Row], str]
    shows_refusals: bool = True

    def cases(self, accepts: Callable[[CaseT], bool] | None = None) -> tuple[CaseT, ...]:
        """The cases that hold every pair of what a backend accepts, and those that it refuses, see ``shows_refusals``.

        Args:
            accepts: whether the backend accepts a case; None for a backend that accepts everything.
        """
        if accepts is None:
            return self._covering(self.factors, None)

        def takes(row: Row) -> bool:
            return accepts(self.case_of("", row))

        plain = self._plainest(takes)
        if plain is None:
            if not self.shows_refusals:
                return ()
            return (self.case_of(f"{self.name}-plain", self.settle(self._default)),)
        levels = {name: list(given) for name, given in self.factors.items()}
        refused = []
        for name, level in [(name, level) for name, given in self.factors.items() for level in given]:
            beside = self._default | plain | {name: level}
            beside |= {key: value for key, value in self.needing(name).items() if plain[key] == self._default[key]}
            row = self.settle(beside)
            if level not in (plain[name], None) and not takes(row):
                levels[name].remove(level)
                refused.append(self.case_of(f"{self.name}-without-{name}-{_text(level)}", row))
        return (*self._covering(levels, takes), *(refused if self.shows_refusals else ()))

    @property
    def _default(self) -> Row:
        return {name: levels[0] for name, levels in self.factors.items()}

    def _plainest(self, takes: Callable[[Row], bool]) -> Row | None:
        """The plainest row that the backend takes: the default, or with up to three levels changed."""
        rows: list[Row] = [self._default]
        for _ in range(4):
            found = next((row for row in map(self.settle, rows) if takes(row)), None)
            if found is not None:
                return found
            rows = [row | {name: level} for row in rows for name in self.plain for level in self.factors[name][1:]]
        return None

    def _covering(self, factors: Mapping[str, Sequence[Any]], takes: Callable[[Row], bool] | None) -> tuple[CaseT, ...]:
        rows: Iterable[Row] = covering_rows(
            factors, settle=self.settle, aspects=self.aspects, accepts=takes, seed=self.name
        )
        return tuple(self.case_of(f"{self.name}-{i:03}-{self.labels(row)}", row) for i, row in enumerate(rows))


def _text(level: object) -> str:
    return "".join("_" if letter in " (),[]" else letter for letter in str(level).replace("torch.", ""))
