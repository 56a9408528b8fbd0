"""What attention calls differ in, and the cases that hold every pair of it; see ``covering``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch

from mla_plugin.conformance.attention.case import DTYPE_NAMES, Case
from mla_plugin.conformance.attention.draw import Storage
from mla_plugin.conformance.covering import Row, Space

_Q: tuple[Storage, ...] = ("contiguous", "transposed", "sliced_heads", "sliced_tokens", "odd_rows", "offset")
_K: tuple[Storage, ...] = (*_Q[:4], "expanded_heads", "expanded_batch", "odd_rows")
_V: tuple[Storage, ...] = ("contiguous", "sliced_dims", "transposed", "sliced_heads", "expanded_batch", "offset")


class _Gaps(NamedTuple):
    """Rows before the first sequence, behind each by turns, and behind the last one's; some are more than a tile."""

    lead: int = 0
    behind: tuple[int, int] = (0, 0)
    tail: int = 0


_GAPS = {
    "none": _Gaps(),
    "between": _Gaps(behind=(3, 132)),
    "lead": _Gaps(lead=70),
    "tail": _Gaps(tail=261),
    "all": _Gaps(5, (3, 4), 9),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "qkv_format": ("bshd", "sbhd", "bhsd", "thd"),
    "mask": ("no_mask", "causal", "causal_bottom_right", "arbitrary"),
    "padded": ("no", "self", "unequal", "empty"),
    "window": ((-1, -1), (7, -1), (5, 3), (-1, 4), (0, 0), (70, 30)),
    "bottom_right": (True, False),
    "lengths": ((67, 67), (37, 71), (71, 37), (1, 83), (17, 300), (140, 24), (16, 16)),
    "batch": (2, 1, 3, 6, 9),
    "gaps": tuple(_GAPS),
    "max_seqlen": ("exact", "extent"),
    "heads": ((3, 3), (4, 2), (6, 2), (8, 1), (1, 1), (18, 18), (20, 10)),
    "head_dims": ((192, 128), (128, 128), (64, 32), (256, 256), (96, 64), (192, 256)),
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "q": _Q,
    "k": _K,
    "v": _V,
    "dout": ("contiguous", "transposed", "expanded", "strided", "sliced_dims", "sliced_tokens", "offset"),
    "dlse": (None, "contiguous", "expanded", "transposed", "strided"),
    "bias": (None, "post_scale_bias", "pre_scale_bias"),
    "bias_shape": ("1hss", "b1ss", "11ss", "bhss", "111s"),
    "bias_requires_grad": (True, False),
    "bias_storage": ("contiguous", "sliced_tokens", "sliced_dims"),
    "offsets": ("contiguous", "strided"),
    "scale": (None, 0.1353),
    "scores": ("normal", "large", "overflow"),
    "needs": ("qkv", "q", "k", "v", "qk", "qv", "kv"),
    "deterministic": (False, True),
}
"""Each factor's levels. The first ones together are the plainest call."""

_DEFAULT: Row = {name: levels[0] for name, levels in FACTORS.items()}
_MOST = 5.0
"""Million multiplications of a case: the large ones are in the catalogue."""
_PARTS_Q, _PARTS_KV = (1.0, 0.3, 0.0, 0.8, 0.05), (0.4, 1.0, 0.7, 0.1, 0.0)


def settle(row: Row) -> Row:
    """The nearest row that is a legal call; levels that have no effect there get their defaults."""
    row = dict(row)

    def drop(*names: str) -> None:
        row.update((name, _DEFAULT[name]) for name in names)

    if row["qkv_format"] == "thd":
        drop("bias")
        if row["mask"] == "arbitrary":
            drop("mask")
        if row["padded"] == "no":
            drop("gaps")
    else:
        drop("gaps")
        if row["padded"] == "no":
            drop("offsets", "max_seqlen")
    if row["mask"] == "arbitrary":
        drop("padded", "window", "bottom_right")
    if "causal" in row["mask"]:
        row["window"] = (row["window"][0], -1)
    if row["window"] == (-1, -1) or "causal" in row["mask"]:
        drop("bottom_right")
    if row["bias"] is None:
        drop("bias_shape", "bias_requires_grad")
        if row["mask"] != "arbitrary":
            drop("bias_storage")
    if row["padded"] != "no":
        row.update({name: "contiguous" for name in ("q", "k", "v") if row[name] == "expanded_batch"})
    if row["scores"] == "overflow":
        drop("scale")
        if row["bias"] == "pre_scale_bias":
            drop("scores")
    for name, value in (("batch", 1), ("lengths", (37, 71)), ("lengths", (16, 16))):
        if _cost(row) > _MOST:
            row[name] = value
    return row


def _cost(row: Row) -> float:
    """No less than ``Case.cost``."""
    (most_q, most_kv), heads = _most(row), row["heads"][0]
    return row["batch"] * most_q * most_kv * heads * sum(row["head_dims"]) / 1e6  # type: ignore[no-any-return]


def _most(row: Row) -> tuple[int, int]:
    """The longest sequences; many are short, unless the row is of no covering array and says ``has_own_lengths``."""
    most_q, most_kv = row["lengths"]
    if row["batch"] > 3 and not row.get("has_own_lengths"):
        return min(most_q, 17), min(most_kv, 29)
    return most_q, most_kv


def plain_fields(row: Row, mask: str) -> dict[str, Any]:
    """Fields of a case that the rows of all spaces say alike; ``mask``: with or without padding."""
    left, right = row["window"]
    return {
        "qkv_format": row["qkv_format"],
        "dtype": row["dtype"],
        "num_heads": row["heads"][0],
        "num_kv_heads": row["heads"][1],
        "head_dim_qk": row["head_dims"][0],
        "head_dim_v": row["head_dims"][1],
        "attn_mask_type": mask,
        "window_size": (left, 0) if "causal" in mask and left >= 0 else (left, right),
    }


def case_of(name: str, row: Row) -> Case:
    """The case of a settled row."""
    is_packed, padded = row["qkv_format"] == "thd", row["padded"]
    shape = _lengths(row)
    mask = row["mask"]
    if padded != "no" or is_packed:
        mask = "padding" if mask == "no_mask" else f"padding_{mask}"
    return Case(
        name,
        **plain_fields(row, mask),
        **shape,
        bottom_right_diagonal=row["bottom_right"],
        bias_type=row["bias"] or "no_bias",
        bias_shape=row["bias_shape"],
        bias_requires_grad=row["bias"] is not None and row["bias_requires_grad"],
        mask_shape=row["bias_shape"] if row["bias_shape"] in ("b1ss", "11ss", "bhss") else "b1ss",
        softmax_scale=row["scale"],
        scores=row["scores"],
        storage_q=row["q"],
        storage_k=row["k"],
        storage_v=row["v"],
        dout_storage=row["dout"],
        dlse_storage=row["dlse"] or "contiguous",
        return_lse=row["dlse"] is not None,
        bias_storage=row["bias_storage"],
        offsets_storage=row["offsets"],
        max_seqlen=_said(row["max_seqlen"], is_packed),
        needs_gradient=row["needs"],
        deterministic=row["deterministic"],
    )


def _said(level: str, is_packed: bool) -> Literal["exact", "extent"]:
    """The plain level is what callers say: the longest packed sequence, the extent of padded rows."""
    return "exact" if (level == "exact") == is_packed else "extent"


def _lengths(row: Row) -> dict[str, Any]:
    """Lengths of the sequences and the rows that they take."""
    (most_q, most_kv), batch, padded = _most(row), row["batch"], row["padded"]
    if padded == "no":
        return {"seqlens_q": (most_q,) * batch, "seqlens_kv": (most_kv,) * batch}
    least = 0 if padded == "empty" else 1
    lengths_q = tuple(max(least, round(most_q * _PARTS_Q[b % 5])) for b in range(batch))
    lengths_kv = tuple(max(least, round(most_kv * _PARTS_KV[b % 5])) for b in range(batch))
    if padded == "self":
        lengths_kv = lengths_q
    elif most_q == most_kv and batch > 1:  # nothing but the lengths themselves tells the sides apart
        lengths_kv = (lengths_q[-1], *lengths_q[:-1])
    given: dict[str, Any] = {"seqlens_q": lengths_q, "seqlens_kv": lengths_kv}
    if row["qkv_format"] != "thd":
        rows_q, rows_kv = max(lengths_q) + 4, max(lengths_kv) + (4 if most_q == most_kv else 3)
        return given | {"rows_q": (rows_q,) * batch, "rows_kv": (rows_kv,) * batch}
    gaps = _GAPS[row["gaps"]]
    if row["gaps"] in ("between", "all", "lead"):
        given["rows_q"] = tuple(length + gaps.behind[b % 2] for b, length in enumerate(lengths_q))
        step = 0 if padded == "self" else 1
        given["rows_kv"] = tuple(length + gaps.behind[(b + step) % 2] for b, length in enumerate(lengths_kv))
    return given | {"lead": gaps.lead, "tail": gaps.tail}


def _aspects(row: Row) -> Mapping[str, Any]:
    """What faults need three of: the features, present or not."""
    group = row["heads"][0] // row["heads"][1]
    return {
        "qkv_format": row["qkv_format"],
        "mask": row["mask"],
        "dtype": row["dtype"],
        "padded": row["padded"] != "no",
        "gaps": row["gaps"] != "none",
        "window": row["window"] != (-1, -1),
        "gqa": group > 1,
        "dlse": row["dlse"] is not None,
        "bias": row["bias"] is not None,
        "scale": row["scale"] is not None,
    }


def _needing(name: str) -> Row:
    """Levels of other factors without which a level has no effect."""
    if name in ("gaps", "max_seqlen", "offsets"):
        return {"qkv_format": "thd", "padded": "unequal"}
    if name in ("bias_shape", "bias_requires_grad", "bias_storage"):
        return {"bias": "post_scale_bias"}
    return {"window": (5, 3)} if name == "bottom_right" else {}


SPACE = Space(
    name="pairs",
    factors=FACTORS,
    settle=settle,
    aspects=_aspects,
    case_of=case_of,
    needing=_needing,
    plain=("dtype", "head_dims", "qkv_format", "mask"),
    labels=lambda row: f"{row['qkv_format']}-{row['mask']}-{DTYPE_NAMES[row['dtype']]}",
)
"""All attention calls."""
