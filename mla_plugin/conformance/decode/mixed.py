"""Decode calls of real and of odd sizes, each beside every feature, as attention's ``mixed``."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mla_plugin.arguments.cache_format import FP8, FP8_DS_MLA, PLAIN, RANK, ROPE, ROW_DTYPES
from mla_plugin.conformance import once
from mla_plugin.conformance.covering import Row, Space
from mla_plugin.conformance.decode.case import DecodeCase
from mla_plugin.conformance.decode.factors import plain_fields

if TYPE_CHECKING:
    from mla_plugin.conformance.decode.suite import DecodeConformance

LENGTHS: dict[str, tuple[int, ...]] = {
    "few": (40, 0, 17),
    "tiles": (127, 255, 64, 1),
    "long": (1100, 5),
    "longest": (5003,),
    "skewed": (2, 3, 2, 2, 900, 3, 2, 2),
    "many": (9, 0, 3) * 12,
    "queries": (3, 17, 5),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "format": (PLAIN, FP8, FP8_DS_MLA),
    "dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "ranks": ((32, 16), (RANK, ROPE), (256, 32), (640, 64), (24, 0)),
    "page_size": (64, None, 32, 128, 2),
    "lengths": tuple(LENGTHS),
    "given": ("host", "device"),
    "seqlen_q": (1, 2, 4, 17),
    "heads": (2, 16, 128, 3),
    "causal": (True, False),
    "leftpad": (None, 3, 300),
    "scale": (0.1353, 1.5),
    "lse": (True, False),
    "is_packed": (True, False),
    "queries": ("contiguous", "transposed", "offset", "batch_inside"),
    "cache": ("contiguous", "sliced_batch", "transposed", "sliced_dims"),
    "columns": (1, 0, 40),
    "unaligned": (False, True),
}
"""Each factor's levels. The first ones together are the plainest call."""
_MOST = 8.0
"""Million multiplications of a case."""


def settle(row: Row) -> Row:
    """The nearest row that is a legal call; levels that have no effect there get their defaults."""
    row = dict(row)
    if row["format"] != PLAIN and row["dtype"] not in ROW_DTYPES[row["format"]]:
        row["dtype"] = torch.bfloat16
    if row["format"] == FP8_DS_MLA:
        row |= {"ranks": (RANK, ROPE), "is_packed": True}
    if row["page_size"] is None:
        row["columns"] = 1
    if row["seqlen_q"] == 1:
        row["causal"] = True
    for name, value in (("heads", 2), ("seqlen_q", 2), ("lengths", "few")):
        if case_of("", row).cost > _MOST:
            row[name] = value
    return row


def case_of(name: str, row: Row) -> DecodeCase:
    """The case of a settled row; with left padding every second sequence has some."""
    lengths = LENGTHS[row["lengths"]]
    case = DecodeCase(name, **plain_fields(row | {"leftpad": False}, lengths), softmax_scale=row["scale"])
    of_memory: dict[str, Any] = {"kv_cache_format": row["format"]}
    if row["leftpad"] is not None:
        of_memory["leftpads"] = tuple(0 if b % 2 else min(row["leftpad"], n) for b, n in enumerate(lengths))
    if row["unaligned"]:
        of_memory["lengths_storage"] = "offset"
    if row["page_size"] is not None:
        of_memory |= {"spare_columns": row["columns"], "page_order": "ascending" if row["lse"] else "shuffled"}
        of_memory["table_storage"] = "offset" if row["unaligned"] else "contiguous"
    return replace(case, **of_memory)


SPACE = Space(
    name="mixed",
    factors=FACTORS,
    settle=settle,
    aspects=lambda row: {
        "page_size": row["page_size"],
        "leftpad": row["leftpad"],
        "several_queries": row["seqlen_q"] > 2,
        "long": max(LENGTHS[row["lengths"]]) > 512,
    },
    case_of=case_of,
    needing=lambda _: {},
    plain=("dtype", "given", "page_size", "ranks"),
    labels=lambda row: "paged" if row["page_size"] else "contiguous",
    shows_refusals=False,
)
"""All of them."""


@functools.cache
def _every_case() -> tuple[DecodeCase, ...]:
    return SPACE.cases(lambda _: True)


def check(suite: DecodeConformance) -> None:
    """The cases for what the backend accepts, each computed once."""
    once.check_space(suite, SPACE, _every_case(), suite.check_once)
