"""Attention calls of real and of odd sizes, each beside every feature: cheap cases with every pair of them.

``factors`` holds every pair of features, ``sizes`` and ``extremes`` those of sizes; a kernel that has a path of its own
for both at once (more than a tile of queries and heads of 128, many heads and a strided V, a captured graph's
``max_seqlen`` and a causal mask) is held to this one.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from mla_plugin.conformance import once
from mla_plugin.conformance.attention.case import DTYPE_NAMES, Case
from mla_plugin.conformance.attention.factors import plain_fields
from mla_plugin.conformance.attention.special import check_once
from mla_plugin.conformance.covering import Row, Space

if TYPE_CHECKING:
    from mla_plugin.conformance.attention.suite import BackendConformance

FACTORS: dict[str, tuple[Any, ...]] = {
    "qkv_format": ("bshd", "sbhd", "bhsd", "thd"),
    "mask": ("no_mask", "causal", "causal_bottom_right", "arbitrary"),
    "window": ((-1, -1), (300, -1), (-1, 90), (260, 70)),
    "bottom_right": (True, False),
    "lengths": ((5, 17), (290, 20), (64, 128), (129, 65), (6, 1100), (66, 5)),
    "batch": (2, 7, 36),
    "rows": ("full", "padded", "gaps"),
    "heads": ((2, 2), (1, 1), (16, 2), (9, 3), (128, 128)),
    "head_dims": ((24, 16), (192, 128), (128, 128), (64, 64), (256, 256), (320, 272)),
    "dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "beyond": (False, True),
    "scale": (None, 1.3),
    "q": ("contiguous", "transposed", "offset"),
    "k": ("contiguous", "sliced_dims", "expanded_heads"),
    "v": ("contiguous", "sliced_dims", "offset"),
    "dout": ("contiguous", "transposed", "strided"),
    "lse": (False, True),
    "bias": (None, "post_scale_bias", "pre_scale_bias"),
    "bias_requires_grad": (True, False),
    "deterministic": (False, True),
}
"""Each factor's levels. The first ones together are the plainest call."""

_DEFAULT: Row = {name: levels[0] for name, levels in FACTORS.items()}
_MOST = 5.0
"""Million multiplications of a case."""


def settle(row: Row) -> Row:
    """The nearest row that is a legal call; levels that have no effect there get their defaults."""
    row = dict(row)

    def drop(*names: str) -> None:
        row.update((name, _DEFAULT[name]) for name in names)

    if row["qkv_format"] == "thd":
        drop("bias", *(("mask",) if row["mask"] == "arbitrary" else ()))
    else:
        drop("beyond")
        row["rows"] = "full" if row["rows"] == "full" or row["mask"] == "arbitrary" else "padded"
    if "causal" in row["mask"]:
        row["window"] = (row["window"][0], -1)
    if row["bias"] is None:
        drop("bias_requires_grad")
    for name, value in (("batch", 1), ("lengths", (5, 17)), ("heads", (1, 1))):
        if case_of("", row).cost > _MOST:
            row[name] = value
    return row


def case_of(name: str, row: Row) -> Case:
    """The case of a settled row; where rows are not full, every third sequence is the longest and one is empty."""
    is_packed, batch = row["qkv_format"] == "thd", row["batch"]
    lengths: dict[str, Any] = {"lead": 71 if row["rows"] == "gaps" else 0}
    for side, longest, behind in (("q", row["lengths"][0], (0, 5)), ("kv", row["lengths"][1], (66, 0))):
        parts = (longest, longest - longest // 3, 0 if batch > 3 else longest // 2 + 1)
        own = tuple(parts[b % 3] if row["rows"] != "full" else longest for b in range(batch))
        lengths[f"seqlens_{side}"] = own
        if row["rows"] == "gaps":
            lengths[f"rows_{side}"] = tuple(n + behind[b % 2] for b, n in enumerate(own))
        elif row["rows"] == "padded" and not is_packed:
            lengths[f"rows_{side}"] = (longest + 2,) * batch
    mask = row["mask"]
    if row["rows"] != "full" or is_packed:
        mask = "padding" if mask == "no_mask" else f"padding_{mask}"
    return Case(
        name,
        **plain_fields(row, mask),
        **lengths,
        bottom_right_diagonal=row["bottom_right"],
        bias_type=row["bias"] or "no_bias",
        bias_shape="bhss",
        bias_requires_grad=row["bias"] is not None and row["bias_requires_grad"],
        mask_shape="bhss",
        softmax_scale=row["scale"],
        storage_q=row["q"],
        storage_k=row["k"],
        storage_v=row["v"],
        dout_storage=row["dout"],
        return_lse=row["lse"],
        max_seqlen="beyond" if row["beyond"] else None,
        deterministic=row["deterministic"],
    )


SPACE = Space(
    name="mixed",
    factors=FACTORS,
    settle=settle,
    aspects=lambda _: {},
    case_of=case_of,
    needing=lambda name: {"bias": "post_scale_bias"} if name.startswith("bias_") else {},
    plain=("dtype", "head_dims", "qkv_format", "mask"),
    labels=lambda row: f"{row['qkv_format']}-{row['mask']}-{DTYPE_NAMES[row['dtype']]}",
    shows_refusals=False,
)
"""All of them."""


@functools.cache
def _every_case() -> tuple[Case, ...]:
    return SPACE.cases()


def check(suite: BackendConformance) -> None:
    """The cases for what the backend accepts, each computed once."""
    once.check_space(suite, SPACE, _every_case(), functools.partial(check_once, suite))
