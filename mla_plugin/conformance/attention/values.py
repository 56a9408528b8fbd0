"""Calls with unusual numbers and in unusual surroundings, in each layout that the backend accepts."""

from __future__ import annotations

import functools
import itertools
import unittest
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mla_plugin.conformance import checks, settings, spoilt, surroundings
from mla_plugin.conformance.attention import alike, biases, features, library, likeness, swept
from mla_plugin.conformance.attention.call import Call
from mla_plugin.conformance.attention.case import Case
from mla_plugin.conformance.attention.special import (
    call_of,
    check_after_forward,
    check_call,
    check_step,
    results_of,
    step,
)
from mla_plugin.conformance.budget import Yardstick
from mla_plugin.hooks.attention import AttentionOutput, Plan

if TYPE_CHECKING:
    from mla_plugin.conformance.attention.suite import BackendConformance

_DTYPES = (torch.bfloat16, torch.float16)
_UNLIKE = ((torch.bfloat16, 1), (torch.float16, 3), (torch.float32, 2), (torch.bfloat16, 2), (torch.float32, 4))
"""Dtypes and heads of calls that follow one another."""
_FEW_HEADS = ((2, 2), (2, 1), (4, 4), (4, 1), (8, 8), (16, 16))
"""Heads of q and of k, the first that a backend takes."""
_HIDING: tuple[dict[str, Any], ...] = (
    {"attn_mask_type": "causal"},
    {"attn_mask_type": "no_mask", "window_size": (5, 3)},
    {"attn_mask_type": "arbitrary", "mask_shape": "bhss"},
)
"""What hides keys."""


def check_values(suite: BackendConformance) -> None:
    """Zeros, inputs and gradients that are tiny or large, scores far below zero, masks of one value, and NaN."""
    plain = _plain(suite)
    for case in _cases(plain):
        plan = suite.plan_of(case)
        if plan is None:
            continue
        call = call_of(suite, case, plan.request)
        for name, other in _variants(call):
            check_call(suite, plan, other, f"with {name}")
        _check_nan(suite, plan, call)
        if case not in plain:
            continue
        of_tiles = replace(case, seqlens_kv=tuple(n + 267 for n in case.seqlens_kv), name=f"{case.name} with more keys")
        plan = suite.plan_of(of_tiles)
        if plan is not None:
            _check_nan(suite, plan, call_of(suite, of_tiles, plan.request))
    biases.check_hidden_tiles(suite, plain)
    _check_low_scores(suite)
    _check_infinite_dlse(suite)


def _cases(plain: list[Case]) -> Iterator[Case]:
    """The plain ones, one in each low precision, one whose lse is used, five with a bias, one with a mask."""
    yield from plain
    for case, dtype in zip(plain, _DTYPES, strict=False):
        if case.dtype != dtype:
            yield replace(case, dtype=dtype, name=f"{case.name} in {dtype}")
    yield from _with_more_tensors(plain)


def _with_more_tensors(plain: list[Case]) -> Iterator[Case]:
    """One whose lse is used, two with each type of bias, one of them in float64 too, one with a mask."""
    for case in plain[:1]:
        yield replace(case, name=f"{case.name} with lse", return_lse=True)
    for case in [case for case in plain if not case.is_packed][:1]:
        for bias_type in ("post_scale_bias", "pre_scale_bias"):
            biased = replace(case, name=f"{case.name} with a {bias_type}", bias_type=bias_type, bias_shape="bhss")
            yield biased
            yield replace(biased, name=f"{biased.name} that needs a gradient", bias_requires_grad=True)
        if case.dtype != torch.float64:
            yield replace(biased, dtype=torch.float64, bias_requires_grad=True, name=f"{biased.name} in float64")
        yield replace(case, name=f"{case.name} with a mask", attn_mask_type="arbitrary", mask_shape="bhss")


def _plain(suite: BackendConformance) -> list[Case]:
    """One of each layout, made small: each is computed a dozen times. With as few heads as the backend takes.

    Raises:
        SkipTest: it takes calls, but none of these.
    """
    sizes: dict[str, Any] = {"rows_q": None, "rows_kv": None, "lead": 0, "lead_kv": None, "tail": 0}
    found: list[Case] = []
    for case in suite.plain_cases():
        lengths = (33, 20) if case.is_packed else (33, 33)
        small = replace(case, seqlens_q=lengths, seqlens_kv=lengths, **sizes)
        of_heads = (replace(small, num_heads=n, num_kv_heads=n_kv) for n, n_kv in (*_FEW_HEADS, _heads_of(case)))
        found += itertools.islice((one for one in of_heads if suite.plan_of(one) is not None), 1)
    if not found and suite.plain_cases():
        raise unittest.SkipTest(f"not run: {suite.backend} refuses every small call: 33 tokens, 2 to 16 heads")
    return found[: 1 if suite.is_slow else None]


def _heads_of(case: Case) -> tuple[int, int]:
    return case.num_heads, case.num_kv_heads


def _variants(call: Call) -> Iterator[tuple[str, Call]]:
    """What is unusual, and the call."""
    for name in ("q", "k", "v"):
        yield f"{name} of zeros", _with(call, **{name: torch.zeros_like})
    yield "dout of zeros", replace(call, dout=torch.zeros_like(call.dout))
    tiny, large = (2.0**-6, 2.0**4) if call.case.dtype == torch.float16 else (2.0**-40, 2.0**20)
    for words, factor in (("a tiny", tiny), ("a large", large)):
        dlse = None if call.dlse is None else call.dlse * factor
        yield f"{words} dout", replace(call, dout=call.dout * factor, dlse=dlse)
    yield "scores around -140", _with(call, q=lambda q: -16 * q.abs(), k=torch.abs)
    yield "equal keys", _with(call, k=torch.ones_like)
    if call.tensors.k.shape == call.tensors.q.shape:
        yield "k that is q", replace(call, tensors=replace(call.tensors, k=call.tensors.q))
    tiny, large = (2.0**-6, 2.0**6) if call.case.dtype == torch.float16 else (2.0**-30, 2.0**30)
    yield "tiny queries and large keys", _with(call, q=_times(tiny), k=_times(large))
    yield "large queries and tiny keys", _with(call, q=_times(large), k=_times(tiny))
    yield "a large v", _with(call, v=_times(large))
    yield "a tiny v", _with(call, v=_times(tiny))
    of_one_sign = _with(call, q=torch.abs, k=torch.abs, v=torch.abs)  # nothing cancels
    dlse = None if call.dlse is None else call.dlse.abs()
    yield "numbers of one sign", replace(of_one_sign, dout=call.dout.abs(), dlse=dlse)
    yield (
        "equal keys and a large v of one sign",  # whose sum is beyond float16's numbers
        replace(_with(call, k=torch.ones_like, v=lambda v: v.abs() * 2.0**12), dout=call.dout * 2.0**-6),
    )
    # dout @ v.T is beyond float16's numbers, and no gradient is
    yield "a large dout and v of one sign", replace(_with(call, v=torch.abs), dout=call.dout.abs() * 2.0**11, dlse=None)
    for scale in (4.0, 2.0**8, 2.0**-20):
        yield f"a softmax_scale of {scale:.3g}", replace(call, tensors=replace(call.tensors, softmax_scale=scale))
    width, rest = call.case.head_dim_v, call.case.head_dim_qk - call.case.head_dim_v
    for start in sorted({0, rest}) if rest >= 0 else ():
        slice_of_k = call.tensors.k.detach().narrow(-1, start, width)
        slice_of_k.requires_grad_(call.tensors.v.requires_grad)
        yield f"v that is k from column {start} on", replace(call, tensors=replace(call.tensors, v=slice_of_k))
    if call.tensors.attention_mask is not None:
        yield "a mask that hides nothing", call.with_mask_of(False)
        yield "a mask that hides all", call.with_mask_of(True)
    if call.tensors.bias is not None:
        yield from biases.of_call(call)


def _with(call: Call, **changes: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    """The call with some of q, k and v put through a function."""
    made: dict[str, Any] = {}
    for name, change in changes.items():
        x = getattr(call.tensors, name)
        made[name] = change(x.detach()).requires_grad_(x.requires_grad)
    return replace(call, tensors=replace(call.tensors, **made))


def _times(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * factor


def _check_nan(suite: BackendConformance, plan: Plan, call: Call) -> None:
    """A query with NaN gives a row of NaN, and changes no other row."""
    expected, layout, q = call.expected(), call.request.layout, call.tensors.q.detach().clone()
    place = spoilt.spoil(q, expected[1].exact, layout, suite._generator())
    if place is None:
        return
    output = suite.hooks().forward(plan, _with(call, q=lambda _: q))
    try:
        spoilt.repair(place, output.out, output.lse, expected, layout)
        checks.check_error("out beside a query with NaN", output.out, expected[0])
    except checks.ConformanceError as error:
        checks.fail(f"{call.case.name}: {error}")


def _check_low_scores(suite: BackendConformance) -> None:
    """Every score is -65536, so a key that is hidden by a lower one, and not by -inf, outweighs those that are seen.

    The backward is left out: float32 tells lse apart by 0.004 there, and so weights by as much.
    """
    for case in _plain(suite):
        for options in _HIDING[: 2 if case.is_packed else None]:
            given = dict(options)
            if case.is_packed:
                given["attn_mask_type"] = {"no_mask": "padding", "causal": "padding_causal"}[options["attn_mask_type"]]
            hiding = replace(case, name=f"{case.name} with scores of -65536, {given}", **given)
            plan = suite.plan_of(hiding, is_training=False)
            if plan is None:
                continue
            call = call_of(suite, hiding, plan.request)
            call = _with(call, q=lambda q: _with_first_column(torch.zeros_like(q), -1024.0))
            call = _with(call, k=lambda k: _with_first_column(k.clone(), 1024.0))
            call = replace(call, tensors=replace(call.tensors, softmax_scale=2.0**-4))
            try:
                checks.check_output(hiding, call.inputs, suite.hooks().forward(plan, call), call.expected())
            except checks.ConformanceError as error:
                checks.fail(f"{hiding.name}: {error}")


def _with_first_column(x: torch.Tensor, value: float) -> torch.Tensor:
    x[..., 0] = value
    return x


def _check_infinite_dlse(suite: BackendConformance) -> None:
    """A ``dlse`` that is infinite where a query sees no key, see ``Call``; nothing of it reaches a gradient."""
    for plan, call in itertools.islice(_calls_with_blind_queries(suite), 1 if suite.is_slow else 3):
        check_call(suite, plan, call, "with an infinite dlse where no key is seen")


def _calls_with_blind_queries(suite: BackendConformance) -> Iterator[tuple[Plan, Call]]:
    """Some queries of a sequence see no key, others do, and lse has a gradient."""
    for case in sorted(suite.cases(), key=lambda case: case.cost):
        if not case.return_lse or "large" in case.tags or not {"unequal_lengths", "empty_sequences"} & case.tags:
            continue
        plan = suite.plan_of(case, is_training=True)
        if plan is None:
            continue
        call = call_of(suite, case, plan.request)
        padding = plan.request.layout.to_bhsd(case.is_padding("q"))[..., 0].to(suite.device)
        hidden = call.expected()[1].exact.isneginf() & ~(padding[0] if case.is_packed else padding)
        if bool(hidden.any()):
            yield plan, call


def check_surroundings(suite: BackendConformance) -> None:
    """Other settings, other threads, inference mode, what like calls share; and no tensor of a call is kept."""
    ways = itertools.product(suite.cases(), (True, False))
    suite.check_answers_under_other_settings(case.request(suite.device, is_training=is_one) for case, is_one in ways)
    plain = _plain(suite)
    wider = [replace(case, dtype=torch.float32) for case in plain[:1]]  # no half precision hides another one
    for case in dict.fromkeys(plain + wider):
        plan = suite.plan_of(case)
        if plan is None:
            continue
        call = call_of(suite, case, plan.request)
        with settings.settings_kept():  # a variable that a library sets when it is loaded is its own
            step(suite, plan, call)
        run = functools.partial(step, suite, plan, call)
        settings.check_settings_are_kept(run)
        with settings.unusual_settings():
            check_step(call, *step(suite, plan, call))
        check_step(call, *surroundings.in_another_thread(run))
        _check_backward_in_another_thread(suite, plan, call)
        if not suite.is_slow and case is plain[0]:
            surroundings.check_many_calls(functools.partial(_results_of_a_step, suite, plan, call))
        if not suite.is_slow:  # interpreters of kernels have one state for all threads
            like = [(plan, call_of(suite, case, plan.request)) for _ in range(2)]
            given = (*like, *_unlike_calls(suite, case))
            surroundings.at_the_same_time([functools.partial(_checked_step, suite, *each) for each in given])
        likeness.check_like_calls(suite, case)
        _check_inference_mode(suite, case)
        _check_after_inference_mode(suite, case)
        case, plan = _with_gaps(suite, case, plan)
        run_one = functools.partial(_tensors_of_a_call, suite, case, plan, itertools.count())
        surroundings.check_nothing_is_kept(run_one)
    for case in (*_with_more_tensors(plain), *likeness.with_padding(plain)):
        plan = suite.plan_of(case)
        if plan is not None:
            likeness.check_like_calls(suite, case)
            run_one = functools.partial(_tensors_of_a_call, suite, case, plan, itertools.count())
            surroundings.check_nothing_is_kept(run_one)


def _with_gaps(suite: BackendConformance, case: Case, plan: Plan) -> tuple[Case, Plan]:
    """A packed call with padded offsets too, where the backend takes them."""
    rows = tuple(length + 2 for length in case.seqlens_q)
    other = replace(case, rows_q=rows, rows_kv=rows) if case.is_packed else case
    other_plan = suite.plan_of(other)
    return (case, plan) if other_plan is None else (other, other_plan)


def _unlike_calls(suite: BackendConformance, case: Case) -> Iterator[tuple[Plan, Call]]:
    """Calls with another mask and scale, of other lengths and of the same ones, where the backend takes them."""
    lengths = (21, 29)[: len(case.seqlens_q)] if case.is_packed else (21,) * len(case.seqlens_q)
    mask = "causal" if "causal" not in case.attn_mask_type else "no_mask"
    mask = mask if not case.is_packed else "padding" if mask == "no_mask" else f"padding_{mask}"
    same: dict[str, Any] = {"attn_mask_type": mask, "window_size": (-1, -1), "softmax_scale": 0.3}
    for options in ({**same, "seqlens_q": lengths, "seqlens_kv": lengths}, same):
        unlike = replace(case, **options)
        plan = suite.plan_of(unlike)
        if plan is not None:
            yield plan, call_of(suite, unlike, plan.request)


def _check_backward_in_another_thread(suite: BackendConformance, plan: Plan, call: Call) -> None:
    """As autograd runs it on a CUDA device: what the forward leaves to its thread is not there.

    Then once more for the same forward with another ``dout``, as with ``retain_graph=True``.
    """
    if not plan.request.is_training:
        return
    output, _ = step(suite, plan, call)
    other = functools.partial(step, suite, plan, call, output)
    check_step(call, *surroundings.in_another_thread(other))
    turned = replace(call, dout=call.dout.flip(plan.request.layout.tokens))
    check_step(turned, *step(suite, plan, turned, output))


def check_every_size(suite: BackendConformance) -> None:
    """Sizes that no list has, see ``swept``."""
    swept.check_every_size(suite, _plain(suite))


def check_backward_alone(suite: BackendConformance) -> None:
    """The backward of a forward that ran elsewhere, of each layout and each feature."""
    plain = _plain(suite)
    more = () if suite.is_slow else features.with_features(plain)
    features.check_backward_alone(suite, [*plain, *_with_more_tensors(plain), *more])


def check_at_the_same_time(suite: BackendConformance) -> None:
    """Two threads, of each feature, in a dense layout and packed; interpreters have one state for all threads."""
    few = list({case.is_packed: case for case in _plain(suite)}.values())
    features.check_at_the_same_time(suite, [*features.with_features(few), *_with_more_tensors(few)], few)


def _checked_step(suite: BackendConformance, plan: Plan, call: Call) -> None:
    check_step(call, *step(suite, plan, call))


def _results_of_a_step(suite: BackendConformance, plan: Plan, call: Call) -> dict[str, torch.Tensor | None]:
    output, gradients = step(suite, plan, call)
    check_step(call, output, gradients)
    return results_of(output, gradients)


def check_unlike_calls(suite: BackendConformance) -> None:
    """Calls of other sizes, layouts and dtypes one after the other, the larger ones later; then their backwards.

    What a backend keeps from call to call (a workspace, a size) must not be that of the first, nor of the last.
    """
    calls = []
    for lengths in ((3, 9), (9, 9), (70, 41)):  # the first two are one request where sequences are packed
        for case, (dtype, heads) in zip(_plain(suite), itertools.cycle(_UNLIKE), strict=False):
            both: dict[str, Any] = {"seqlens_q": lengths, "seqlens_kv": lengths}
            if not case.is_packed:
                both = {name: (lengths[0],) * len(lengths) for name in both}
            for wanted, (n, n_kv) in itertools.product((dtype, case.dtype), ((heads, heads), _heads_of(case))):
                unlike = replace(case, dtype=wanted, num_heads=n, num_kv_heads=n_kv, **both)
                plan = suite.plan_of(unlike)
                if plan is not None:
                    calls.append((plan, call_of(suite, unlike, plan.request)))
                    break
    outputs = [suite.hooks().forward(plan, call) for plan, call in calls]
    for (plan, call), output in reversed(list(zip(calls, outputs, strict=True))):
        _check_pair(suite, plan, call, output)
    for plan, call in reversed(calls):
        _check_pair(suite, plan, call, suite.hooks().forward(plan, call))
    alike.check_alike(suite, _plain(suite))


def _check_pair(suite: BackendConformance, plan: Plan, call: Call, output: AttentionOutput) -> None:
    try:
        check_after_forward(suite.hooks(), plan, call, output)
    except checks.ConformanceError as error:
        lengths = f"lengths {call.case.seqlens_q} in {call.case.qkv_format} and {call.case.dtype}"
        checks.fail(f"a call with {lengths} after calls of other sizes, layouts and dtypes: {error}")


def _tensors_of_a_call(
    suite: BackendConformance, case: Case, plan: Plan, indices: Iterator[int]
) -> dict[str, torch.Tensor | None]:
    call = call_of(suite, likeness.varied(case, next(indices)), plan.request)
    return {**call.inputs, "dout": call.dout, **results_of(*step(suite, plan, call))}


def _check_inference_mode(suite: BackendConformance, case: Case) -> None:
    """Tensors that are made there have no version counter and belong to no graph."""
    plan = suite.plan_of(case, is_training=False)
    if plan is None:
        return
    with torch.inference_mode():
        call = call_of(suite, case, plan.request)
        expected: tuple[Yardstick, Yardstick] = call.expected()
        checks.check_output(case, call.inputs, suite.hooks().forward(plan, call), expected)
        if suite._goes_through_the_library():
            with library.as_the_process_manager(suite._manager()):
                out, _ = library.attend(call, plan.forward_backend)
            checks.check_error("out", out, expected[0])


def _check_after_inference_mode(suite: BackendConformance, case: Case) -> None:
    """A call of new sizes there, and then outside: memory that is kept from there must not be written to in place."""
    lengths: Any = tuple(length + (40 if suite.is_slow else 300) for length in case.seqlens_q)
    longer = replace(case, seqlens_q=lengths, seqlens_kv=lengths, name=f"{case.name} of new sizes")
    plan, of_training = (suite.plan_of(longer, is_training=way) for way in (False, True))
    if plan is None:
        return
    with torch.inference_mode():
        call = call_of(suite, longer, plan.request)
        checks.check_output(longer, call.inputs, suite.hooks().forward(plan, call), call.expected())
    call = call_of(suite, longer, plan.request)
    checks.check_output(longer, call.inputs, suite.hooks().forward(plan, call), call.expected())
    if of_training is not None:
        check_call(suite, of_training, call_of(suite, longer, of_training.request), "after inference mode")
