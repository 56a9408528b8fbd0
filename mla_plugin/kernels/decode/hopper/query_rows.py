"""What descriptors of the queries describe, for the Hopper and the wide kernel; ``copy_rows`` copies by them.

A row is a (query, head) pair, the heads of a query one after another. Where the rows of a sequence have one stride, a
descriptor has them as [B, S_q * H, D], and a panel is one copy. A serving engine's product with W_UK leaves each head's
queries together, [H, B, S_q, D] in memory, so that rows have two strides. Then it has [B, S_q, H, D], and a copy brings
some heads of one query, or all heads of some.
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
        q_nope_abs, q_rope: [B, S_q * H, D], or [B, S_q, H, D] where these rows have no common stride.
        block: rows of a copy: (ROWS,), or (queries, heads).
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
    """(queries, heads) of a copy, which does not go beyond a row tile; None: its rows would be too few."""
    at_once = math.gcd(ROWS.value, heads)
    queries = ROWS.value // heads if at_once == heads else 1
    return (queries, at_once) if queries * at_once % _SWIZZLED_ROWS == 0 else None


def query_rows(tensors: DecodeTensors) -> QueryRows | None:
    """The queries of a call as descriptors read them; None: they cannot."""
    q_nope_abs, q_rope = tensors.q_nope_abs, tensors.q_rope
    nope_rows, rope_rows = _merged(q_nope_abs), _merged(q_rope)
    if nope_rows is not None and rope_rows is not None:
        found = QueryRows(nope_rows, rope_rows, (ROWS.value,))
    else:
        block = _block_of(q_nope_abs.shape[2])
        if block is None:
            return None
        found = QueryRows(q_nope_abs, q_rope, block)
    is_read = starts_aligned(q_nope_abs, q_rope) and can_read(found.q_nope_abs) and can_read(found.q_rope)
    return found if is_read else None
