"""Every number of heads, queries, sequences and keys, every width and every size of pages, as attention's ``swept``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mla_plugin.conformance import once
from mla_plugin.conformance.attention.case import DTYPE_NAMES
from mla_plugin.conformance.decode.case import DecodeCase
from mla_plugin.conformance.drawn import Dice
from mla_plugin.hooks.types import Accepted

if TYPE_CHECKING:
    from mla_plugin.conformance.decode.suite import DecodeConformance

_RANKS = (*range(8, 257, 8), *range(288, 641, 32))
_ROPES = (*range(8, 129, 8), 192, 256)
_HEADS = (*range(1, 41), *range(48, 129, 8))
_QUERIES = range(1, 25)
_PAGES = (*range(1, 41), 48, 64, 80, 96, 112, 128, 160, 192, 256, 320, 512)
_BATCHES = (*range(1, 41), 48, 63, 64, 65, 100, 127, 128, 129)
_LENGTHS = (*range(0, 400, 8), *range(448, 1100, 64))
"""The first of eight lengths in a row."""


def check_every_size(suite: DecodeConformance, plain: list[DecodeCase]) -> None:
    """Each size that the backend takes, over a cache with or without pages."""
    if plain:
        once.check_sizes(suite, _sizes(), functools.partial(_drawn, suite, plain), suite.check_once)


def _sizes() -> Iterator[tuple[str, dict[str, Any]]]:
    """What the size is of, and what it changes of a case."""
    for rank in _RANKS:
        yield f"latents of {rank}", {"rank": rank}
    for rope in _ROPES:
        yield f"rope of {rope}", {"rope": rope}
    for heads in _HEADS:
        yield f"{heads} heads", {"num_heads": heads}
    for queries in _QUERIES:
        yield f"{queries} queries", {"seqlen_q": queries}
    for page_size in _PAGES:
        lengths = (page_size, 2 * page_size + 1, page_size // 2)
        yield f"pages of {page_size}", {"page_size": page_size, "lengths": lengths}
    for batch in _BATCHES:
        yield f"{batch} sequences", {"lengths": tuple(b % 7 for b in range(batch))}
    for first in _LENGTHS:
        yield f"{first} and more keys", {"lengths": tuple(range(first, first + 8))}


def _drawn(suite: DecodeConformance, plain: list[DecodeCase], dice: Dice, given: dict[str, Any]) -> DecodeCase | None:
    """A plain case of this size, with a dtype and options that the backend takes beside it."""
    for _ in range(6):
        own = dice.one_of([case for case in plain if (case.page_size is None) <= ("page_size" not in given)] or plain)
        options: dict[str, Any] = {"leftpads": None, "rows": None, "seqlen_q": dice.one_of((1, 1, 2))}
        options |= {"dtype": dice.one_of((own.dtype, *DTYPE_NAMES)), "lengths": (19, 0, 40), "num_heads": 2}
        narrow: dict[str, Any] = {"rank": 32, "rope": 16}
        for sizes in (narrow, {}):
            case = replace(own, name="", **(options | sizes | given))
            if isinstance(suite._answer(case.request(suite.device)), Accepted):
                return case
    return None
