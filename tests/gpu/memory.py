"""Tests that need much of the device's memory run one after the other, and not at all where it is not free."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import pytest
import torch

GROUP = "large memory"
IN_THE_SUITE = "test_more_than_two_billion_elements"
"""The conformance suite's, which looks for the memory itself; the wheel knows no mark of these tests."""


def group(items: Iterable[pytest.Item]) -> None:
    """One process runs them under ``pytest -n --dist loadgroup``: two at once may not fit."""
    for item in items:
        if item.get_closest_marker("large_memory") or getattr(item, "originalname", None) == IN_THE_SUITE:
            item.add_marker(pytest.mark.xdist_group(GROUP))


def skip_where_too_small(item: pytest.Item) -> None:
    """Before a test: the mark says how many GiB it needs."""
    mark = item.get_closest_marker("large_memory")
    if mark is None:
        return
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] >> 30
    if free < mark.args[0]:
        pytest.skip(f"not run: {free} GiB of the device's memory are free, {mark.args[0]} are needed")


def give_back(item: pytest.Item) -> None:
    """After a test: what PyTorch's allocator keeps is missing in the other processes."""
    if item.get_closest_marker("xdist_group") and torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
