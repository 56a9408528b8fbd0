"""Every way, layout and mask over 2, 3 and 4 ranks, forward and backward, against one process in float64."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests.context_parallel.case import Case, run

F32 = torch.float32
WAYS = ("p2p", "all_gather", "a2a")
KINDS = {"heads": 12, "kv_heads": 12}
"""A number of heads that every size divides."""


def dense() -> list[Case]:
    """Each way, size and mask with a layout and a size of batch in turn, so that every pair comes up."""
    layouts = itertools.cycle(("bshd", "sbhd", "bhsd"))
    found = []
    for way, size, mask in itertools.product(WAYS, (2, 3, 4), ("causal", "no_mask", "padding_causal", "padding")):
        case = Case(way, size, next(layouts), mask, **KINDS, with_dlse=mask != "padding")
        if "padding" in mask:
            case = replace(case, lengths_q=(24, 7, 0, 1), slots_q=(24,) * 4)
        found.append(case)
    return found


LENGTHS = (7, 1, 23, 0, 17, 24)
SLOTS = (24, 24, 24, 24, 24, 48)


def packed() -> list[Case]:
    found = []
    for way, size, mask in itertools.product(WAYS, (2, 3, 4), ("padding_causal", "padding")):
        padded = Case(way, size, "thd", mask, LENGTHS, slots_q=SLOTS, **KINDS, with_dlse=size == 3, tail=2 * size)
        whole = Case(way, size, "thd", mask, (24, 48, 0, 24), **KINDS, with_dlse=size == 2)
        cross = Case(way, size, "thd", "padding", (7, 0, 24, 3), (5, 24, 0, 1), (24,) * 4, (24, 24, 48, 24), **KINDS)
        found += [padded, whole] + ([cross] if mask == "padding" else [])
    return found


GROUPED = [
    Case(way, size, layout, heads=64, kv_heads=4, head_dim_qk=192, head_dim_v=128, lengths_q=(2 * size,) * 1)
    for way, size, layout in itertools.product(WAYS, (2, 4), ("bshd", "bhsd"))
]
CROSS = [
    Case(way, size, layout, "no_mask", lengths_q=(8, 8), lengths_kv=(24, 24), kv_heads=2)
    for way, size, layout in itertools.product(WAYS, (2,), ("bshd", "sbhd"))
]
WINDOWS = [
    Case("all_gather", 2, "bshd", "causal", window=(5, 0)),
    Case("all_gather", 3, "sbhd", "causal", window=(3, 0), with_dlse=True),
    Case("all_gather", 4, "bhsd", "causal_bottom_right", lengths_kv=(48, 48), window=(9, 0)),
    Case("all_gather", 2, "bshd", "causal_bottom_right", lengths_kv=(48, 48)),
    Case("all_gather", 2, "bshd", "causal_bottom_right", lengths_kv=(8, 8)),
    Case("all_gather", 3, "thd", "padding_causal", LENGTHS, slots_q=SLOTS, window=(4, 0)),
    Case(
        "all_gather",
        2,
        "thd",
        "padding_causal_bottom_right",
        (7, 0, 24, 3),
        (5, 24, 30, 9),
        (24,) * 4,
        (24, 24, 48, 24),
    ),
    Case("all_gather", 2, "bshd", "padding_causal_bottom_right", (7, 0, 24, 3), (5, 24, 1, 9), (24,) * 4, (24,) * 4),
    Case("a2a", 2, "bshd", "causal", window=(5, 0)),
    Case("a2a", 2, "bshd", "no_mask", window=(5, 3)),
    Case("a2a", 4, "thd", "padding", LENGTHS, slots_q=SLOTS, window=(5, 3)),
    Case("a2a", 2, "sbhd", "causal_bottom_right", lengths_kv=(48, 48)),
    Case("a2a", 2, "sbhd", "causal", lengths_kv=(48, 48)),
    Case("a2a", 2, "thd", "padding_causal", (7, 0, 24, 3), (5, 24, 0, 9), (24,) * 4, (24, 24, 48, 24)),
]
MANNERS = [
    *(
        Case(way, 3, layout, "causal", has_strides=True, dtype=F32, **KINDS)
        for way in WAYS
        for layout in ("bshd", "sbhd", "bhsd")
    ),
    *(Case(way, 2, "thd", "padding_causal", LENGTHS, slots_q=SLOTS, has_strides=True, dtype=F32) for way in WAYS),
    *(Case(way, 2, needs=needs) for way, needs in zip(WAYS * 2, ("q", "k", "v", "kv", "qv", "k"), strict=True)),
    *(Case(way, 2, dtype=F32, with_dlse=True, heads=8, kv_heads=2) for way in WAYS),
]


def triton() -> list[Case]:
    """Our kernels, in Triton's interpreter: sections by starts apart from lengths, padding that is not finite."""
    few = {"heads": 2, "kv_heads": 2, "dtype": F32, "backend": "triton"}
    slots = {"lengths_q": (5, 0, 1, 8), "slots_q": (8, 8, 8, 16)}
    return [
        *(Case(way, 2, "thd", "padding_causal", **slots, **few) for way in ("p2p", "all_gather")),
        Case("p2p", 2, "bshd", "padding_causal", (5, 0, 8), slots_q=(8,) * 3, **few, with_dlse=True),
    ]


@pytest.mark.parametrize("case", triton(), ids=str)
def test_our_kernels(pool, case):
    pool.run(run, case=case)


@pytest.mark.parametrize("case", [*dense(), *packed(), *GROUPED, *CROSS, *WINDOWS, *MANNERS], ids=str)
def test_a_way(pool, case):
    pool.run(run, case=case)
