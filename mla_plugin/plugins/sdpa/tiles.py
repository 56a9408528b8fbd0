"""The CPU flash kernel tile by tile, for a long sequence of one or a few heads.

The kernel needs float32 copies with one head dim for Q, K and V. Those of a whole head take several times the memory of
PyTorch's SDPA for a call of one or two heads; those of a tile are negligible. A tile is a call of ``flash`` for some
queries and some keys: in the forward, tiles of the same queries are merged by their log-sum-exp; in the backward, which
uses the final one, their gradients add up.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch

from mla_plugin.arguments.mask import OPEN, Band
from mla_plugin.plugins.sdpa import flash
from mla_plugin.plugins.sdpa.flash import Piece
from mla_plugin.plugins.sdpa.terms import ScoreTerms

FORWARD_SIDE, BACKWARD_SIDE = 512, 768
"""Queries and keys of a tile. Smaller ones take less memory and more time.

For 2 heads of 4,096 tokens, 128/128 in bfloat16, tiles of 512 take 1.07 times the time of one call and a third of its
memory in the forward; in the backward tiles of 512 take 1.18 times and a half, tiles of 768 1.09 times and 0.6.
"""
ROWS_PER_THREAD = 64
"""The kernel's forward parallelises over blocks of so many queries where there are fewer than 768."""
_CAUSAL = Band(left=-1, right=0, bottom_right=False)


@functools.lru_cache(maxsize=256)
def tiles(len_q: int, len_kv: int, band: Band, side: int) -> tuple[Piece, ...]:
    """``flash.pieces`` in rectangles and squares of at most ``side`` queries and keys."""
    return tuple(tile for piece in flash.pieces(len_q, len_kv, band) for tile in _tiles_of(piece, side))


def _tiles_of(piece: Piece, side: int) -> Iterator[Piece]:
    for queries in _cut(piece.queries, side):
        before = piece.keys
        if piece.is_causal:  # the keys before those of a square on the diagonal
            first = piece.keys.start + queries.start - piece.queries.start
            before = slice(piece.keys.start, first)
            yield Piece(queries, slice(first, first + queries.stop - queries.start), is_causal=True)
        for keys in _cut(before, side):
            yield Piece(queries, keys)


def _cut(whole: slice, side: int) -> Iterator[slice]:
    return (slice(start, min(start + side, whole.stop)) for start in range(whole.start, whole.stop, side))


def _together(found: tuple[Piece, ...], name: str) -> Iterator[tuple[slice, list[Piece]]]:
    """The tiles of the same queries, or of the same keys."""

    def place(tile: Piece) -> tuple[int, int]:
        part: slice = getattr(tile, name)
        return part.start, part.stop

    for (start, stop), those in itertools.groupby(sorted(found, key=place), place):
        yield slice(start, stop), list(those)


def _terms(terms: ScoreTerms, tile: Piece) -> ScoreTerms:
    return ScoreTerms(terms.softmax_scale, _CAUSAL if tile.is_causal else OPEN)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, terms: ScoreTerms, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """``flash.forward``, written into out [n, H, S_q, head_dim_v] of any dtype and lse [n, H, S_q]."""
    len_q, len_kv = q.shape[2], k.shape[2]
    out.zero_()  # for rows that see no key
    lse.fill_(-torch.inf)
    side = max(FORWARD_SIDE, ROWS_PER_THREAD * torch.get_num_threads())
    for rows, those in _together(tiles(len_q, len_kv, terms.band, side), "queries"):
        total = None
        for tile in those:
            keys = tile.keys
            part = flash.forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], _terms(terms, tile))
            if total is None:
                total = part
            else:
                flash.merge(*total, *part)
        assert total is not None
        out[:, :, rows], lse[:, :, rows] = total


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    terms: ScoreTerms,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """``flash.backward``, written into ``gradients`` of any dtype; only dQ is held in float32 as a whole."""
    dq, dk, dv = gradients
    whole = torch.zeros(q.shape, dtype=lse.dtype)
    dk.zero_()  # for keys that no row sees
    dv.zero_()
    for keys, those in _together(tiles(q.shape[2], k.shape[2], terms.band, BACKWARD_SIDE), "keys"):
        totals: list[torch.Tensor] = []
        for tile in those:
            rows = tile.queries
            of_rows = [None if x is None else x[:, :, rows] for x in (out, lse, dout, dlse)]
            arguments = (q[:, :, rows], k[:, :, keys], v[:, :, keys], *of_rows, _terms(terms, tile))
            dq_part, *parts = flash.backward(*arguments)  # type: ignore[arg-type]
            whole[:, :, rows] += dq_part
            totals = [total.add_(x) for total, x in zip(totals, parts, strict=True)] if totals else parts
        dk[:, :, keys], dv[:, :, keys] = totals
    dq.copy_(whole)
