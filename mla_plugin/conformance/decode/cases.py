"""The catalogue of decode cases: edges by hand, every pair of factors by ``factors``, real sizes for CUDA devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from mla_plugin.conformance.attention.case import DTYPE_NAMES
from mla_plugin.conformance.attention.cases import QUICK_COST
from mla_plugin.conformance.decode.case import DecodeCase
from mla_plugin.conformance.decode.factors import SPACE

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REAL: dict[str, dict[str, Any]] = {
    "deepseek_tp8": {"num_heads": 16},
    "deepseek_tp4": {"num_heads": 32},
    "deepseek": {"num_heads": 128},
    "minicpm3": {"num_heads": 40, "rank": 256, "rope": 32},
}


@functools.cache
def decode_cases(*, large: bool = False) -> tuple[DecodeCase, ...]:
    """The small cases of a backend that accepts everything, or the large ones."""
    return tuple(_large()) if large else (*_edges(), *_every_pair())


def decode_cases_for(accepts: Callable[[DecodeCase], bool], *, is_quick: bool = False) -> tuple[DecodeCase, ...]:
    """The small cases for a backend that accepts some calls: pairs are covered by those that it accepts.

    Args:
        accepts: whether it accepts a case.
        is_quick: every third pair, and the edges that cost little.
    """
    pairs = _every_pair()
    if not all(map(accepts, (*_edges(), *pairs))):
        pairs = SPACE.cases(accepts)
    if is_quick:
        return (*(case for case in _edges() if case.cost <= QUICK_COST), *pairs[::3])
    return (*_edges(), *pairs)


@functools.cache
def _every_pair() -> tuple[DecodeCase, ...]:
    return SPACE.cases()


@functools.cache
def _edges() -> tuple[DecodeCase, ...]:
    return tuple(
        replace(case, name=f"{case.name}-{DTYPE_NAMES[dtype]}", dtype=dtype)
        for index, case in enumerate(_small())
        for dtype in (DTYPES if index < 4 else (DTYPES[index % 3],))
    )


def _small() -> Iterator[DecodeCase]:
    host: dict[str, Any] = {"page_size": 64, "has_host_lengths": True}
    yield DecodeCase("paged", **host)
    yield DecodeCase("contiguous")
    yield DecodeCase("host_lengths-paged-queries_4-heads_40", seqlen_q=4, num_heads=40, **host)
    yield DecodeCase("paged-queries_2-512_64", rank=512, seqlen_q=2, **host)
    yield DecodeCase("full_cache-queries_4", seqlen_q=4, lengths=(67, 67), has_seqlens_kv=False)
    yield DecodeCase("pair_of_caches", is_packed=False, page_size=16, seqlen_q=2)
    yield DecodeCase("pair_of_contiguous_caches", is_packed=False)
    yield DecodeCase("ranks_128_0", rank=128, rope=0, page_size=16)
    for page_size in (None, 64):
        place = "contiguous" if page_size is None else "paged"
        leftpads: dict[str, Any] = {"leftpads": (5, 1, 0, 130), "page_size": page_size}
        yield DecodeCase(f"leftpad-{place}-queries_3", seqlen_q=3, **leftpads)
    yield DecodeCase("keys_2050", lengths=(2050,), rank=72, rope=8, page_size=64)
    yield DecodeCase("batch_17", lengths=tuple(range(3, 20)), rank=72, rope=8, page_size=16)
    yield DecodeCase("keys_2050-queries_3", lengths=(2050,), seqlen_q=3, rank=72, rope=8, page_size=64)
    yield DecodeCase("heads_17", num_heads=17, page_size=16)
    yield DecodeCase("heads_11-queries_3", num_heads=11, seqlen_q=3, page_size=16)
    for page_size in (64, None):
        place = "contiguous" if page_size is None else "paged"
        yield DecodeCase(f"softmax_scale_1-{place}", softmax_scale=1.0, rank=128, page_size=page_size)
    narrow: dict[str, Any] = {"rank": 72, "rope": 8}
    for page_size in (None, 256, 128, 32):
        place = "contiguous" if page_size is None else f"page_{page_size}"
        yield DecodeCase(f"whole_tiles-{place}", lengths=(64, 128, 256, 512), page_size=page_size, **narrow)
    yield DecodeCase("heads_64", num_heads=64, page_size=16, **narrow)
    yield DecodeCase("heads_200", num_heads=200, page_size=16, lengths=(9, 0, 40), **narrow)
    yield DecodeCase("queries_20", seqlen_q=20, page_size=16, lengths=(30, 7, 0), **narrow)
    yield DecodeCase("batch_70", lengths=tuple(range(70)), page_size=16, num_heads=2, **narrow)
    yield DecodeCase("keys_8200", lengths=(8200,), num_heads=40, page_size=64, **narrow)


def _large() -> Iterator[DecodeCase]:
    for name, sizes in REAL.items():
        for page_size in (None, 64):
            for seqlen_q in (1, 2):
                yield DecodeCase(
                    f"{name}-{'contiguous' if page_size is None else 'paged'}-queries_{seqlen_q}",
                    dtype=torch.bfloat16,
                    lengths=(2100, 1, 1333),
                    seqlen_q=seqlen_q,
                    page_size=page_size,
                    has_host_lengths=True,
                    is_large=True,
                    **({"rank": 512, "rope": 64} | sizes),
                )
