"""More hand-written decode cases: sizes beyond those of the other edges, over plain caches and over quantised ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from mla_plugin.arguments.cache_format import FP8, FP8_DS_MLA, RANK, ROPE
from mla_plugin.conformance.attention.case import DTYPE_NAMES
from mla_plugin.conformance.decode.case import DecodeCase

_NARROW: dict[str, Any] = {"rank": 72, "rope": 8}
_LATENTS: dict[str, Any] = {"dtype": torch.bfloat16, "rank": RANK, "rope": ROPE, "page_size": 64}


def wider() -> Iterator[DecodeCase]:
    """Those over plain caches, with their dtypes in their names."""
    dtypes = (torch.float16, torch.float32, torch.bfloat16)
    for index, case in enumerate(_sizes()):
        dtype = dtypes[index % 3]
        yield replace(case, name=f"{case.name}-{DTYPE_NAMES[dtype]}", dtype=dtype)
    yield DecodeCase("heads_128-latents-bf16", lengths=(67, 1), num_heads=128, **_LATENTS)
    yield DecodeCase("keys_3000-latents-bf16", lengths=(3000, 5), num_heads=1, **_LATENTS)


def _sizes() -> Iterator[DecodeCase]:
    """Numbers of heads, queries, sequences, pages and keys; the more of one, the fewer of the others."""
    for heads in (8, 12, 32, 96):
        yield DecodeCase(f"heads_{heads}", num_heads=heads, **_NARROW)
    for seqlen_q in (7, 16):
        yield DecodeCase(f"queries_{seqlen_q}", seqlen_q=seqlen_q, page_size=16, **_NARROW)
    yield DecodeCase("batch_32", lengths=(3, 40, 0, 9) * 8, page_size=16, num_heads=1, **_NARROW)
    many: dict[str, Any] = {"lengths": (300, 1, 70, 0) * 16, "has_host_lengths": True, "num_heads": 1}
    yield DecodeCase("batch_64-keys_300", page_size=16, rank=24, rope=8, **many)
    yield DecodeCase("keys_1500-queries_9", lengths=(1500, 40), seqlen_q=9, num_heads=1, page_size=64, **_NARROW)
    longest: dict[str, Any] = {"lengths": (20_000,), "page_size": 64, "rank": 8, "rope": 8}
    yield DecodeCase("keys_20000-heads_16", num_heads=16, **longest)
    yield DecodeCase("keys_20000-queries_3", num_heads=1, seqlen_q=3, **longest)
    pads: dict[str, Any] = {"lengths": (5, 40), "leftpads": (2, 3), "page_size": 16}
    yield DecodeCase("leftpad-fewer_keys_than_queries", seqlen_q=9, **pads, **_NARROW)
    pads = {"lengths": (700, 3), "leftpads": (150, 1), "page_size": 64}
    yield DecodeCase("leftpad-keys_700-heads_17", num_heads=17, **pads, **_NARROW)
    for page_size in (4, 7, 512):
        yield DecodeCase(f"pages_of_{page_size}", page_size=page_size, lengths=(67, 1, 0, 530), **_NARROW)
    yield DecodeCase("ranks_384_64", rank=384, page_size=16)
    yield DecodeCase("ranks_512_32", rank=512, rope=32, page_size=64)


def quantised() -> Iterator[DecodeCase]:
    """Those over quantised caches."""
    fp8: dict[str, Any] = {"kv_cache_format": FP8, "rank": 64, "rope": 16, "num_heads": 2}
    ds_mla: dict[str, Any] = _LATENTS | {"kv_cache_format": FP8_DS_MLA, "num_heads": 1}
    for name, given in (("fp8", fp8), ("fp8_ds_mla", ds_mla)):
        paged: dict[str, Any] = given | {"page_size": 64}
        yield DecodeCase(f"{name}-keys_1500", **(paged | {"lengths": (1500, 3)}))
        yield DecodeCase(f"{name}-heads_128", **(paged | {"lengths": (9, 40), "num_heads": 128}))
        yield DecodeCase(f"{name}-queries_3", **(paged | {"lengths": (9, 40), "seqlen_q": 3}))
        for storage in ("sliced_batch", "sliced_dims"):
            placed: dict[str, Any] = {"cache_storage": storage, "table_storage": "sliced_dims", "page_size": 16}
            yield DecodeCase(f"{name}-{storage}", **(paged | placed))
    yield DecodeCase("fp8-batch_40", dtype=torch.float16, lengths=(9, 0, 3, 17) * 10, page_size=16, **fp8)
    yield DecodeCase("fp8-pages_of_256", dtype=torch.bfloat16, lengths=(300, 9), page_size=256, **fp8)
    order: dict[str, Any] = {"page_order": "ascending", "page_size": 16, "numbers": "large"}
    yield DecodeCase("fp8-pages_in_order-large_scale", dtype=torch.bfloat16, **order, **fp8)
    yield DecodeCase("fp8-contiguous-large_scale", seqlen_q=9, numbers="large", **fp8)
    yield DecodeCase("fp8-leftpad-keys_700", lengths=(700, 9), leftpads=(150, 0), page_size=64, **fp8)
    yield DecodeCase(
        "fp8_ds_mla-queries_9", **(ds_mla | {"lengths": (40, 5), "seqlen_q": 9, "page_order": "ascending"})
    )
