"""Decode calls of any size and with any options, drawn anew in each run, as attention's ``drawn``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mla_plugin.arguments.cache_format import FP8, FP8_DS_MLA, PLAIN, RANK, ROPE, ROW_DTYPES
from mla_plugin.conformance.covering import Row
from mla_plugin.conformance.decode.case import DecodeCase
from mla_plugin.conformance.decode.factors import FACTORS, leftpad_of, plain_fields
from mla_plugin.conformance.drawn import Dice, check_each

if TYPE_CHECKING:
    from mla_plugin.conformance.decode.suite import DecodeConformance

_MOST, _MOST_OF_SLOW = 1.5, 0.05
"""Million multiplications of a call."""
_MOST_OF_EACH, _FEW_OF_EACH = (20_000, 80, 128, 20, 600, 600, 128), (150, 4, 6, 3, 64, 48, 16)
"""Keys, sequences, heads, queries, tokens of a page, and widths."""


def check_drawn_calls(suite: DecodeConformance) -> None:
    """Each call over a cache of any format."""
    check_each(suite, draw, suite.test_decode, _MOST, _MOST_OF_SLOW)


def _cost(sizes: Sequence[int]) -> float:
    """Of a call of these sizes, as ``DecodeCase.cost``; half of the keys are a sequence's own."""
    keys, batch, heads, seqlen_q, page_size, rank, rope = sizes
    return (keys * (batch + 1) / 2 * seqlen_q * heads * (2 * rank + rope) + 4 * page_size * (rank + rope)) / 1e6


def draw(dice: Dice, name: str, most: float) -> DecodeCase:
    """Any legal call of about so many million multiplications at most."""
    row: Row = {factor: dice.one_of(levels) for factor, levels in FACTORS.items()}
    keys, batch, heads, seqlen_q, page_size, rank, rope = dice.sizes(_MOST_OF_EACH, _FEW_OF_EACH, _cost, most)
    row |= {"heads": heads, "seqlen_q": seqlen_q, "page_size": page_size if dice.chance(0.7) else None}
    if dice.chance(0.7):
        row["ranks"] = (max(rank, 8), rope)
    kv_cache_format = dice.one_of((PLAIN, PLAIN, FP8, FP8_DS_MLA))
    if kv_cache_format != PLAIN:
        row["dtype"] = dice.one_of(ROW_DTYPES[kv_cache_format])
        row["cache"] = dice.one_of(("contiguous", "transposed", "sliced_dims", "sliced_batch"))
    if kv_cache_format == FP8_DS_MLA:
        row |= {"ranks": (RANK, ROPE), "is_packed": True}
    is_paged = row["page_size"] is not None
    if row["cache"] == "expanded_batch" or (is_paged and row["given"] == "none"):
        row |= {"cache": "contiguous", "given": "device"}
    lengths = tuple(keys if b == 0 or row["given"] == "none" else dice.length(keys) for b in range(batch))
    if row["given"] != "none":
        lengths = lengths[1:] + lengths[:1] if dice.chance(0.5) else lengths
    given: dict[str, Any] = plain_fields(row | {"causal": row["causal"] or seqlen_q == 1}, lengths)
    if row["leftpad"]:
        given["leftpads"] = tuple(leftpad_of(dice.between(0, 3), length) for length in lengths)
    case = DecodeCase(name, **given, softmax_scale=row["scale"], kv_cache_format=kv_cache_format)
    if not is_paged:
        return case
    return replace(
        case,
        table_storage=dice.one_of(("contiguous", "sliced_dims", "offset")),
        spare_columns=row["columns"],
        page_order=dice.one_of(("shuffled", "ascending", "descending")),
        shares_pages=row["shares_pages"],
    )
