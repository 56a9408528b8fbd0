"""The page of limits names every kind of call for which our kernels are slower, as the H200's results say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.repository.project import ROOT

RESULTS = ("prefill_backends_NVIDIA_H200.json", "prefill_backends_between_NVIDIA_H200.json")
ROWS: list[dict[str, Any]] = [
    row for name in RESULTS for row in json.loads((ROOT / "benchmarks/results" / name).read_text())["rows"]
]
NAMED = {
    "short sequences": (lambda row: row["seqlen"] <= 1200 and row["dims"][1] >= 128, (0.8, 0.6)),
    "sliding windows": (lambda row: isinstance(row["mask"], int), (0.85, 0.75)),
    "128/128": (lambda row: row["dims"] == [128, 128], (0.9, 0.65)),
    "64/64": (lambda row: row["dims"] == [64, 64], (0.8, 0.6)),
    "96/64": (lambda row: row["dims"] == [96, 64], (0.9, 0.8)),
    "192/192": (lambda row: row["dims"] in ([192, 192], [160, 128], [96, 96], [80, 80]), (0.55, 0.4)),
}
"""What the page calls a kind of calls, which calls it has, and the least share of the best library's speed."""
NOTICEABLE = (0.9, 0.9)
"""Shares of all other calls, forward and backward."""


def share(row: dict[str, Any], direction: str) -> float | None:
    times = row[direction]
    return min(times.values()) / times["triton"] if "triton" in times else None


@pytest.mark.parametrize("index", range(len(ROWS)))
def test_a_slower_call_is_named(index: int) -> None:
    row = ROWS[index]
    limits = [NOTICEABLE, *(least for holds, least in NAMED.values() if holds(row))]
    for number, direction in enumerate(("forward", "backward")):
        found = share(row, direction)
        least = min(limit[number] for limit in limits)
        assert found is None or found >= least - 0.01, (
            row["dims"],
            row["heads"],
            row["seqlen"],
            row["mask"],
            direction,
        )


@pytest.mark.parametrize("words", NAMED)
def test_the_page_has_the_words(words: str) -> None:
    assert words in (ROOT / "docs/limits.md").read_text()
