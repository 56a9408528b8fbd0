"""Calls whose q and k have more than 2**31 elements: offsets computed in 32 bits overflow to wrong rows.

There are many short sequences, so the call is cheap. Some are compared: the first, the last and those on either side of
2**31 and 2**32 elements.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.conformance import checks
from mla_plugin.conformance.attention.call import Call
from mla_plugin.conformance.attention.case import Case
from mla_plugin.conformance.attention.oracle import Oracle
from mla_plugin.conformance.attention.special import call_of, check_step, step
from mla_plugin.hooks.attention import AttentionRequest

if TYPE_CHECKING:
    from mla_plugin.conformance.attention.suite import BackendConformance

ELEMENTS = 2**31 + 2**24
"""Of q, and of k."""
LENGTH = 64
_WIDE: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 8, "head_dim_qk": 192, "head_dim_v": 128}
FORMS: tuple[dict[str, Any], ...] = (
    {"qkv_format": "bshd", "attn_mask_type": "causal"},
    {"qkv_format": "sbhd", "attn_mask_type": "causal"},
    {"qkv_format": "thd", "attn_mask_type": "padding_causal"},
)


def check(suite: BackendConformance, elements: int = ELEMENTS) -> None:
    """Both passes, or the forward alone, in each layout that the backend accepts."""
    for form in FORMS:
        one = Case("", dtype=torch.bfloat16, seqlens_q=(LENGTH,), seqlens_kv=(LENGTH,), **form, **_WIDE)
        batch = -(-elements // (LENGTH * one.num_heads * one.head_dim_qk))
        whole = replace(one, seqlens_q=(LENGTH,) * batch, seqlens_kv=(LENGTH,) * batch)
        plan = suite.plan_of(whole)
        if plan is not None:
            _check_call(suite, plan, one, batch)


def check_far_sequences(suite: BackendConformance, distance: int = 2**31 + 64) -> None:
    """The first and the last sequence lie more than 2**31 elements apart; the memory between is not touched.

    In each dense layout that the backend accepts.
    """
    for plain in suite.plain_cases():
        plan = suite.plan_of(plain)
        if plan is None or plain.is_packed or plain.batch_size < 2:
            continue
        call, batch = call_of(suite, plain, plan.request), plan.request.layout.batch
        assert batch is not None
        step_of_batch = -(-distance // (plain.batch_size - 1))
        placed: dict[str, torch.Tensor] = {"dout": call.dout, **{name: getattr(call.tensors, name) for name in "qkv"}}
        size = (plain.batch_size - 1) * step_of_batch + sum(x.numel() for x in placed.values())
        whole = torch.empty(size, dtype=plain.dtype, device=suite.device)
        start = 0
        for name, x in placed.items():
            strides = list(x.narrow(batch, 0, 1).contiguous().stride())
            strides[batch] = step_of_batch
            placed[name] = whole.as_strided(x.shape, strides, start).copy_(x.detach()).requires_grad_(x.requires_grad)
            start += x.numel()
        given: dict[str, Any] = {name: placed[name] for name in "qkv"}
        far = Call(plain, plan.request, replace(call.tensors, **given), placed["dout"], call.dlse)
        try:
            check_step(far, *step(suite, plan, far))
        except checks.ConformanceError as error:
            checks.fail(f"sequences in {plain.qkv_format} over {distance} elements: {error}")


def _check_call(suite: BackendConformance, plan: Any, one: Case, batch: int) -> None:
    request, device = plan.request, torch.device(suite.device)
    generator = torch.Generator(device).manual_seed(suite._generator().initial_seed())
    shapes = (
        request.layout.shape(batch, heads, (batch if one.is_packed else 1) * LENGTH, width)
        for heads, width in (
            (one.num_heads, one.head_dim_qk),
            (one.num_kv_heads, one.head_dim_qk),
            (one.num_kv_heads, one.head_dim_v),
            (one.num_heads, one.head_dim_v),
        )
    )
    q, k, v, dout = (torch.randn(x, generator=generator, dtype=one.dtype, device=device) for x in shapes)
    offsets = None
    if one.is_packed:
        offsets = torch.arange(batch + 1, dtype=torch.int32, device=device) * LENGTH
    tensors = AttentionTensors(q, k, v, one.head_dim_qk**-0.5, offsets, offsets)
    found = step(suite, plan, Call(one, request, tensors, dout, None))
    per = LENGTH * one.num_heads * one.head_dim_qk
    places = {0, batch // 2, batch - 1}
    places |= {
        n // per + side for n, side in itertools.product((2**31, 2**30), (-1, 0, 1)) if 0 <= n // per + side < batch
    }
    for b in sorted(places):
        _check_sequence(one, request, tensors, dout, found, b)


def _check_sequence(
    one: Case, request: AttentionRequest, tensors: AttentionTensors, dout: torch.Tensor, found: Any, b: int
) -> None:
    output, gradients = found
    offsets = None
    if one.is_packed:
        offsets = torch.tensor([0, LENGTH], dtype=torch.int32, device=dout.device)

    def of(x: torch.Tensor) -> torch.Tensor:
        if one.is_packed:
            return x[b * LENGTH : (b + 1) * LENGTH]
        batch_axis = request.layout.batch
        assert batch_axis is not None
        return x.narrow(batch_axis, b, 1)

    q, k, v = (of(x) for x in (tensors.q, tensors.k, tensors.v))
    small = replace(request, batch_size=1)
    oracle = Oracle(small, AttentionTensors(q, k, v, tensors.softmax_scale, offsets, offsets))
    out, lse = oracle.forward()
    where = f"of sequence {b} of {request.batch_size} in {one.qkv_format}, q has {tensors.q.numel()} elements"
    checks.check_error(f"out {where}", of(output.out), out)
    found_lse = output.lse[:, b * LENGTH : (b + 1) * LENGTH] if one.is_packed else output.lse[b : b + 1]
    checks.check_error(f"lse {where}", found_lse, lse)
    if gradients is None:
        return
    for name, yardstick in oracle.backward(out, lse.exact, of(dout), None).items():
        checks.check_error(f"{name} {where}", of(getattr(gradients, name)), yardstick)
