"""Calls of one request that differ in all that it does not say: values, addresses, the sizes of the cache.

What a backend keeps for a request must not be of the first of them. That one has what a shortcut may be taken for: full
sequences, no left padding, pages in order, aligned queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mla_plugin.conformance import checks
from mla_plugin.conformance.decode.case import DecodeCase
from mla_plugin.hooks.decode import DecodePlan
from mla_plugin.hooks.types import Accepted

if TYPE_CHECKING:
    from mla_plugin.conformance.decode.suite import DecodeConformance


def check_likes(suite: DecodeConformance, plain: DecodeCase) -> None:
    """With and without lengths, with and without left padding, one query and several; the first case again last."""
    given: dict[str, Any] = {"lengths": (40, 40, 40), "rows": None, "scores": "normal", "has_host_lengths": False}
    for options in _options(plain):
        case = replace(plain, **{"leftpads": None, "spare_pages": 0, "page_order": "ascending"} | given | options)
        if plain._has_one_cache or not isinstance(suite._answer(case.request(suite.device)), Accepted):
            continue
        for words, each in (("plain values", case), *_others(case), ("plain values again", case)):
            request = each.request(suite.device)
            if request != case.request(suite.device):
                checks.fail(f"the suite's own mistake: {each} is another request than {case}")
            tensors = each.tensors(suite.device, suite._generator(), suite.padding_poison)
            try:
                output = suite.forward(DecodePlan(request, suite.platform(), suite.backend), tensors)
                suite.check_output(each, tensors, output)
            except checks.ConformanceError as error:
                checks.fail(f"{plain.name}, {options}, with {words}, one of several calls of one request: {error}")


def _options(plain: DecodeCase) -> Iterator[dict[str, Any]]:
    yield {"has_seqlens_kv": True, "seqlen_q": 1}
    yield {"has_seqlens_kv": True, "seqlen_q": 3, "leftpads": (0, 0, 0)}
    if plain.page_size is None:
        yield {"has_seqlens_kv": False, "seqlen_q": 3}


def _others(case: DecodeCase) -> Iterator[tuple[str, DecodeCase]]:
    """Words and a case of the same request: the capacity stays below the same power of two."""
    unaligned: dict[str, Any] = {"query_storage": "offset"}
    if not case.has_seqlens_kv:
        yield "fewer rows in the cache", replace(case, lengths=(35, 35, 35))
        yield "more rows in the cache and unaligned queries", replace(case, lengths=(44, 44, 44), **unaligned)
        return
    pads = case.leftpads and (3, 0, 30)
    rows = case.capacity
    yield "other lengths and pages", replace(case, lengths=(7, 40, 0), leftpads=pads, rows=rows, page_order="shuffled")
    more = replace(case, lengths=(33, 9, 45), leftpads=pads, rows=rows, spare_pages=11, page_order="descending")
    yield "more pages and unaligned queries", replace(more, **unaligned)
