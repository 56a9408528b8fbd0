"""Many cheap cases of attention or decode, each computed once: a whole covering array, or one case for each size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from mla_plugin.conformance.base import Suite
from mla_plugin.conformance.covering import Space
from mla_plugin.conformance.drawn import Dice

CaseT = TypeVar("CaseT")
_FEW_OF_A_SPACE, _FEW_SIZES = 6, 8
"""One case in so many is computed where few are."""


def check_space(
    suite: Suite, space: Space[Any], every: tuple[CaseT, ...], check: Callable[[CaseT, str], object]
) -> None:
    """Check the cases for what the backend accepts; in a quick run and for a slow backend a few cheap ones.

    Args:
        suite: the backend's.
        space: of the cases.
        every: all of them, for a backend that accepts everything.
        check: computes a case; the text says what it is for.
    """
    cases: Sequence[Any] = [case for case in every if suite._accepts(case)]
    if suite.quick or suite.is_slow:
        cases = [case for case in cases if case.cost < 1.0][::_FEW_OF_A_SPACE]
    elif len(cases) < len(every):
        cases = space.cases(suite._accepts)
    for case in cases:
        check(case, "sizes beside features")


def check_sizes(
    suite: Suite,
    sizes: Iterable[tuple[str, dict[str, Any]]],
    draw: Callable[[Dice, dict[str, Any]], CaseT | None],
    check: Callable[[CaseT, str], object],
) -> None:
    """Check a drawn case for each size; for a few in a quick run, and on CUDA, where kernels are compiled for sizes.

    Args:
        suite: the backend's.
        sizes: what the size is of, and the fields of a case that it sets.
        draw: a case with these fields, or None where the backend takes none.
        check: computes a case; the text says what it is for.
    """
    dice = Dice(suite._generator())
    takes_few = suite.quick or torch.device(suite.device).type == "cuda"
    for words, given in sizes:
        if takes_few and not dice.chance(1 / _FEW_SIZES):
            continue
        case = draw(dice, given)
        if case is not None:
            check(case, words)
