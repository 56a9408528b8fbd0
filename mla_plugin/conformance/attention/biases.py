"""Biases that hide keys, as a mask that is added does: by -inf, or by a number so low that nothing is left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mla_plugin.conformance.attention.call import Call
from mla_plugin.conformance.attention.case import Case
from mla_plugin.conformance.attention.special import call_of, check_call

if TYPE_CHECKING:
    from mla_plugin.conformance.attention.suite import BackendConformance


def of_call(call: Call) -> Iterator[tuple[str, Call]]:
    """Biases that hide keys, as a mask that is added does, and a large one."""
    assert call.tensors.bias is not None
    given, needs_gradient = call.tensors.bias.detach(), call.tensors.bias.requires_grad
    hidden = torch.rand(given.shape, device=given.device) < 1 / 3
    hidden[..., 1::7, : hidden.shape[-1] * 3 // 4] = True  # whole tiles
    hidden[..., 0] = hidden[..., -1] = False

    def biased(bias: torch.Tensor) -> Call:
        return replace(call, tensors=replace(call.tensors, bias=bias.requires_grad_(needs_gradient)))

    least = _lowest(call.case.dtype)
    hiding = biased(given.masked_fill(hidden, least))
    yield "a bias that hides keys", hiding
    lse = hiding.expected()[1].exact
    if bool((lse.isfinite() & (lse < least * min(1.0, call.tensors.softmax_scale) / 2)).any()):
        return  # a window or lengths leave a query hidden keys alone, which are as good as none with -inf
    infinite = biased(given.masked_fill(hidden, -torch.inf))
    vars(infinite)["oracle"] = hiding.oracle  # the same softmax
    yield "a bias of -inf that hides keys", infinite
    yield "a large bias of one sign", biased(64.0 * given.abs())
    all_lowest = [-30000.0, least]
    if call.case.bias_type == "pre_scale_bias":  # float32 cannot hold an lse of the lowest number times a scale
        all_lowest.pop()
    for lowest in all_lowest:
        rows = given.clone()
        rows[..., 1::3, :] = lowest
        yield f"a bias of {lowest:.3g} for all keys of some queries, which are seen nevertheless", biased(rows)


def _lowest(dtype: torch.dtype) -> float:
    """A bias that hides a key; for float64 beyond float32's numbers, and small enough for the oracle to square."""
    return max(torch.finfo(dtype).min, -1e100)


def check_hidden_tiles(suite: BackendConformance, plain: list[Case]) -> None:
    """A bias of -inf over the first keys of some queries: whole tiles of up to 256 keys have no score."""
    dense = [case for case in plain if not case.is_packed][:1]
    for case in dict.fromkeys((*dense, *(replace(case, dtype=torch.float64) for case in dense))):
        keys = tuple(n + 267 for n in case.seqlens_kv)
        open_mask: dict[str, Any] = {"attn_mask_type": "no_mask", "window_size": (-1, -1), "seqlens_kv": keys}
        biased = replace(case, **open_mask, bias_type="post_scale_bias", bias_shape="bhss", bias_requires_grad=False)
        plan = suite.plan_of(biased)
        if plan is None:
            continue
        call = call_of(suite, biased, plan.request)
        assert call.tensors.bias is not None
        finite, infinite = (call.tensors.bias.detach().clone() for _ in range(2))
        for row, count in enumerate((16, 32, 64, 128, 256)):
            finite[..., row::7, :count] = _lowest(case.dtype)
            infinite[..., row::7, :count] = -torch.inf
        exact = replace(call, tensors=replace(call.tensors, bias=finite))
        call = replace(call, tensors=replace(call.tensors, bias=infinite))
        vars(call)["oracle"] = exact.oracle  # the same softmax
        check_call(suite, plan, call, "with a bias of -inf over the first keys")
