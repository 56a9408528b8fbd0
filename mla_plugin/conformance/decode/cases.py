"""The catalogue of decode cases: small ones for every device, and large ones with real sizes for CUDA devices."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from mla_plugin.conformance.attention.case import DTYPE_NAMES
from mla_plugin.conformance.decode.case import DecodeCase

RANKS = ((512, 64), (256, 32), (128, 64), (512, 0), (128, 0))
PAGE_SIZES = (1, 3, 16, 64, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REAL: dict[str, dict[str, Any]] = {
    "deepseek_tp8": {"num_heads": 16},
    "deepseek_tp4": {"num_heads": 32},
    "deepseek": {"num_heads": 128},
    "minicpm3": {"num_heads": 40, "rank": 256, "rope": 32},
}


@functools.cache
def decode_cases(*, large: bool = False) -> tuple[DecodeCase, ...]:
    """The small cases, or the large ones."""
    if large:
        return tuple(_large())
    return tuple(
        replace(case, name=f"{case.name}-{DTYPE_NAMES[dtype]}", dtype=dtype) for case in _small() for dtype in DTYPES
    )


def _small() -> Iterator[DecodeCase]:
    for rank, rope in RANKS:
        for page_size in (None, 64):
            place = "contiguous" if page_size is None else "paged"
            yield DecodeCase(f"ranks_{rank}_{rope}-{place}", rank=rank, rope=rope, page_size=page_size)
    for page_size in PAGE_SIZES:
        for seqlen_q in (1, 2, 3, 4):
            name = f"page_{page_size}-queries_{seqlen_q}"
            yield DecodeCase(name, page_size=page_size, seqlen_q=seqlen_q, has_host_lengths=True)
    for seqlen_q in (1, 2, 4):
        yield DecodeCase(f"contiguous-queries_{seqlen_q}", seqlen_q=seqlen_q)
        yield DecodeCase(f"full_cache-queries_{seqlen_q}", seqlen_q=seqlen_q, lengths=(67, 67), has_seqlens_kv=False)
    yield DecodeCase("all_keys", seqlen_q=3, causal=False, page_size=16)
    yield DecodeCase("pair_of_caches", is_packed=False, page_size=16, seqlen_q=2)
    yield DecodeCase("pair_of_contiguous_caches", is_packed=False)
    yield DecodeCase("without_lse", return_lse=False, page_size=16)
    for page_size in (None, 64):
        place = "contiguous" if page_size is None else "paged"
        host: dict[str, Any] = {"page_size": page_size, "has_host_lengths": True}
        yield DecodeCase(f"host_lengths-{place}", **host)
        yield DecodeCase(f"host_lengths-{place}-queries_3-heads_4", seqlen_q=3, num_heads=4, **host)
        yield DecodeCase(f"host_lengths-{place}-queries_4-heads_40", seqlen_q=4, num_heads=40, **host)
        yield DecodeCase(f"host_lengths-{place}-512_64", rank=512, return_lse=False, **host)
        leftpads: dict[str, Any] = {"leftpads": (5, 1, 0, 130), "page_size": page_size}
        yield DecodeCase(f"leftpad-{place}", **leftpads)
        yield DecodeCase(f"leftpad-{place}-queries_3", seqlen_q=3, **leftpads)


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
