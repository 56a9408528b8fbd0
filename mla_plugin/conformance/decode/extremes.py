"""Decode calls far from the usual: ten thousands of keys, hundreds of heads and sequences, scores of every size.

What these leave of a call is cheap, as in attention's ``extremes``. ``c_kv`` and ``k_rope`` may be equally wide, so
that nothing but their strides tells them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mla_plugin.conformance.attention.case import DTYPE_NAMES
from mla_plugin.conformance.attention.scores import FAINT, OF_ONE_KEY
from mla_plugin.conformance.covering import Row, Space
from mla_plugin.conformance.decode.case import DecodeCase
from mla_plugin.conformance.decode.factors import plain_fields

LENGTHS: dict[str, tuple[int, ...]] = {
    "short": (70, 3, 0, 41),
    "long": (2100, 33),
    "longest": (66_000, 5),
    "many": (9, 2, 30, 0, 17) * 52,
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "ranks": ((24, 24), (8, 8), (24, 0)),
    "page_size": (64, None, 1, 48),
    "lengths": tuple(LENGTHS),
    "given": ("host", "device", "none"),
    "seqlen_q": (1, 3, 20),
    "heads": (3, 40, 260),
    "causal": (True, False),
    "leftpad": (False, True),
    "scores": ("normal", "peaked", "unlike", "faint_queries", "faint_keys"),
    "lse": (True, False),
    "is_packed": (False, True),
    "queries": ("contiguous",),
    "cache": ("contiguous", "sliced_batch", "transposed"),
    "rope_cache": (None, "contiguous", "sliced_dims", "sliced_batch"),
    "page_order": ("shuffled",),
    "shares_pages": (False, True),
}
"""Each factor's levels. The first ones together are the plainest call."""

_MOST = 3.0
"""Million multiplications of a case."""


def settle(row: Row) -> Row:
    """The nearest row that is a legal call; what its other levels leave without meaning is at its default."""
    row = dict(row)
    if row["page_size"] is None:
        row |= {"shares_pages": False, "page_order": "shuffled"}
    elif row["given"] == "none":
        row["given"] = "device"
    if row["is_packed"]:
        row["rope_cache"] = None
    if row["given"] == "none":
        row["lengths"] = "long"
    if row["seqlen_q"] == 1:
        row["causal"] = True
    if row["lengths"] == "many" and row["scores"] in OF_ONE_KEY:
        row["heads"] = 3
    for name, value in (("seqlen_q", 1), ("heads", 3), ("ranks", (8, 8)), ("heads", 1)):
        if case_of("", row).cost > _MOST:
            row |= {name: value, "causal": True} if name == "seqlen_q" else {name: value}
    return row


def case_of(name: str, row: Row) -> DecodeCase:
    """The case of a settled row."""
    lengths = LENGTHS[row["lengths"]]
    lengths = (max(lengths),) * 2 if row["given"] == "none" else lengths
    return DecodeCase(
        name,
        **plain_fields(row, lengths),
        softmax_scale=FAINT if row["scores"].startswith("faint") else 0.1353,
        scores=row["scores"],
        rope_storage_in_cache=row["rope_cache"],
        page_order=row["page_order"],
        shares_pages=row["shares_pages"],
    )


def _aspects(row: Row) -> Mapping[str, Any]:
    return {
        "many_rows": row["heads"] > 3 and row["lengths"] == "many",
        "equal_widths": row["ranks"][0] == row["ranks"][1],
        "one_layout": row["rope_cache"] in (None, row["cache"]),
    }


SPACE = Space(
    name="extremes",
    factors=FACTORS,
    settle=settle,
    aspects=_aspects,
    case_of=case_of,
    needing=lambda _: {},
    plain=("dtype", "given", "page_size", "ranks"),
    labels=lambda row: f"{'paged' if row['page_size'] else 'contiguous'}-{DTYPE_NAMES[row['dtype']]}",
    shows_refusals=False,
)
"""All of them."""
