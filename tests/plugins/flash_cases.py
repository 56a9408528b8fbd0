"""Packed batches of every kind for the FlashAttention backends, in addition to the suite's cases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mla_plugin.conformance import Case
from mla_plugin.conformance.attention.case import DTYPE_NAMES

SELF = (131, 64, 1, 97)
BATCHES: dict[str, dict[str, Any]] = {
    "equal": {"seqlens_q": SELF, "seqlens_kv": SELF},
    "unequal": {"seqlens_q": SELF, "seqlens_kv": (64, 131, 17, 200)},
    "empty_self": {"seqlens_q": (0, 64, 0, 97, 0), "seqlens_kv": (0, 64, 0, 97, 0)},
    "empty": {"seqlens_q": (7, 0, 64, 5), "seqlens_kv": (0, 31, 64, 9)},
    "padded_ends": {
        "seqlens_q": SELF,
        "seqlens_kv": SELF,
        "rows_q": (192, 128, 64, 128),
        "rows_kv": (192, 128, 64, 128),
    },
    "padded_last": {
        "seqlens_q": SELF,
        "seqlens_kv": SELF,
        "rows_q": (*SELF[:3], 128),
        "rows_kv": (*SELF[:3], 128),
    },
    "padded_unequal": {
        "seqlens_q": (5, 0, 64),
        "seqlens_kv": (131, 7, 0),
        "rows_q": (8, 3, 64),
        "rows_kv": (160, 7, 16),
        "tail": 11,
    },
}


def packed_cases(heads: tuple[int, int], dtypes: tuple[torch.dtype, ...]) -> Iterator[Case]:
    """192/128 with grouped heads; MiMo-V2-Flash has 64 query heads over 4 (of 8 in its windows)."""
    for dtype in dtypes:
        for name, batch in BATCHES.items():
            is_self = batch["seqlens_q"] == batch["seqlens_kv"]
            for mask in ("padding", "padding_causal", "padding_causal_bottom_right"):
                if mask == "padding_causal" and not is_self:
                    continue
                yield Case(
                    f"{name}-{mask}-{heads[0]}_{heads[1]}-{DTYPE_NAMES[dtype]}",
                    "thd",
                    dtype,
                    **batch,
                    num_heads=heads[0],
                    num_kv_heads=heads[1],
                    attn_mask_type=mask,
                )
