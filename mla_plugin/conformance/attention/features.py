"""Small calls of each layout, each with one feature that a kernel has work of its own for: memory, a pass, a branch.

The plainest calls do not show its faults: scratch memory that grouped heads need and two threads share, or a value that
the forward leaves behind for the backward.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mla_plugin.arguments.layout import lse_dtype
from mla_plugin.conformance import checks, surroundings
from mla_plugin.conformance.attention.case import Case
from mla_plugin.conformance.attention.special import call_of, check_step, step
from mla_plugin.hooks.attention import AttentionOutput

if TYPE_CHECKING:
    from mla_plugin.conformance.attention.suite import BackendConformance

_FEATURES: tuple[dict[str, Any], ...] = (
    {"num_heads": 4, "num_kv_heads": 2},
    {"seqlens_q": (150, 20), "seqlens_kv": (150, 20)},
    {"window_size": (9, 4)},
    {"deterministic": True},
    {"return_lse": True},
    {"head_dim_qk": 192, "head_dim_v": 128},
    {"head_dim_qk": 64, "head_dim_v": 64},
    *({"dtype": dtype} for dtype in (torch.bfloat16, torch.float16, torch.float64)),
)
_ROWS: dict[str, Any] = {"rows_q": (36, 27), "rows_kv": (33, 24)}
"""Of two sequences: behind each is a gap, of packed ones, or padding."""


def with_features(plain: list[Case]) -> Iterator[Case]:
    """The plain cases, one of each layout and two sequences, with one feature each."""
    for case in plain:
        changes: dict[str, Any] = {"seqlens_q": (33, 20), "seqlens_kv": (33, 20)}
        changes |= _ROWS if case.is_packed else {name: x[:1] * 2 for name, x in _ROWS.items()}
        changes |= {} if case.is_packed else {"attn_mask_type": "padding"}
        yield replace(case, name=f"{case.name} with padding", **changes)
    for case, given in itertools.product(plain, _FEATURES):
        if "seqlens_q" in given and not case.is_packed:
            given = {name: lengths[:1] * 2 for name, lengths in given.items()}
        yield replace(case, name=f"{case.name} with {given}", **given)


def check_backward_alone(suite: BackendConformance, given: list[Case]) -> None:
    """Of sizes that no forward has had, with another backend's out and lse: nothing else connects the two passes."""
    generator = suite._generator()
    for case in given:
        longer = _longer(case, int(torch.randint(3, 40, (), generator=generator)))
        plan = suite.plan_of(longer, is_training=True)
        if plan is None:
            continue
        call = call_of(suite, longer, plan.request)
        out, lse = call.expected()
        output = AttentionOutput(out.exact.to(case.dtype), lse.exact.to(lse_dtype(case.dtype)))
        words = f"{case.name}, whose forward another backend computed"
        try:
            gradients = suite.hooks().backward(plan, call, call.as_of_another(output, generator))
            checks.check_gradients(longer, call.inputs, gradients, lse.exact, call.expected_gradients())
        except checks.ConformanceError as error:
            checks.fail(f"{words}: {error}")
        except Exception as error:
            checks.fail(f"{words}: the backward raises {error!r}; nothing but its arguments connects the two")


def _longer(case: Case, more: int) -> Case:
    """The case with so many tokens more in each sequence."""
    sizes = {name: getattr(case, name) for name in ("seqlens_q", "seqlens_kv", "rows_q", "rows_kv")}
    longer: dict[str, Any] = {name: x and tuple(size + more for size in x) for name, x in sizes.items()}
    return replace(case, **longer)


def check_at_the_same_time(suite: BackendConformance, given: list[Case], of_inference: list[Case]) -> None:
    """Two calls of each case in two threads, of the last ones without a backward: none writes to the other's memory."""
    for case, is_training in (*((case, None) for case in given), *((case, False) for case in of_inference)):
        plan = suite.plan_of(case, is_training=is_training)
        if plan is None:
            continue
        calls = [call_of(suite, each, plan.request) for each in (case, case.other())]
        found = surroundings.at_the_same_time([functools.partial(step, suite, plan, call) for call in calls])
        try:
            for call, results in zip(calls, found, strict=True):
                for each in results:
                    check_step(call, *each)
        except checks.ConformanceError as error:
            checks.fail(f"{case.name}, twice at the same time: {error}")
