"""The queries as the descriptors of the Hopper and the wide kernel read them; ``copy_rows`` copies by these.

A row is a (query, head) pair; the heads of a query follow one another. If the rows of each sequence have one stride,
the descriptor is over [B, S_q * H, D], and one copy fills a panel of 64 rows. A serving engine's product with W_UK
leaves the queries head-major, [H, B, S_q, D] in memory: rows have two strides. Then the descriptor is over
[B, S_q, H, D], and a copy brings some heads of one query, or all heads of several. Queries that neither can read are
copied first.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.arguments.decode_layout import starts_aligned
from mla_plugin.kernels.decode.descriptors import can_read
from mla_plugin.kernels.hopper.common import ROWS

_SWIZZLED_ROWS = 8
"""After so many rows a panel's swizzle begins anew, so a copy must have a multiple of them."""


class QueryRows(NamedTuple):
    """What descriptors of the queries describe.

    Attributes:
        q_nope_abs, q_rope: both [B, S_q * H, D], or both [B, S_q, H, D] if the rows of either have no common stride.
        block: rows of a copy: (ROWS,), or (queries, heads). A row tile is a whole number of copies.
    """

    q_nope_abs: torch.Tensor
    q_rope: torch.Tensor
    block: tuple[int, ...]


def _merged(queries: torch.Tensor) -> torch.Tensor | None:
    """Queries [B, S_q, H, D] as [B, S_q * H, D]; None: their rows have no common stride."""
    batch, seqlen_q, heads, columns = queries.shape
    of_batch, of_query, of_head, _ = queries.stride()
    if seqlen_q > 1 and heads > 1 and of_query != heads * of_head:
        return None
    return queries.as_strided((batch, seqlen_q * heads, columns), (of_batch, of_head if heads > 1 else of_query, 1))


def _block_of(heads: int) -> tuple[int, int] | None:
    """(queries, heads) of a copy; None: it would have too few rows."""
    heads_at_once = math.gcd(ROWS.value, heads)
    queries = ROWS.value // heads if heads_at_once == heads else 1
    return (queries, heads_at_once) if queries * heads_at_once % _SWIZZLED_ROWS == 0 else None


def _as_they_lie(q_nope_abs: torch.Tensor, q_rope: torch.Tensor) -> QueryRows | None:
    """None: descriptors cannot read them."""
    nope_rows, rope_rows = _merged(q_nope_abs), _merged(q_rope)
    block = _block_of(q_nope_abs.shape[2])
    if nope_rows is not None and rope_rows is not None:
        found = QueryRows(nope_rows, rope_rows, (ROWS.value,))
    elif block is not None:
        found = QueryRows(q_nope_abs, q_rope, block)
    else:
        return None
    is_read = starts_aligned(q_nope_abs, q_rope) and can_read(found.q_nope_abs) and can_read(found.q_rope)
    return found if is_read else None


def with_copied_queries(tensors: DecodeTensors) -> DecodeTensors:
    """The call with contiguous copies of its queries."""
    whole = {"memory_format": torch.contiguous_format}
    return tensors._replace(q_nope_abs=tensors.q_nope_abs.clone(**whole), q_rope=tensors.q_rope.clone(**whole))


def query_rows(tensors: DecodeTensors) -> tuple[QueryRows, bool]:
    """What to describe of calls of this layout, and whether their queries must be copied before.

    They must if a row does not start on 16 bytes, if rows repeat (stride 0), or if they are head-major and the number
    of heads is no multiple of 8 and does not divide 64.
    """
    found = _as_they_lie(tensors.q_nope_abs, tensors.q_rope)
    if found is not None:
        return found, False
    tensors = with_copied_queries(tensors)
    copied = _as_they_lie(tensors.q_nope_abs, tensors.q_rope)
    assert copied is not None, "contiguous rows of 512 and of 64 elements of 2 bytes are read"
    return copied, True
