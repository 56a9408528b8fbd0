"""Attention calls of extreme sizes: tens of thousands of keys, hundreds of heads and sequences, scores of every size.

They are cheap, with few queries over many keys and narrow heads. They find counters of 8 or 16 bits that overflow, a
softmax that drops small weights or shares a maximum between rows, and gradients that depend on the order in which tiles
are summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mla_plugin.conformance.attention.case import DTYPE_NAMES, Case
from mla_plugin.conformance.attention.factors import plain_fields
from mla_plugin.conformance.attention.scores import FAINT, OF_ONE_KEY
from mla_plugin.conformance.covering import Row, Space

FACTORS: dict[str, tuple[Any, ...]] = {
    "qkv_format": ("bshd", "sbhd", "bhsd", "thd"),
    "mask": ("no_mask", "causal", "causal_bottom_right"),
    "window": ((-1, -1), (150, 60)),
    "padded": (False, True),
    "len_q": (5, 1, 600),
    "len_kv": (90, 2100, 33_000),
    "batch": (1, 3, 260),
    "heads": ((2, 1), (1, 1), (260, 260), (264, 8)),
    "head_dims": ((8, 8), (20, 12)),
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "scores": ("normal", "peaked", "unlike", "faint_queries", "faint_keys"),
    "deterministic": (False, True),
    "lse": (False, True),
}
"""Each factor's levels. The first ones together are the plainest call."""

_MOST = 2.7
"""Million multiplications of a case."""


def settle(row: Row) -> Row:
    """The nearest row that is a legal call; what its other levels leave without meaning is at its default."""
    row = dict(row)
    if row["qkv_format"] == "thd":
        row["padded"] = True
    if "causal" in row["mask"]:
        row["window"] = (row["window"][0], -1)
    if row["scores"] == "faint_keys" and row["dtype"] == torch.float16:
        row["len_kv"] = 90  # dk of more keys is below its smallest numbers
    if row["scores"] in OF_ONE_KEY:
        row["batch"] = min(row["batch"], 3)
    if row["len_q"] == 1:
        row["len_kv"] = 90  # the rounding of one query's delta and dout is common to all keys' gradients
    for name, value in (("batch", 1), ("heads", (2, 1)), ("len_q", 5), ("head_dims", (8, 8)), ("heads", (1, 1))):
        if case_of("", row).cost > _MOST:
            row[name] = value
    return row


def case_of(name: str, row: Row) -> Case:
    """The case of a settled row; of padded sequences every second one is shorter."""
    mask, batch, padded = row["mask"], row["batch"], row["padded"]
    lengths: dict[str, Any] = {}
    for side, longest in (("q", row["len_q"]), ("kv", row["len_kv"])):
        shorter = (longest + 1) // 2 if padded else longest
        lengths[f"seqlens_{side}"] = tuple(shorter if b % 2 else longest for b in range(batch))
        if padded and row["qkv_format"] != "thd":
            lengths[f"rows_{side}"] = (longest + 1,) * batch
    if padded:
        mask = "padding" if mask == "no_mask" else f"padding_{mask}"
    return Case(
        name,
        **plain_fields(row, mask),
        **lengths,
        softmax_scale=FAINT if row["scores"].startswith("faint") else None,
        scores=row["scores"],
        deterministic=row["deterministic"],
        return_lse=row["lse"],
    )


def _aspects(row: Row) -> Mapping[str, Any]:
    """Sums over all of many keys or queries, none of which outweighs the others, in each dtype."""
    is_sum = row["scores"] not in OF_ONE_KEY and row["window"] == (-1, -1)
    return {
        "dtype": row["dtype"],
        "sums_over_keys": is_sum and row["len_kv"] == max(FACTORS["len_kv"]) and row["mask"] != "causal",
        "sums_over_queries": is_sum and row["len_q"] > 5 and row["deterministic"] and "bottom" not in row["mask"],
    }


SPACE = Space(
    name="extremes",
    factors=FACTORS,
    settle=settle,
    aspects=_aspects,
    case_of=case_of,
    needing=lambda _: {},
    plain=("dtype", "head_dims", "qkv_format", "mask"),
    labels=lambda row: f"{row['qkv_format']}-{row['mask']}-{DTYPE_NAMES[row['dtype']]}",
    shows_refusals=False,
)
"""All of them."""
