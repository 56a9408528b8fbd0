"""Which rank holds which tokens of a cache that is distributed over a group for decode.

Tokens are assigned round-robin, ``interleave`` at a time: token t is on rank (t // interleave) % size, in row
(t // (interleave size)) interleave + t % interleave. So caches grow evenly, and a rank's rows keep the order of tokens:
a query that sees a prefix of the tokens sees a prefix of the rows of each rank.
"""

from __future__ import annotations

import operator
from typing import TypeVar

import torch

from mla_plugin.arguments.checks import MAX_LENGTH, check_count
from mla_plugin.context_parallel.partition import check_rank

Tokens = TypeVar("Tokens", int, torch.Tensor)


def held_tokens(tokens: Tokens, size: int, rank: int, *, interleave: int = 1) -> Tokens:
    """How many of a sequence's first tokens a rank holds.

    Args:
        tokens: number of first tokens: an int, or an int32 or int64 tensor of any shape; values on a GPU are not read.
        size, rank: of the group.
        interleave: consecutive tokens on one rank: 1, or a page.

    Returns:
        an int or a tensor like ``tokens``; the sum over the ranks is ``tokens``.

    Raises:
        ValueError, TypeError: there is no such rank, or ``interleave`` is not a positive int or too large.
    """
    _check(size, rank, interleave)
    if not isinstance(tokens, torch.Tensor):
        check_count("tokens", tokens)
    elif tokens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"tokens has dtype {tokens.dtype}; expected int32 or int64")
    elif tokens.is_cpu and not torch.compiler.is_compiling() and bool((tokens < 0).any()):
        raise ValueError(f"tokens={tokens.tolist()}; expected numbers of at least 0")
    rounds, rest = tokens // (size * interleave), tokens % (size * interleave)
    own = rest - rank * interleave
    if isinstance(own, torch.Tensor):
        return rounds * interleave + own.clamp(0, interleave)
    return rounds * interleave + min(max(own, 0), interleave)


def held_positions(tokens: int, size: int, rank: int, *, interleave: int = 1) -> torch.Tensor:
    """Which of a sequence's tokens a rank holds, in the order of its rows: int64 on the CPU; errors as above."""
    _check(size, rank, interleave)
    check_count("tokens", tokens, most=MAX_LENGTH)
    positions = torch.arange(tokens, device="cpu")
    return positions[positions // interleave % size == rank]


def check_interleave(interleave: object, size: int = 1) -> int:
    """Check that it is a positive int, small enough for int32 lengths.

    Raises:
        ValueError, TypeError: it is not.
    """
    try:
        value = None if isinstance(interleave, bool) else operator.index(interleave)  # type: ignore[arg-type]
    except TypeError:  # to have an __index__ is not enough: classes and tensors of several elements have one
        value = None
    if value is None:
        raise TypeError(f"cp_interleave={interleave!r}; expected a positive int: 1, or the page size")
    if value < 1:
        raise ValueError(f"cp_interleave={interleave}; expected at least 1: 1, or the page size")
    if value > (most := MAX_LENGTH // size):
        raise ValueError(f"cp_interleave={interleave}; expected at most {most}: 1, or the page size")
    return value


def _check(size: int, rank: int, interleave: int) -> None:
    check_rank(size, rank)
    check_interleave(interleave, size)
