"""More hand-written decode cases: borders of splits, of left padding and of widths, runs of empty sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from mla_plugin.conformance.attention.case import DTYPE_NAMES
from mla_plugin.conformance.decode.case import DecodeCase

_DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def borders() -> Iterator[DecodeCase]:
    """All of them, with their dtypes in their names."""
    families = (_splits, _runs_of_empty_sequences, _widths, _many_programs, _skewed, _no_sequences, _gapped_rows)
    for index, case in enumerate(case for family in families for case in family()):
        dtype = _DTYPES[index % 3]
        yield replace(case, name=f"{case.name}-{DTYPE_NAMES[dtype]}", dtype=dtype)


def _splits() -> Iterator[DecodeCase]:
    """Lengths around multiples of what splits hold, counted from the first key and from the first that is seen."""
    for page_size in (None, 64):
        place: dict[str, Any] = {"page_size": page_size, "num_heads": 2, "rank": 72, "rope": 8}
        name = "contiguous" if page_size is None else "paged"
        yield DecodeCase(f"multiples-{name}", lengths=(1025, 512, 257, 127), **place)
        pads = (512, 64, 0, 256, 64)
        yield DecodeCase(f"multiples-leftpad-{name}", lengths=(1025, 577, 511, 257, 129), leftpads=pads, **place)
        yield DecodeCase(f"multiples-queries_3-{name}", lengths=(1026, 514, 258), seqlen_q=3, **place)


def _runs_of_empty_sequences() -> Iterator[DecodeCase]:
    """Empty sequences one after another, at the beginning and at the end too."""
    lengths: dict[str, Any] = {"lengths": (0, 0, 9, 0, 0, 0, 67, 300, 0, 0), "rank": 72, "rope": 8}
    yield DecodeCase("empty_runs-contiguous", **lengths)
    yield DecodeCase("empty_runs-paged", page_size=16, has_host_lengths=True, **lengths)
    yield DecodeCase("empty_runs-queries_3", page_size=64, seqlen_q=3, **lengths)


def _widths() -> Iterator[DecodeCase]:
    """Widths of the latents and of rope that no tile of 16, 32 or 64 columns ends with, above one of them."""
    for page_size, (rank, rope) in zip((None, 64, 16, None), ((136, 40), (200, 72), (72, 24), (520, 88)), strict=True):
        yield DecodeCase(f"ranks_{rank}_{rope}", rank=rank, rope=rope, page_size=page_size, seqlen_q=2)


def _many_programs() -> Iterator[DecodeCase]:
    """Sequences times heads by the thousand, and one query for all heads."""
    yield DecodeCase("batch_48-heads_128", lengths=(3, 40, 0, 9) * 12, num_heads=128, rank=40, rope=8, page_size=16)
    expanded: dict[str, Any] = {"query_storage": "expanded_heads", "seqlen_q": 2, "rank": 72, "rope": 8}
    yield DecodeCase("expanded_heads_of_queries", page_size=16, **expanded)


def _skewed() -> Iterator[DecodeCase]:
    """One sequence far longer than the mean that a split may be chosen by."""
    lengths: dict[str, Any] = {"lengths": (*((2,) * 20), 700, *((3,) * 20)), "has_host_lengths": True}
    lengths |= {"seqlen_q": 2, "rank": 72, "rope": 8}
    yield DecodeCase("skewed-paged", page_size=16, **lengths)
    yield DecodeCase("skewed-contiguous", **lengths)
    yield DecodeCase("skewed-heads_40", page_size=64, num_heads=40, **lengths)


def _no_sequences() -> Iterator[DecodeCase]:
    """A batch of no sequence, as the last part of a batch that was divided may be."""
    for page_size in (16, None):
        name = "contiguous" if page_size is None else "paged"
        yield DecodeCase(f"no_sequences-{name}", lengths=(), rank=72, rope=8, page_size=page_size)


def _gapped_rows() -> Iterator[DecodeCase]:
    """c_kv and k_rope with equal strides in one storage, k_rope behind, and yet not adjacent."""
    rows: dict[str, Any] = {"cache_storage": "gapped_rows", "is_packed": False}
    for page_size, (rank, rope) in ((None, (72, 8)), (16, (72, 8)), (64, (512, 64)), (None, (512, 64))):
        name = "contiguous" if page_size is None else "paged"
        yield DecodeCase(f"gapped_rows-{name}-{rank}_{rope}", rank=rank, rope=rope, page_size=page_size, **rows)
