"""Decode calls of the same shapes with other options, and caches and queries whose parts lie in another order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mla_plugin.arguments.cache_format import FP8
from mla_plugin.arguments.decode import DecodeLengths, DecodeTensors
from mla_plugin.arguments.options import HOSTS
from mla_plugin.conformance import checks
from mla_plugin.conformance.decode.case import DecodeCase
from mla_plugin.hooks.decode import DecodePlan, DecodeRequest
from mla_plugin.hooks.types import Accepted

if TYPE_CHECKING:
    from mla_plugin.conformance.decode.suite import DecodeConformance

_OPTIONS: tuple[dict[str, Any], ...] = (
    {"causal": True},
    {"causal": False},
    {"leftpads": (3, 0, 30)},
    {"causal": False, "leftpads": (0, 7, 33), "return_lse": False},
    {"causal": True, "softmax_scale": 0.3},
)
_FP8: dict[str, Any] = {"kv_cache_format": FP8, "rank": 64, "rope": 16, "rope_storage_in_cache": None}
_FP8 |= {"cache_storage": "contiguous"}
_LAYERS: tuple[dict[str, Any], ...] = (
    {"seqlen_q": 1, "num_heads": 5},
    {"seqlen_q": 3, "num_heads": 2},
    {"seqlen_q": 3, "num_heads": 2, "causal": False},
    {"seqlen_q": 1, "num_heads": 17, "dtype": torch.bfloat16},
    {"seqlen_q": 2, "num_heads": 5, "return_lse": False},
    {"page_size": 64},
    {"page_size": 3},
    {"leftpads": (30, 4, 0)},
    {"leftpads": (3, 0, 31), "seqlen_q": 2},
    {"softmax_scale": 0.3, "rank": 40, "rope": 8},
    _FP8,
    _FP8 | {"page_size": 16},
    _FP8 | {"num_heads": 2},
)


def check_alike(suite: DecodeConformance, case: DecodeCase) -> None:
    """What is kept for a shape or an address must not be another call's: options in both orders, strides, dtypes."""
    for lengths, options in (((40, 9, 33), _OPTIONS), ((41, 8, 35), _OPTIONS[::-1])):
        for given, host in zip(options, itertools.cycle(HOSTS[1:]), strict=False):
            other = replace(case, lengths=lengths, rows=48, **({"causal": True, "leftpads": None} | given))
            other = most_queries(suite, other, 2)
            if not case.has_seqlens_kv:
                other = replace(other, lengths=(max(lengths),) * len(lengths))
            _check(suite, other, _drawn(suite, other), f"after calls of its shapes with other options, {given}", host)
    first = _drawn(suite, other)
    _check(suite, other, first, "in its own memory")
    empty = replace(other, lengths=(0,) * len(other.lengths), leftpads=None, has_host_lengths=True)
    if case.has_seqlens_kv:
        _check(suite, empty, _drawn(suite, empty), "without keys, whose lengths the host knows")
    _check(suite, other, _turned(_drawn(suite, other), first), "after one in the same memory with other strides")


def check_orders(suite: DecodeConformance, case: DecodeCase) -> None:
    """k_rope before c_kv in one row, or with columns between them; q_rope and q_nope_abs too."""
    if not case.rope:
        return
    tensors = _drawn(suite, case)
    for of_cache, of_queries in ((True, False), (False, True), (True, True)):
        for gap in (0, 16):
            given: dict[str, Any] = {}
            if of_cache:
                given["k_rope"], given["c_kv"] = _joined(tensors.k_rope, tensors.c_kv, gap)
            if of_queries:
                given["q_rope"], given["q_nope_abs"] = _joined(tensors.q_rope, tensors.q_nope_abs, gap)
            words = f"with rope before the latents in {' and '.join(given)}, {gap} columns between them"
            _check(suite, case, tensors._replace(**given), words)


def check_tables(suite: DecodeConformance, case: DecodeCase) -> None:
    """Sequences that have some pages in common, not the first ones, or the same pages in another order."""
    if case.page_size is None or case._has_one_cache:
        return
    lengths = (2 * case.page_size + min(3, case.page_size), 3 * case.page_size, 2 * case.page_size + 1)
    several = replace(case, lengths=lengths, leftpads=None, rows=3 * case.page_size, shares_pages=False)
    tensors = several.tensors(suite.device, suite._generator(), 1.0)
    assert tensors.page_table is not None
    for words, columns in (("the second page", [1]), ("the last page", [2]), ("the last two pages", [1, 2])):
        table = tensors.page_table.clone()
        table[:, columns] = table[:1, columns]
        _check(suite, several, tensors._replace(page_table=table), f"whose sequences have {words} in common")
    table = tensors.page_table.clone()
    table[1, :3], table[2, :3] = table[0, :3].flip(0), table[0, :3].roll(1)
    _check(suite, several, tensors._replace(page_table=table), "whose sequences have the same pages in other orders")


def check_shared_lengths(suite: DecodeConformance, case: DecodeCase) -> None:
    """One ``DecodeLengths`` for layers and steps that differ in all else, before an update and after it.

    The layers come in another order at each step, because what is kept is that of the first.
    """
    if not case.has_seqlens_kv:
        return
    steps = ((40, 9, 33), (7, 41, 0))
    layers = [x for x in _LAYERS[: 2 if suite.is_slow else None] if case.page_size is not None or "page_size" not in x]
    shuffled = [layers[i] for i in torch.randperm(len(layers), generator=suite._generator())]
    orders = iter((layers, layers[::-1], shuffled, shuffled[::-1]))
    known = DecodeLengths(steps[0], device=suite.device)
    unknown = DecodeLengths(seqlens_kv=torch.tensor(steps[0], dtype=torch.int32, device=suite.device))
    for lengths, given in itertools.product((known, unknown), steps):
        if lengths.host is None:
            lengths.seqlens_kv.data.copy_(torch.tensor(given))  # no version counter says it
            lengths.update()
        else:
            lengths.update(given)
        for options in next(orders):
            is_known = lengths.host is not None
            plain: dict[str, Any] = {"lengths": given, "rows": 48, "has_host_lengths": is_known, "leftpads": None}
            other = replace(case, **(plain | options))
            if not _takes(suite, other):  # other heads or another dtype: those of the case, and twice as many heads
                heads = case.num_heads * (1 + options.get("num_heads", 0) % 2)
                other = most_queries(suite, replace(other, num_heads=heads, dtype=case.dtype), other.seqlen_q)
            tensors = _drawn(suite, other)._replace(lengths=lengths, seqlens_kv=lengths.seqlens_kv)
            words = f"with a DecodeLengths{'' if is_known else ' of the device'} that other calls have used, {options}"
            _check(suite, other, tensors, words)


def check_low_scores(suite: DecodeConformance, case: DecodeCase) -> None:
    """Every score is as low as it may be: a key hidden by a lower one, not by -inf, outweighs those that are seen."""
    if not case.has_seqlens_kv:
        return
    for leftpads in (None, (3, 0, 30)):
        other = replace(case, lengths=(40, 9, 33), rows=48, leftpads=leftpads, softmax_scale=2.0**-4)
        other = most_queries(suite, other, 3)
        tensors = _drawn(suite, other)
        q_nope_abs, q_rope = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in tensors[:2])  # not expanded
        tensors = tensors._replace(q_nope_abs=q_nope_abs, q_rope=q_rope)
        tensors.q_nope_abs[..., 0], tensors.c_kv[..., 0] = suite.lowest_score * 2.0**-6, 1024.0
        _check(suite, other, tensors, f"with scores of {suite.lowest_score:.0f}")


def _takes(suite: DecodeConformance, case: DecodeCase) -> bool:
    return isinstance(suite._answer(case.request(suite.device)), Accepted)


def most_queries(suite: DecodeConformance, case: DecodeCase, seqlen_q: int) -> DecodeCase:
    """The case with so many query tokens, or with one where the backend takes no more."""
    several = replace(case, seqlen_q=seqlen_q)
    return several if _takes(suite, several) else replace(case, seqlen_q=1)


def _joined(first: torch.Tensor, second: torch.Tensor, gap: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors as parts of the rows of one."""
    between = first.new_full((*first.shape[:-1], gap), torch.nan)
    whole = torch.cat([first, between, second], -1)
    return whole[..., : first.shape[-1]], whole[..., -second.shape[-1] :]


def _drawn(suite: DecodeConformance, case: DecodeCase) -> DecodeTensors:
    return case.tensors(suite.device, suite._generator(), suite.padding_poison)


def _turned(tensors: DecodeTensors, first: DecodeTensors) -> DecodeTensors:
    """The tensors in the first ones' memory, queries head-major and a contiguous cache token-major."""
    made = {}
    for name, axes in _axes(tensors):
        x, target = getattr(tensors, name), getattr(first, name)
        width = target.stride(-2)
        order = list(range(x.dim()))
        order[axes[0]], order[axes[1]] = order[axes[1]], order[axes[0]]
        sizes = [x.shape[axis] for axis in order[:-1]] + [width]
        strides = torch.empty(sizes, device="meta").stride()
        there = [strides[order.index(axis)] for axis in range(x.dim())]
        made[name] = target.as_strided(x.shape, there, target.storage_offset()).copy_(x)
    return tensors._replace(**made)


def _axes(tensors: DecodeTensors) -> Iterator[tuple[str, tuple[int, int]]]:
    """Tensors whose rows lie one after another, and the two axes that may change places."""
    for name, axes in (("q_nope_abs", (1, 2)), ("q_rope", (1, 2)), ("c_kv", (0, 1)), ("k_rope", (0, 1))):
        x = getattr(tensors, name)
        is_plain = all(a.stride(i) == a.stride(i + 1) * a.shape[i + 1] for a in (x,) for i in range(x.dim() - 2))
        if x.numel() and is_plain:
            yield name, axes


def _check(
    suite: DecodeConformance, case: DecodeCase, tensors: DecodeTensors, words: str, host: str = HOSTS[0]
) -> None:
    request = DecodeRequest.of(tensors, host=host)
    if not isinstance(suite._answer(request), Accepted):
        return
    try:
        output = suite.forward(DecodePlan(request, suite.platform(), suite.backend), tensors)
        suite.check_output(case, tensors, output)
    except checks.ConformanceError as error:
        checks.fail(f"a call of {case.name} from host {host!r} {words}: {error}")
