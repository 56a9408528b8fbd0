"""Latent attention over 2, 3 and 4 ranks, forward and backward, against one process in float64."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests.context_parallel.latent_case import LatentCase, run

F32 = torch.float32
WAYS = ("all_gather", "a2a")
LENGTHS, SLOTS = (7, 1, 23, 0, 17, 24), (24, 24, 24, 24, 24, 48)


def dense() -> list[LatentCase]:
    layouts = itertools.cycle(("bshd", "sbhd", "bhsd"))
    found = []
    for way, mask, size in itertools.product(WAYS, ("causal", "no_mask", "padding_causal", "padding"), (2, 3, 4)):
        case = LatentCase(way, size, next(layouts), mask, with_dlse=mask != "padding", at_once=1 + size % 3)
        if "padding" in mask:
            case = replace(case, lengths_q=(24, 7, 0, 1), slots_q=(24,) * 4)
        found.append(case)
    return found


def packed() -> list[LatentCase]:
    found = []
    for way, size, mask in itertools.product(WAYS, (2, 3, 4), ("padding_causal", "padding")):
        padded = LatentCase(way, size, "thd", mask, LENGTHS, slots_q=SLOTS, with_dlse=size == 3, tail=2 * size)
        found.append(padded)
        if mask == "padding":
            found.append(LatentCase(way, size, "thd", mask, (7, 0, 24, 3), (5, 24, 0, 1), (24,) * 4, (24, 24, 48, 24)))
        else:
            found.append(LatentCase(way, size, "thd", mask, (24, 48, 0, 24), with_dlse=size == 2))
    return found


OTHERS = [
    LatentCase("all_gather", 2, "bshd", "causal", window=(5, 0)),
    LatentCase("all_gather", 3, "sbhd", "causal", window=(3, 0), with_dlse=True),
    LatentCase("all_gather", 4, "bhsd", "causal_bottom_right", lengths_kv=(48, 48), window=(9, 0)),
    LatentCase("all_gather", 4, "bshd", "causal_bottom_right", lengths_kv=(48, 48)),
    LatentCase("all_gather", 2, "bshd", "causal_bottom_right", lengths_kv=(8, 8)),
    LatentCase("a2a", 2, "sbhd", "no_mask", window=(3, 2)),
    LatentCase("a2a", 3, "bshd", "causal", lengths_kv=(12, 12)),
    *(LatentCase(way, 2, "bshd", "no_mask", lengths_q=(8, 8), lengths_kv=(24, 24)) for way in WAYS),
    *(LatentCase(way, size, heads=8, at_once=8, dtype=F32) for way in WAYS for size in (2, 4)),
    LatentCase("all_gather", 4, heads=5, at_once=3),
    *(LatentCase(way, 3, needs=needs) for way in WAYS for needs in (("q",), ("c_kv",), ("k_rope", "weight"))),
]


@pytest.mark.parametrize("case", [*dense(), *packed(), *OTHERS], ids=str)
def test_latent(pool, case):
    pool.run(run, case=case)
