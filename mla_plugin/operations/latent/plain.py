"""Latent attention on one device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, request_of
from mla_plugin.operations.latent import compute, rows
from mla_plugin.operations.latent.call import Call, Forward, Gradients
from mla_plugin.operations.latent.compute import Decision, Part, Wants


def check(call: Call) -> None:
    """As ``Passes.check``."""
    request_of(call.check(), call.options)


def requests(call: Call) -> tuple[AttentionRequest, ...]:
    """The requests that backends get; errors as ``check``."""
    request = request_of(call.check(), call.options)
    tokens = math.prod(call.tensors.c_kv.shape[:-1])
    return compute.of_groups((request,), call.sizes, tokens, request.dtype)


def forward(call: Call) -> Forward:
    """As ``Passes.forward``."""
    check(call)
    expanded = _expanded(call, call.tensors.q)
    decision = compute.decide(expanded, call.backend)
    return Forward(compute.forward(expanded, decision, _rows(call)), [], decision)


def backward(
    call: Call,
    decision: Decision | None,
    saved: Sequence[torch.Tensor],
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    wants: Wants,
) -> Gradients:
    """As ``Passes.backward``."""
    q, out, lse = saved
    expanded = _expanded(call, q)
    decision = decision or compute.decide(expanded, call.backend)
    found = compute.backward(expanded, decision, _rows(call), AttentionOutput(out, lse), dout, dlse, wants)
    dc_kv, dk_rope = (None, None) if found.dx is None else rows.split(found.dx, call.tensors)
    return Gradients(found.dq, dc_kv, dk_rope, found.dw_uk, found.dw_uv)


def kept_shapes(call: Call) -> list[tuple[int, ...]]:
    """As ``Passes.kept_shapes``."""
    return []


def _expanded(call: Call, q: torch.Tensor) -> compute.Call:
    tensors = call.tensors
    part = Part(call.options, tensors.lengths)
    leading = tuple(tensors.c_kv.shape[:-1])
    return compute.Call.of(q, tensors.w_uk, tensors.w_uv, tensors.softmax_scale, call.sizes, leading, (part,))


def _rows(call: Call) -> torch.Tensor:
    return rows.clear_padding(rows.join(call.tensors), call.tensors, call.sizes).flatten(0, -2)
