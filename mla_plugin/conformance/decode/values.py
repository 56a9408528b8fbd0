"""Decode calls with unusual numbers and in unusual surroundings, over a contiguous and over a paged cache."""

from __future__ import annotations

import functools
import itertools
import unittest
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mla_plugin.arguments.cache_format import FP8, PLAIN
from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.arguments.layout import LAYOUTS
from mla_plugin.conformance import checks, settings, spoilt, surroundings
from mla_plugin.conformance.decode import alike, likeness, swept
from mla_plugin.conformance.decode.case import DecodeCase
from mla_plugin.conformance.decode.oracle import expected
from mla_plugin.hooks.decode import DecodeOutput, DecodePlan
from mla_plugin.hooks.types import Accepted

if TYPE_CHECKING:
    from mla_plugin.conformance.decode.suite import DecodeConformance


_DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def plain_calls(suite: DecodeConformance, *, of_any_format: bool = False) -> list[tuple[DecodeCase, DecodePlan]]:
    """The plainest accepted cases with and without pages, with few heads; with lse, unless the backend has none.

    A slow one gets the cheapest case. of_any_format: over a quantised cache, where the backend takes no other.

    Raises:
        SkipTest: it takes calls, but none of these.
    """
    found: dict[bool, tuple[DecodeCase, DecodePlan]] = {}

    def order(case: DecodeCase) -> tuple[float, ...]:
        is_quantised = case.kv_cache_format != PLAIN
        return (is_quantised, not case.return_lse, case.spare_pages, 0 if suite.is_slow else len(case.tags), case.cost)

    for case in sorted(suite.cases(), key=order):
        if case.is_large or not case.lengths or (case.page_size is None) in found:
            continue
        if case.kv_cache_format != PLAIN and not of_any_format:
            continue
        request = case.request(suite.device)
        if isinstance(suite._answer(request), Accepted):
            found[case.page_size is None] = case, DecodePlan(request, suite.platform(), suite.backend)
    if not found and any(isinstance(suite._answer(case.request(suite.device)), Accepted) for case in suite.cases()):
        raise unittest.SkipTest(f"not run: {suite.backend} takes quantised caches alone")
    return list(found.values())[: 1 if suite.is_slow else None]


def check_values(suite: DecodeConformance) -> None:
    """Zeros, numbers that are tiny or large, scores far below zero, no keys at all, and NaN."""
    for case, plan in _calls(suite):
        for words, asked, tensors in _variants(suite, case):
            try:
                suite.check_output(asked, tensors, suite.forward(plan, tensors))
            except checks.ConformanceError as error:
                checks.fail(f"{case} with {words}: {error}")
        _check_nan(suite, case, plan)


def _calls(suite: DecodeConformance) -> Iterator[tuple[DecodeCase, DecodePlan]]:
    """The plain ones, and one in each low precision: bfloat16 holds numbers beyond float16's."""
    plain = plain_calls(suite)
    yield from plain
    low = itertools.product((case for case, _ in plain[:1]), (torch.bfloat16, torch.float16))
    for case in [replace(case, dtype=dtype) for case, dtype in low if case.dtype != dtype]:
        request = case.request(suite.device)
        if isinstance(suite._answer(request), Accepted):
            yield case, DecodePlan(request, suite.platform(), suite.backend)


def _variants(suite: DecodeConformance, case: DecodeCase) -> Iterator[tuple[str, DecodeCase, DecodeTensors]]:
    """What is unusual, the case and its tensors."""
    generator = suite._generator()

    def drawn(case: DecodeCase) -> DecodeTensors:
        return case.tensors(suite.device, generator, 1.0)

    tensors = drawn(case)
    zeros = [torch.zeros_like(x) for x in tensors[:4]]
    yield "queries of zeros", case, tensors._replace(q_nope_abs=zeros[0], q_rope=zeros[1])
    yield "a cache of zeros", case, tensors._replace(c_kv=zeros[2], k_rope=zeros[3])
    q_nope_abs, q_rope, c_kv, k_rope = (x.abs() for x in tensors[:4])
    factor = -140.0 / (0.64 * (case.rank + case.rope) * case.softmax_scale)
    yield (
        "scores around -140",
        case,
        tensors._replace(q_nope_abs=factor * q_nope_abs, q_rope=factor * q_rope, c_kv=c_kv, k_rope=k_rope),
    )
    rising = torch.arange(c_kv.shape[1], device=c_kv.device).add(1).div(c_kv.shape[1]).to(case.dtype)[None, :, None]
    yield (
        "scores that rise to 140",
        case,
        tensors._replace(
            q_nope_abs=-factor * q_nope_abs, q_rope=-factor * q_rope, c_kv=c_kv * rising, k_rope=k_rope * rising
        ),
    )
    for words, of_cache in (("a large cache", 1.0), ("large queries", -1.0)):  # the other side has the inverse factor
        power = (6 if case.dtype == torch.float16 else 30) * of_cache
        q_nope_abs, q_rope = (x * 2.0**-power for x in tensors[:2])
        c_kv, k_rope = (x * 2.0**power for x in tensors[2:4])
        yield words, case, tensors._replace(q_nope_abs=q_nope_abs, q_rope=q_rope, c_kv=c_kv, k_rope=k_rope)
    q_nope_abs, q_rope, c_kv, k_rope = (x.abs() for x in tensors[:4])  # nothing cancels
    of_one_sign = tensors._replace(q_nope_abs=q_nope_abs, q_rope=q_rope, c_kv=c_kv, k_rope=k_rope)
    yield "numbers of one sign", case, of_one_sign
    q_nope_abs, q_rope, c_kv, k_rope = (x * 2.0**6 for x in tensors[:4])
    scale = case.softmax_scale * 2.0**-12
    beyond = tensors._replace(q_nope_abs=q_nope_abs, q_rope=q_rope, c_kv=c_kv, k_rope=k_rope, softmax_scale=scale)
    yield "products beyond float16's numbers", replace(case, softmax_scale=scale), beyond
    for scale in (4.0, 2.0**8, 2.0**-20):
        yield f"a softmax_scale of {scale:.3g}", case, drawn(replace(case, softmax_scale=scale))
    if tensors.page_table is not None:
        yield "one page for all keys", case, tensors._replace(page_table=torch.ones_like(tensors.page_table))
    if case.has_seqlens_kv:
        empty = replace(case, lengths=(0,) * len(case.lengths), rows=case.capacity)
        yield "no keys at all", empty, drawn(empty)


def _check_nan(suite: DecodeConformance, case: DecodeCase, plan: DecodePlan) -> None:
    """A query with NaN gives a row of NaN, and changes no other row."""
    tensors = case.tensors(suite.device, suite._generator(), suite.padding_poison)
    wanted, layout = expected(tensors), LAYOUTS["bshd"]
    for name in ("q_nope_abs", "q_rope") if case.rope else ("q_nope_abs",):
        q = getattr(tensors, name).clone()
        place = spoilt.spoil(q, wanted[1].exact, layout, suite._generator())
        if place is not None:
            output = suite.forward(plan, tensors._replace(**{name: q}))
            spoilt.repair(place, output.out, output.lse, wanted, layout, suite.drops_nan(plan))
            checks.check_error(f"out beside a query with NaN in {name}", output.out, wanted[0])


def check_surroundings(suite: DecodeConformance) -> None:
    """Other settings, other threads, many calls, inference mode; and no tensor of a call is kept."""
    suite.check_answers_under_other_settings(case.request(suite.device) for case in suite.cases())
    for index, (case, plan) in enumerate(plain_calls(suite, of_any_format=True)):
        run = functools.partial(_one_call, suite, case, plan)
        with settings.settings_kept():  # a variable that a library sets when it is loaded is its own
            run()
        tensors = case.tensors(suite.device, suite._generator(), suite.padding_poison)
        settings.check_settings_are_kept(functools.partial(_run, suite, plan, tensors))
        with settings.unusual_settings():
            run()
        surroundings.in_another_thread(run)
        if not suite.is_slow and not index:
            surroundings.check_many_calls(functools.partial(_results_of, suite, case, plan, tensors))
        if not suite.is_slow:  # interpreters of kernels have one state for all threads
            other_run = functools.partial(_one_call, suite, case.other(), plan)
            surroundings.at_the_same_time([run, run, other_run])
        with torch.inference_mode():
            run()
        _check_after_inference_mode(suite, case)
        calls = (functools.partial(_one_call, suite, _varied(case, index), plan) for index in itertools.count())
        surroundings.check_nothing_is_kept(functools.partial(_next_of, calls))


_FEATURES: tuple[dict[str, Any], ...] = (
    {"lengths": (600, 500)},
    {"seqlen_q": 3},
    {"leftpads": (3, 20)},
    {"num_heads": 40},
    {"has_host_lengths": True},
    {"return_lse": False},
    *({"dtype": dtype} for dtype in _DTYPES),
    {"kv_cache_format": FP8, "rank": 64, "rope": 16, "cache_storage": "contiguous", "rope_storage_in_cache": None},
)
"""What a kernel has work of its own for, and so memory that two threads might share."""


def _next_of(calls: Iterator[Callable[[], dict[str, torch.Tensor | None]]]) -> dict[str, torch.Tensor | None]:
    return next(calls)()


def _varied(case: DecodeCase, index: int) -> DecodeCase:
    """A case of the same request, one for each small index, as attention's ``likeness.varied``."""
    other = replace(case, softmax_scale=case.softmax_scale * (1 + index / 16))
    if not case.has_seqlens_kv or case.has_host_lengths or case._has_one_cache:
        return other
    lengths = tuple(max(0, length - 1 - index) for length in case.lengths)
    return replace(other, lengths=lengths, rows=case.capacity)


def check_at_the_same_time(suite: DecodeConformance) -> None:
    """Two calls with each feature in two threads, over the same lengths in the other order."""
    plain = [case for case, _ in plain_calls(suite, of_any_format=True) if case.has_seqlens_kv]
    for plain_case, given in itertools.product(plain, _FEATURES):
        sizes: dict[str, Any] = {"lengths": (90, 40), "leftpads": None, "rows": None}
        case = replace(plain_case, **(sizes | given))
        request = case.request(suite.device)
        if isinstance(suite._answer(request), Accepted):
            plan = DecodePlan(request, suite.platform(), suite.backend)
            cases = (case, case.other())
            given = [each.tensors(suite.device, suite._generator(), suite.padding_poison) for each in cases]
            runs = [functools.partial(_run, suite, plan, tensors) for tensors in given]
            for each, tensors, outputs in zip(cases, given, surroundings.at_the_same_time(runs), strict=True):
                for output in outputs:
                    suite.check_output(each, tensors, output)


def _check_after_inference_mode(suite: DecodeConformance, case: DecodeCase) -> None:
    """A call of new sizes there, and then outside: memory that is kept from there must not be written to in place."""
    wider = replace(case, lengths=(*case.lengths, 3, 5), num_heads=case.num_heads + 2, leftpads=None, rows=None)
    request = wider.request(suite.device)
    if not case.has_seqlens_kv or case._has_one_cache or not isinstance(suite._answer(request), Accepted):
        return
    plan = DecodePlan(request, suite.platform(), suite.backend)
    with torch.inference_mode():
        _one_call(suite, wider, plan)
    tensors = wider.tensors(suite.device, suite._generator(), suite.padding_poison)
    suite.check_output(wider, tensors, suite.run(plan, tensors))


def check_every_size(suite: DecodeConformance) -> None:
    """Sizes that no list has, see ``swept``."""
    swept.check_every_size(suite, [case for case, _ in plain_calls(suite) if case.has_seqlens_kv])


def check_unlike_calls(suite: DecodeConformance) -> None:
    """Calls of other batches, lengths, queries and dtypes one after the other, the larger ones later.

    What a backend keeps from call to call (a workspace, a size) must not be that of the first.
    """
    calls = []
    for lengths, seqlen_q in (((3, 1), 1), ((40, 9), 1), ((5, 0, 130, 33, 8), 2)):
        for plain, dtype in itertools.product((case for case, _ in plain_calls(suite)), _DTYPES):
            unlike = replace(plain, lengths=lengths, dtype=dtype, leftpads=None, rows=None)
            unlike = alike.most_queries(suite, unlike, seqlen_q)
            request = unlike.request(suite.device)
            if plain.has_seqlens_kv and isinstance(suite._answer(request), Accepted):
                tensors = unlike.tensors(suite.device, suite._generator(), suite.padding_poison)
                calls.append((unlike, DecodePlan(request, suite.platform(), suite.backend), tensors))
    for case, plan, tensors in (*calls, *reversed(calls)):
        try:
            suite.check_output(case, tensors, suite.forward(plan, tensors))
        except checks.ConformanceError as error:
            checks.fail(f"a call with lengths {case.lengths} in {case.dtype} after calls of other sizes: {error}")
    for case, _ in plain_calls(suite):
        alike.check_alike(suite, case)
        alike.check_orders(suite, case)
        alike.check_tables(suite, case)
        alike.check_shared_lengths(suite, case)
        alike.check_low_scores(suite, case)
        likeness.check_likes(suite, case)


def _run(suite: DecodeConformance, plan: DecodePlan, tensors: DecodeTensors) -> DecodeOutput:
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        return suite.run(plan, tensors)


def _results_of(
    suite: DecodeConformance, case: DecodeCase, plan: DecodePlan, tensors: DecodeTensors
) -> dict[str, torch.Tensor | None]:
    output = _run(suite, plan, tensors)
    suite.check_output(case, tensors, output)
    return output._asdict()


def _one_call(suite: DecodeConformance, case: DecodeCase, plan: DecodePlan) -> dict[str, torch.Tensor | None]:
    """Its queries, its cache and its results, which are right."""
    tensors = case.tensors(suite.device, suite._generator(), suite.padding_poison)
    results = _results_of(suite, case, plan, tensors)
    return {"q_nope_abs": tensors.q_nope_abs, "c_kv": tensors.c_kv, **results}
