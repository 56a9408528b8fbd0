"""Attention calls in many sizes: cheap cases with every pair of lengths, batches, heads and widths.

Kernels often fail at specific sizes: the last tile is full, or has one row; the number of heads is not a power of two;
there is only one sequence. Masks and biases are broadcast along each of their axes, and some tensors have batch and
tokens exchanged in memory, as views of ``sbhd`` memory have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mla_plugin.conformance.attention.case import DTYPE_NAMES, Case
from mla_plugin.conformance.attention.draw import Storage
from mla_plugin.conformance.attention.factors import plain_fields
from mla_plugin.conformance.covering import Row, Space

_STORAGES: tuple[Storage, ...] = ("contiguous", "batch_inside", "transposed")
FACTORS: dict[str, tuple[Any, ...]] = {
    "qkv_format": ("bshd", "sbhd", "bhsd", "thd"),
    "mask": ("no_mask", "causal", "causal_bottom_right", "arbitrary"),
    "window": ((-1, -1), (6, -1), (3, 9), (100, 40)),
    "len_q": (33, 1, 63, 64, 128, 129),
    "len_kv": (47, 1, 3, 65, 256, 1025),
    "batch": (2, 1, 5, 17),
    "heads": ((2, 2), (1, 1), (5, 5), (12, 3), (33, 11)),
    "head_dims": ((16, 16), (24, 40), (80, 64), (65, 33)),
    "dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "padded": (False, True),
    "of_batch": (True, False),
    "of_heads": (True, False),
    "of_queries": (True, False),
    "of_keys": (True, False),
    "bias": (None, "post_scale_bias", "pre_scale_bias"),
    "bias_requires_grad": (True, False),
    "scores_storage": _STORAGES,
    "q": _STORAGES,
    "k": _STORAGES,
    "v": _STORAGES,
    "dout": _STORAGES,
    "lse": (False, True),
    "needs": ("qkv", "q", "k", "v"),
}
"""Each factor's levels. The first ones together are the plainest call."""

_DEFAULT: Row = {name: levels[0] for name, levels in FACTORS.items()}
_SHAPE = ("of_batch", "of_heads", "of_queries", "of_keys")
_MOST = 2.0
"""Million multiplications of a case."""


def settle(row: Row) -> Row:
    """The nearest row that is a legal call; levels that have no effect there get their defaults."""
    row = dict(row)

    def drop(*names: str) -> None:
        row.update((name, _DEFAULT[name]) for name in names)

    if row["qkv_format"] == "thd":
        drop("bias", *(("mask",) if row["mask"] == "arbitrary" else ()))
        row["padded"] = True
    if row["mask"] == "arbitrary":
        drop("padded")
    if "causal" in row["mask"]:
        row["window"] = (row["window"][0], -1)
    if row["bias"] is None:
        drop("bias_requires_grad")
        if row["mask"] != "arbitrary":
            drop("scores_storage", *_SHAPE)
    for name, value in (("batch", 1), ("heads", (2, 2)), ("len_q", 33), ("len_kv", 47)):
        if case_of("", row).cost > _MOST:
            row[name] = value
    return row


def case_of(name: str, row: Row) -> Case:
    """The case of a settled row; padded sequences have their longest length and others below it by turns."""
    mask, batch = row["mask"], row["batch"]
    lengths: dict[str, Any] = {}
    for side, longest in (("q", row["len_q"]), ("kv", row["len_kv"])):
        shorter = (longest - longest // 3 - 1) if row["padded"] else longest
        lengths[f"seqlens_{side}"] = tuple(longest if b % 3 == 0 else shorter for b in range(batch))
        if row["padded"] and row["qkv_format"] != "thd":
            lengths[f"rows_{side}"] = (longest + 2,) * batch
    if row["padded"]:
        mask = "padding" if mask == "no_mask" else f"padding_{mask}"
    shape = "".join(letter if row[axis] else "1" for letter, axis in zip("bhss", _SHAPE, strict=True))
    shape = shape.lstrip("1") or "1"  # as few dimensions as say it
    return Case(
        name,
        **plain_fields(row, mask),
        **lengths,
        bottom_right_diagonal=row["mask"] != "arbitrary" or row["of_queries"],
        bias_type=row["bias"] or "no_bias",
        bias_shape=shape,
        bias_requires_grad=row["bias"] is not None and row["bias_requires_grad"],
        mask_shape=shape,
        bias_storage=row["scores_storage"],
        storage_q=row["q"],
        storage_k=row["k"],
        storage_v=row["v"],
        dout_storage=row["dout"],
        return_lse=row["lse"],
        needs_gradient=row["needs"],
    )


def _aspects(row: Row) -> Mapping[str, Any]:
    return {
        "mask": row["mask"],
        "window": row["window"] != (-1, -1),
        "bias": row["bias"] is not None,
        "gqa": row["heads"][0] != row["heads"][1],
        "of_batch": row["of_batch"],
        "of_heads": row["of_heads"],
        "of_queries": row["of_queries"],
        "of_keys": row["of_keys"],
    }


def _needing(name: str) -> Row:
    """Levels of other factors without which a level has no effect."""
    return {"bias": "post_scale_bias"} if name.startswith(("bias_", "of_", "scores_")) else {}


SPACE = Space(
    name="sizes",
    factors=FACTORS,
    settle=settle,
    aspects=_aspects,
    case_of=case_of,
    needing=_needing,
    plain=("dtype", "head_dims", "qkv_format", "mask"),
    labels=lambda row: f"{row['qkv_format']}-{row['mask']}-{DTYPE_NAMES[row['dtype']]}",
    shows_refusals=False,
)
"""All cheap attention calls."""
