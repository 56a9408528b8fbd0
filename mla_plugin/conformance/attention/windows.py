"""Attention calls with windows: cheap cases that hold every triple of a window's sides, its diagonal and the rest.

A causal mask has a window of its own, so here nothing but the window hides keys. It is open on one side, or ends at the
diagonal, and hides some keys in every case.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mla_plugin.conformance.attention.case import DTYPE_NAMES, Case
from mla_plugin.conformance.covering import Row, Space

WINDOWS: dict[str, tuple[int, int]] = {
    "left": (7, -1),
    "right": (-1, 4),
    "both": (5, 3),
    "left_of_the_diagonal": (6, 0),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "qkv_format": ("bshd", "sbhd", "bhsd", "thd"),
    "window": tuple(WINDOWS),
    "bottom_right": (True, False),
    "lengths": ((17, 40), (71, 37), (33, 33), (70, 150)),
    "batch": (2, 1, 5),
    "rows": ("full", "padded", "gaps"),
    "heads": ((2, 2), (4, 2), (3, 1)),
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "lse": (False, True),
    "needs": ("qkv", "v", "q", "k"),
    "deterministic": (False, True),
    "bias": (False, True),
}
"""Each factor's levels. The first ones together are the plainest call."""


def settle(row: Row) -> Row:
    """The nearest row that is a legal call."""
    row = dict(row)
    if row["qkv_format"] == "thd":
        row["bias"] = False
        row["rows"] = "gaps" if row["rows"] == "gaps" else "padded"
    elif row["rows"] == "gaps":
        row["rows"] = "padded"
    return row


def case_of(name: str, row: Row) -> Case:
    """The case of a settled row; sequences of one batch are the longest and others by turns."""
    is_packed, batch = row["qkv_format"] == "thd", row["batch"]
    lengths: dict[str, Any] = {}
    for side, longest in zip(("q", "kv"), row["lengths"], strict=True):
        shorter = longest if row["rows"] == "full" else longest * 2 // 3
        lengths[f"seqlens_{side}"] = own = tuple(shorter if b % 2 else longest for b in range(batch))
        if row["rows"] == "gaps":
            lengths[f"rows_{side}"] = tuple(n + 3 * (b % 2 == (side == "q")) for b, n in enumerate(own))
        elif row["rows"] == "padded" and not is_packed:
            lengths[f"rows_{side}"] = (longest + 3,) * batch
    return Case(
        name,
        qkv_format=row["qkv_format"],
        dtype=row["dtype"],
        **lengths,
        num_heads=row["heads"][0],
        num_kv_heads=row["heads"][1],
        head_dim_qk=24,
        head_dim_v=16,
        attn_mask_type="no_mask" if row["rows"] == "full" else "padding",
        window_size=WINDOWS[row["window"]],
        bottom_right_diagonal=row["bottom_right"],
        bias_type="post_scale_bias" if row["bias"] else "no_bias",
        return_lse=row["lse"],
        needs_gradient=row["needs"],
        deterministic=row["deterministic"],
    )


def _aspects(row: Row) -> Mapping[str, Any]:
    len_q, len_kv = row["lengths"]
    return {
        "qkv_format": row["qkv_format"],
        "window": row["window"],
        "bottom_right": row["bottom_right"],
        "order": (len_q > len_kv) - (len_q < len_kv),
        "rows": row["rows"],
        "gqa": row["heads"][0] != row["heads"][1],
        "fp16": row["dtype"] == torch.float16,
    }


SPACE = Space(
    name="windows",
    factors=FACTORS,
    settle=settle,
    aspects=_aspects,
    case_of=case_of,
    needing=lambda _: {},
    plain=("dtype", "qkv_format", "heads", "window"),
    labels=lambda row: f"{row['qkv_format']}-{row['window']}-{DTYPE_NAMES[row['dtype']]}",
    shows_refusals=False,
)
"""All cheap attention calls with a window."""
