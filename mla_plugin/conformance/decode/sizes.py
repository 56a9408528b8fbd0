"""Decode calls in many sizes and cache formats: cheap cases that hold every pair of lengths, pages and heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mla_plugin.arguments.cache_format import FP8, FP8_DS_MLA, PLAIN, RANK, ROPE, ROW_DTYPES
from mla_plugin.conformance.attention.case import DTYPE_NAMES
from mla_plugin.conformance.covering import Row, Space
from mla_plugin.conformance.decode.case import DecodeCase
from mla_plugin.conformance.decode.factors import plain_fields

LENGTHS: dict[str, tuple[int, ...]] = {
    "around_64": (63, 64, 65, 0),
    "around_128": (129, 128),
    "many": (3, 17, 0, 48) * 5,
    "one": (97,),
    "above_512": (2, 513, 0),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "format": (PLAIN, FP8, FP8_DS_MLA),
    "dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "ranks": ((64, 16), (40, 56), (RANK, ROPE), (136, 0)),
    "page_size": (16, None, 5, 24, 64),
    "lengths": tuple(LENGTHS),
    "given": ("device", "host", "none"),
    "seqlen_q": (1, 2, 6, 8),
    "heads": (2, 1, 33, 24, 66),
    "causal": (True, False),
    "leftpad": (False, True),
    "lse": (True, False),
    "is_packed": (True, False),
    "queries": ("contiguous", "batch_inside", "transposed"),
    "cache": ("contiguous", "transposed"),
    "numbers": ("spread", "normal"),
    "prefix_pages": (0, 1, 3),
}
"""Each factor's levels. The first ones together are the plainest call."""

_MOST = 4.0
"""Million multiplications of a case."""


def settle(row: Row) -> Row:
    """The nearest row that is a legal call; levels that have no effect there get their defaults."""
    row = dict(row)
    if row["format"] == PLAIN:
        row["numbers"] = "normal"
    elif row["dtype"] not in ROW_DTYPES[row["format"]]:
        row["dtype"] = torch.bfloat16
    if row["format"] == FP8_DS_MLA:
        row |= {"ranks": (RANK, ROPE), "is_packed": True}
    if row["page_size"] is None:
        row["prefix_pages"] = 0
    elif row["given"] == "none":
        row["given"] = "device"
    if row["given"] == "none":
        row["lengths"] = "one"
    if row["seqlen_q"] == 1:
        row["causal"] = True
    for name, value in (("heads", 2), ("seqlen_q", 2), ("lengths", "around_64")):
        if case_of("", row).cost > _MOST:
            row[name] = value
    return row


def case_of(name: str, row: Row) -> DecodeCase:
    """The case of a settled row."""
    return DecodeCase(
        name,
        **plain_fields(row, LENGTHS[row["lengths"]]),
        numbers=row["numbers"],
        shares_pages=row["prefix_pages"] > 0,
        prefix_pages=row["prefix_pages"],
        kv_cache_format=row["format"],
    )


def _aspects(row: Row) -> Mapping[str, Any]:
    return {
        "format": row["format"],
        "paged": row["page_size"] is not None,
        "several_queries": row["seqlen_q"] > 1,
        "causal": row["causal"],
        "leftpad": row["leftpad"],
        "many_heads": row["heads"] > 16,
    }


def _needing(name: str) -> Row:
    return {"format": FP8} if name == "numbers" else {}


SPACE = Space(
    name="sizes",
    factors=FACTORS,
    settle=settle,
    aspects=_aspects,
    case_of=case_of,
    needing=_needing,
    plain=("dtype", "given", "page_size", "ranks"),
    labels=lambda row: f"{row['format']}-{'paged' if row['page_size'] else 'contiguous'}-{DTYPE_NAMES[row['dtype']]}",
    shows_refusals=False,
)
"""All cheap decode calls."""
