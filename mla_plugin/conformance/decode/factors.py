"""What decode calls differ in, and the cases that hold every pair of it; see ``covering``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mla_plugin.conformance.attention.case import DTYPE_NAMES
from mla_plugin.conformance.covering import Row, Space
from mla_plugin.conformance.decode.case import DecodeCase

LENGTHS: dict[str, tuple[int, ...]] = {
    "mixed": (67, 1, 0, 130),
    "multiples": (64, 128, 192, 16),
    "one": (37,),
    "long": (700, 3, 257),
    "many": (5, 31, 2, 33, 64, 1, 17, 8, 48),
    "equal": (96, 96),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "ranks": ((512, 64), (256, 32), (128, 64), (512, 0), (96, 16), (320, 64), (72, 8)),
    "page_size": (64, None, 1, 3, 16, 256),
    "lengths": tuple(LENGTHS),
    "given": ("host", "device", "none"),
    "seqlen_q": (1, 2, 3, 4, 5, 9),
    "heads": (16, 1, 5, 48, 128),
    "causal": (True, False),
    "leftpad": (False, True),
    "scale": (0.1353, 0.0625),
    "scores": ("normal", "large"),
    "lse": (True, False),
    "is_packed": (True, False),
    "queries": ("contiguous", "transposed", "sliced_heads", "odd_rows", "offset", "expanded_batch"),
    "cache": ("contiguous", "sliced_dims", "sliced_batch", "transposed", "expanded_batch"),
    "rope_cache": (None, "contiguous", "sliced_dims", "sliced_batch", "transposed"),
    "table": ("contiguous", "sliced_dims", "expanded_batch"),
    "columns": (1, 0, 100),
    "page_order": ("shuffled", "descending"),
    "shares_pages": (False, True),
}
"""Each factor's levels. The first ones together are the plainest call."""

_MOST = 40.0


def settle(row: Row) -> Row:
    """The nearest row that is a legal call; levels that have no effect there get their defaults."""
    row = dict(row)
    if row["page_size"] is not None and row["given"] == "none":
        row["given"] = "device"
    if row["page_size"] is None:
        row |= {"table": "contiguous", "shares_pages": False, "columns": 1, "page_order": "shuffled"}
    elif row["cache"] == "expanded_batch":
        row["cache"] = "contiguous"
    if row["is_packed"]:
        row["rope_cache"] = None
    if row["given"] == "none":
        row["lengths"] = "equal"
    if row["seqlen_q"] == 1:
        row["causal"] = True
    for name, value in (("heads", 16), ("seqlen_q", 2), ("lengths", "mixed")):
        if case_of("", row).cost > _MOST:
            row[name] = value
    return row


def case_of(name: str, row: Row) -> DecodeCase:
    """The case of a settled row."""
    return DecodeCase(
        name,
        **plain_fields(row, LENGTHS[row["lengths"]]),
        softmax_scale=row["scale"],
        scores=row["scores"],
        rope_storage_in_cache=row["rope_cache"],
        table_storage=row["table"],
        spare_columns=row["columns"],
        page_order=row["page_order"],
        shares_pages=row["shares_pages"],
    )


def plain_fields(row: Row, lengths: tuple[int, ...]) -> dict[str, Any]:
    """What every space of decode cases varies, as ``DecodeCase`` names it."""
    return {
        "dtype": row["dtype"],
        "lengths": lengths,
        "seqlen_q": row["seqlen_q"],
        "num_heads": row["heads"],
        "rank": row["ranks"][0],
        "rope": row["ranks"][1],
        "page_size": row["page_size"],
        "causal": row["causal"],
        "has_seqlens_kv": row["given"] != "none",
        "has_host_lengths": row["given"] == "host",
        "leftpads": tuple(map(leftpad_of, range(len(lengths)), lengths)) if row["leftpad"] else None,
        "return_lse": row["lse"],
        "is_packed": row["is_packed"],
        "query_storage": row["queries"],
        "cache_storage": row["cache"],
    }


def leftpad_of(b: int, length: int) -> int:
    """Half of the keys, so that pages are left out too; more than there are; none; all of them."""
    return (min(70, length // 2), 5, 0, length)[b % 4]


def _aspects(row: Row) -> Mapping[str, Any]:
    return {
        "dtype": row["dtype"],
        "paged": row["page_size"] is not None,
        "several_queries": row["seqlen_q"] > 1,
        "causal": row["causal"],
        "given": row["given"],
        "leftpad": row["leftpad"],
        "many_heads": row["heads"] > 16,
        "lse": row["lse"],
        "cache": row["cache"],
    }


def _needing(name: str) -> Row:
    if name == "causal":
        return {"seqlen_q": 3}
    if name == "given":
        return {"page_size": None}
    if name == "rope_cache":
        return {"is_packed": False}
    return {}


SPACE = Space(
    name="pairs",
    factors=FACTORS,
    settle=settle,
    aspects=_aspects,
    case_of=case_of,
    needing=_needing,
    plain=("dtype", "given", "page_size", "ranks"),
    labels=lambda row: f"{'paged' if row['page_size'] else 'contiguous'}-{DTYPE_NAMES[row['dtype']]}",
)
"""All decode calls."""
