"""Milliseconds of one attention call by each backend, as ``benchmarks/prefill_backends.py`` measured them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Row(NamedTuple):
    """One call, bfloat16: every sequence of S queries and as many keys."""

    dims: tuple[int, int]
    heads: int
    kv_heads: int
    batch: int
    seqlen: int
    mask: str
    is_packed: bool
    forward: Mapping[str, float]
    backward: Mapping[str, float]


MEASURED: Mapping[tuple[int, int], tuple[Row, ...]] = {}
