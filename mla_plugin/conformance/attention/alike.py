"""Calls of the same shapes, some in the same memory, that differ in options, strides or dtype, from each host in turn.

What a backend keeps for a shape or an address (a choice of kernels, a descriptor of a tensor) must not be another
call's.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mla_plugin.arguments.options import HOSTS
from mla_plugin.conformance.attention.call import Call
from mla_plugin.conformance.attention.case import Case
from mla_plugin.conformance.attention.special import call_of, check_call
from mla_plugin.hooks.attention import Plan
from mla_plugin.hooks.types import Accepted

if TYPE_CHECKING:
    from mla_plugin.conformance.attention.suite import BackendConformance

_OPTIONS: tuple[dict[str, Any], ...] = (
    {"attn_mask_type": "no_mask"},
    {"attn_mask_type": "causal"},
    {"attn_mask_type": "causal_bottom_right", "return_lse": True},
    {"attn_mask_type": "no_mask", "window_size": (9, 4)},
    {"attn_mask_type": "no_mask", "window_size": (2, 7), "bottom_right_diagonal": False},
    {"attn_mask_type": "no_mask", "bias_type": "post_scale_bias", "bias_shape": "bhss"},
    {"attn_mask_type": "no_mask", "bias_type": "pre_scale_bias", "bias_shape": "bhss", "bias_requires_grad": True},
    {"attn_mask_type": "arbitrary", "mask_shape": "bhss"},
    {"attn_mask_type": "no_mask", "softmax_scale": 0.3},
    {"attn_mask_type": "causal", "window_size": (5, 0), "deterministic": True},
)


def check_alike(suite: BackendConformance, plain: list[Case]) -> None:
    """Each of the plain cases with other options, and with others in the reverse order for other shapes.

    Then other strides and dtypes in the memory of one.
    """
    for case in plain:
        for len_q, len_kv, options in ((17, 23, _OPTIONS), (15, 26, _OPTIONS[::-1])):
            last = (len_q, len_kv) if not case.is_packed else (len_q - 8, len_kv - 9)
            of_lengths = replace(case, seqlens_q=(len_q, last[0]), seqlens_kv=(len_kv, last[1]))
            for plan, call, words in _calls(suite, of_lengths, options):
                check_call(suite, plan, call, f"after calls of its shapes with other options, {words}")
        for plan, call, words in _in_one_memory(suite, of_lengths):
            check_call(suite, plan, call, f"after one in the same memory with other {words}")


def _calls(
    suite: BackendConformance, case: Case, all_options: tuple[dict[str, Any], ...]
) -> Iterator[tuple[Plan, Call, str]]:
    for options, host in zip(all_options, itertools.cycle(HOSTS), strict=False):
        mask = options["attn_mask_type"]
        if case.is_packed and ("bias_type" in options or mask == "arbitrary"):
            continue
        given = dict(options)
        if case.is_packed:
            given["attn_mask_type"] = "padding" if mask == "no_mask" else f"padding_{mask}"
        other = replace(case, **given)
        plan = suite.plan_of(other)
        if plan is not None:
            words = ", ".join(f"{name}={x!r}" for name, x in given.items())
            request = plan.request.replace(host=host)
            if isinstance(suite._answer(request), Accepted):
                plan, words = replace(plan, request=request), f"{words}, host={host!r}"
            yield plan, call_of(suite, other, plan.request), words


def _in_one_memory(suite: BackendConformance, case: Case) -> Iterator[tuple[Plan, Call, str]]:
    """A call; then q, k, v and dout in its memory with two axes in the other order, and with another dtype."""
    for dtype, other in ((torch.bfloat16, torch.float16), (torch.float32, None)):
        plan = suite.plan_of(replace(case, dtype=dtype))
        if plan is None:
            continue
        first, second = (call_of(suite, replace(case, dtype=dtype), plan.request) for _ in range(2))
        axes = (0, 1) if case.is_packed else (1, 2)
        yield plan, first, "data"
        yield plan, _written(second, first, functools.partial(_turned, axes=axes)), "strides"
        other_plan = None if other is None else suite.plan_of(replace(case, dtype=other))
        if other_plan is not None and other is not None:
            third = call_of(suite, replace(case, dtype=other), other_plan.request)
            yield other_plan, _written(third, first, functools.partial(torch.Tensor.view, dtype=other)), "dtypes"


def _turned(x: torch.Tensor, axes: tuple[int, int]) -> torch.Tensor:
    """The memory of a contiguous tensor as one of the same shape whose two axes lie in the other order."""
    strides = x.new_empty(x.transpose(*axes).shape, device="meta").transpose(*axes).stride()
    return x.as_strided(x.shape, strides, x.storage_offset())


def _written(call: Call, first: Call, view: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    """The call with its q, k, v and dout in the memory of the first one."""

    def there(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        place = view(target.detach()) if target.is_contiguous() else target.detach().clone().to(x.dtype)
        return place.copy_(x.detach()).requires_grad_(x.requires_grad)

    with torch.no_grad():
        moved: dict[str, Any] = {}
        for name in ("q", "k", "v"):
            moved[name] = there(getattr(call.tensors, name), getattr(first.tensors, name))
        dout = there(call.dout, first.dout)
    return replace(call, tensors=replace(call.tensors, **moved), dout=dout)
