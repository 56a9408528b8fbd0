"""The catalogue of decode cases: edges by hand, pairs by ``factors``, ``sizes`` and ``extremes``, real sizes for
CUDA devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from mla_plugin.arguments.cache_format import PLAIN
from mla_plugin.conformance.attention.case import DTYPE_NAMES
from mla_plugin.conformance.decode import extremes, sizes
from mla_plugin.conformance.decode.borders import borders
from mla_plugin.conformance.decode.case import DecodeCase
from mla_plugin.conformance.decode.factors import SPACE
from mla_plugin.conformance.decode.wider import quantised, wider
from mla_plugin.conformance.selection import Catalogue

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REAL: dict[str, dict[str, Any]] = {
    "deepseek_tp8": {"num_heads": 16},
    "deepseek_tp4": {"num_heads": 32},
    "deepseek": {"num_heads": 128},
    "minicpm3": {"num_heads": 40, "rank": 256, "rope": 32},
}


@functools.cache
def decode_cases(*, large: bool = False) -> tuple[DecodeCase, ...]:
    """The small cases of a backend that accepts every call over plain caches, or the large ones."""
    return tuple(_large()) if large else whole_decode_catalogue().all()


def decode_catalogue_for(accepts: Callable[[DecodeCase], bool]) -> Catalogue[DecodeCase]:
    """The small cases for a backend that accepts some calls: pairs are covered by those that it accepts."""
    pairs, of_sizes, of_extremes = _every_pair(), _every_size(), _every_extreme()
    if not all(map(accepts, of_sizes)):
        of_sizes = sizes.SPACE.cases(accepts)
    if not all(map(accepts, (*_edges(), *pairs, *of_extremes))):
        pairs, of_extremes = SPACE.cases(accepts), extremes.SPACE.cases(accepts)
    return Catalogue(_edges(), pairs, of_sizes, of_extremes)


def whole_decode_catalogue() -> Catalogue[DecodeCase]:
    """The small cases for a backend that accepts every call over plain caches."""
    return Catalogue(_edges(), _every_pair(), _every_plain_size(), _every_extreme())


@functools.cache
def _every_pair() -> tuple[DecodeCase, ...]:
    return SPACE.cases()


@functools.cache
def _every_size() -> tuple[DecodeCase, ...]:
    return sizes.SPACE.cases(lambda _: True)


@functools.cache
def _every_plain_size() -> tuple[DecodeCase, ...]:
    return sizes.SPACE.cases(lambda case: case.kv_cache_format == PLAIN)


@functools.cache
def _every_extreme() -> tuple[DecodeCase, ...]:
    return extremes.SPACE.cases()


@functools.cache
def _edges() -> tuple[DecodeCase, ...]:
    small = tuple(
        replace(case, name=f"{case.name}-{DTYPE_NAMES[dtype]}", dtype=dtype)
        for index, case in enumerate(_small())
        for dtype in (DTYPES if index < 4 else (DTYPES[index % 3],))
    )
    return (*small, *_beyond_float16(), *borders(), *wider())


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
    yield from _long()
    yield from _rare_memory()
    yield DecodeCase("queries_70", seqlen_q=70, page_size=16, lengths=(90, 33, 0), **narrow)
    yield DecodeCase("ranks_640_128", rank=640, rope=128, page_size=64, seqlen_q=2)
    yield DecodeCase("ranks_13_7", rank=13, rope=7, seqlen_q=2, causal=False)
    yield DecodeCase("ranks_13_7-pages_of_5", rank=13, rope=7, page_size=5, is_packed=False)
    yield DecodeCase("batch_140", lengths=(3, 0, 9, 1, 17) * 28, page_size=8, num_heads=1, **narrow)
    yield DecodeCase("pages_of_1000", lengths=(64, 1000, 1001, 5), page_size=1000, **narrow)


def _beyond_float16() -> Iterator[DecodeCase]:
    """Products of a query and a key that float16 cannot hold, though it can hold the scores."""
    beyond: dict[str, Any] = {"dtype": torch.float16, "scores": "overflow", "lengths": (40, 67), "rank": 72, "rope": 8}
    scale = 1.7 / (64.0 * 64.0 * 80.0**0.5)
    yield DecodeCase("products_beyond_float16-contiguous", causal=False, softmax_scale=scale, **beyond)
    yield DecodeCase("products_beyond_float16-paged", softmax_scale=scale, page_size=64, seqlen_q=2, **beyond)


def _long() -> Iterator[DecodeCase]:
    """More keys than one part of a split holds, with everything else that a split has to know."""
    long: dict[str, Any] = {"lengths": (1500, 3, 4200), "rank": 72, "rope": 8}
    yield DecodeCase("long-contiguous-queries_3", seqlen_q=3, **long)
    yield DecodeCase("long-paged-all_keys", seqlen_q=2, causal=False, page_size=16, num_heads=20, **long)
    yield DecodeCase("long-leftpad", leftpads=(1200, 0, 70), page_size=64, has_host_lengths=True, **long)
    yield DecodeCase("long-leftpad-queries_2", leftpads=(7, 3, 4190), seqlen_q=2, has_host_lengths=True, **long)
    yield DecodeCase("long-heads_70", num_heads=70, page_size=64, scores="large", **long)
    yield DecodeCase("long-full_cache", **(long | {"lengths": (1500, 1500)}), has_seqlens_kv=False, num_heads=17)
    for page_size in (64, None):
        place = "contiguous" if page_size is None else "paged"
        wide: dict[str, Any] = {"lengths": (1500, 2, 1100), "rank": 512, "page_size": page_size, "num_heads": 2}
        yield DecodeCase(f"long-512_64-{place}", seqlen_q=2, is_packed=page_size is None, **wide)


def _rare_memory() -> Iterator[DecodeCase]:
    """Pages one after another, pages beyond 16 bits, lengths off 16 bytes, q_nope_abs and q_rope apart."""
    small: dict[str, Any] = {"rank": 72, "rope": 8}
    order: dict[str, Any] = {"page_order": "ascending", "lengths": (67, 40, 0, 130)}
    yield DecodeCase("pages_in_order", page_size=16, **order, **small)
    sliced: dict[str, Any] = {"cache_storage": "sliced_batch", "seqlen_q": 3}
    yield DecodeCase("pages_in_order-queries_3", page_size=8, **sliced, **order, **small)
    yield DecodeCase("pages_in_order-leftpad", page_size=16, leftpads=(5, 33, 0, 70), **order, **small)
    yield DecodeCase("pages_in_order-shared", page_size=16, shares_pages=True, has_host_lengths=True, **order, **small)
    descending: dict[str, Any] = order | small | {"page_order": "descending"}
    yield DecodeCase("pages_in_descending_order", page_size=16, **descending)
    yield DecodeCase(
        "pages_in_descending_order-queries_2", page_size=64, seqlen_q=2, leftpads=(9, 0, 0, 70), **descending
    )
    one_row: dict[str, Any] = {"table_storage": "expanded_batch", "page_size": 16, "spare_columns": 0}
    yield DecodeCase("one_row_of_pages", seqlen_q=2, **one_row, **small)
    yield DecodeCase("wide_page_table", page_size=2, spare_columns=700, has_host_lengths=True, **small)
    yield DecodeCase("page_numbers_beyond_16_bits", page_size=1, lengths=(7, 0, 3), spare_pages=2 * 70_000, **small)
    unaligned: dict[str, Any] = {"lengths_storage": "offset", "table_storage": "offset", "page_size": 16}
    yield DecodeCase("unaligned_lengths", leftpads=(5, 1, 0, 130), **unaligned, **small)
    unlike: dict[str, Any] = {"is_packed": False, "query_storage": "transposed", "rope_storage": "contiguous"}
    yield DecodeCase("head_major_q_nope_abs", seqlen_q=3, page_size=64, **unlike)
    yield DecodeCase("head_major_q_nope_abs-batch", seqlen_q=2, num_heads=17, causal=False, **unlike)
    unlike = {"is_packed": False, "query_storage": "contiguous", "rope_storage": "sliced_heads"}
    yield DecodeCase("sliced_q_rope", seqlen_q=2, num_heads=16, page_size=16, **unlike)


@functools.cache
def quantised_cases() -> tuple[DecodeCase, ...]:
    """Calls over quantised caches, for backends that read them."""
    return (*_quantised(), *quantised())


def _quantised() -> Iterator[DecodeCase]:
    fp8: dict[str, Any] = {"kv_cache_format": "fp8"}
    yield DecodeCase("fp8-paged-bf16", dtype=torch.bfloat16, rank=512, page_size=64, has_host_lengths=True, **fp8)
    yield DecodeCase("fp8-paged-fp16-queries_3", dtype=torch.float16, seqlen_q=3, page_size=16, num_heads=17, **fp8)
    yield DecodeCase("fp8-pages_of_1-fp32", rank=72, rope=8, page_size=1, seqlen_q=2, causal=False, **fp8)
    odd: dict[str, Any] = {"rank": 13, "rope": 8, "lengths": (67, 9, 0, 30)}  # rows begin at every byte of a word
    yield DecodeCase("fp8-ranks_13_8", **odd, **fp8)
    yield DecodeCase("fp8-ranks_13_8-pair_of_caches", is_packed=False, page_size=5, seqlen_q=2, **odd, **fp8)
    yield DecodeCase("fp8-pair_of_contiguous_caches-leftpad", is_packed=False, leftpads=(5, 1, 0, 130), **fp8)
    transposed: dict[str, Any] = {"cache_storage": "transposed", "page_size": 16, "shares_pages": True}
    yield DecodeCase("fp8-transposed", rank=128, rope=0, num_heads=1, **transposed, **fp8)
    ds_mla: dict[str, Any] = {"kv_cache_format": "fp8_ds_mla", "rank": 512}
    yield DecodeCase("fp8_ds_mla-paged-bf16", dtype=torch.bfloat16, page_size=64, num_heads=16, **ds_mla)
    yield DecodeCase("fp8_ds_mla-paged-fp32-queries_2", seqlen_q=2, has_host_lengths=True, **transposed, **ds_mla)
    full: dict[str, Any] = {"lengths": (67, 67), "has_seqlens_kv": False}
    yield DecodeCase("fp8_ds_mla-full_cache-bf16", dtype=torch.bfloat16, return_lse=False, **full, **ds_mla)
    yield DecodeCase("fp8_ds_mla-contiguous-leftpad", leftpads=(5, 1, 0, 130), num_heads=2, **ds_mla)


def _large() -> Iterator[DecodeCase]:
    for name, given in REAL.items():
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
                    **({"rank": 512, "rope": 64} | given),
                )
