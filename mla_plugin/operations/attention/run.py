"""Runs attention for every host: takes a checked request and its tensors, returns out and lse."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from mla_plugin.arguments.attention import AttentionTensors, tensors_of_call
from mla_plugin.arguments.options import CallOptions
from mla_plugin.arguments.transforms import is_batched
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, Residuals
from mla_plugin.operations.attention import compute
from mla_plugin.operations.attention.known import Known, known_of, options_of, request_for
from mla_plugin.operations.attention.operator import Call, attention_backward, attention_forward, keep

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def run(request: AttentionRequest, tensors: AttentionTensors, *, backend: str | None = None) -> AttentionOutput:
    """Resolve the request and compute it; a backward uses the same decision.

    Args:
        request: made of these tensors by ``AttentionRequest.of``; its ``is_training`` says whether a backward may
            follow.
        tensors: of the call.
        backend: use this backend and no other.

    Returns:
        out and lse, differentiable in q, k, v and bias.

    Raises:
        NoBackendError: no backend takes the request; the message lists every backend with every reason.
        ValueError: the request does not fit these tensors, or has a value that no argument of ``mla_plugin.attention``
            gives; lengths do not fit the tensors; ``backend`` is not registered.
    """
    return run_call(tensors, request, backend)


def run_call(tensors: AttentionTensors, given: CallOptions | AttentionRequest, backend: str | None) -> AttentionOutput:
    """``run`` for a request or for options."""
    if is_observed(tensors.q, tensors.k, tensors.v):
        return run_observed(tensors, given, backend)
    return run_known(known_of(tensors, given, backend), tensors)


def run_known(known: Known, tensors: AttentionTensors) -> AttentionOutput:
    """``run_call`` for a call that is not ``is_observed`` and has a cache entry."""
    if not known.has_contiguous_rows:
        tensors = compute.with_contiguous_rows(tensors)
    vars(tensors)["kept"] = known.kept
    if known.request.is_training:
        out, lse = _apply(known, tensors, tensors.q, tensors.k, tensors.v, tensors.bias)
        return AttentionOutput(out, lse)
    if not torch.is_grad_enabled():
        return compute.forward(known, tensors)
    torch._C._set_grad_enabled(False)  # like torch.no_grad(), but a microsecond faster
    try:
        return compute.forward(known, tensors)
    finally:
        torch._C._set_grad_enabled(True)


def run_observed(
    tensors: AttentionTensors, given: CallOptions | AttentionRequest, backend: str | None
) -> AttentionOutput:
    """``run_call`` through the operator, which tracers, modes and profilers see."""
    if isinstance(given, CallOptions) and is_traced():  # sizes may be symbolic, which a request does not allow
        options = given.completed(tensors)
    else:
        options = options_of(request_for(tensors, given))
    return AttentionOutput(*attention_forward(*Call(tensors, options, backend).in_order()))


def is_traced() -> bool:
    """Whether torch.compile or torch.jit.trace records the call instead of running it."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def is_observed(*tensors: torch.Tensor) -> bool:
    """Whether operators are being traced, transformed, recorded or intercepted, so that the call must be an operator.

    Dispatching an operator with so many arguments takes more host time than a launch, so other calls skip it.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:  # is_traced()
        return True
    for x in tensors:
        if type(x) not in _PLAIN:
            return True
    return (
        tensors[0].is_meta
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_torch_function_mode_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._autograd._profiler_enabled()
    )


_tensors = operator.attrgetter(*(field.name for field in fields(AttentionTensors) if field.name != "softmax_scale"))


class _Attention(torch.autograd.Function):
    """The autograd function of calls that are not observed.

    Autograd processes every argument several times, so only the tensors that may have a gradient are passed.
    """

    @staticmethod
    def forward(
        ctx: Any, known: Known, tensors: AttentionTensors, *differentiable: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output = compute.forward(known, tensors)
        ctx.save_for_backward(output.out, output.lse, *_tensors(tensors))
        ctx.known, ctx.softmax_scale = known, tensors.softmax_scale
        ctx.set_materialize_grads(False)
        return output.out, output.lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * 6
        known: Known = ctx.known
        out, lse, q, k, v, *rest = ctx.saved_tensors
        tensors = tensors_of_call(q, k, v, ctx.softmax_scale, *rest)
        dout = torch.zeros_like(out) if dout is None else dout
        if torch.is_grad_enabled() or is_batched(dout, dlse):
            # the operator raises when a second derivative is taken, and runs once for each gradient under vmap
            call = Call(tensors, options_of(known.request), known.backend)
            keep(call, lse, known)
            dq, dk, dv, dbias = attention_backward(dout, dlse, out, lse, *call.in_order())
        else:
            dq, dk, dv, dbias = compute.backward(known, Residuals(tensors, out, lse), dout, dlse)
        return None, None, dq, dk, dv, dbias if known.request.bias_requires_grad else None


_apply: Callable[..., tuple[torch.Tensor, torch.Tensor]] = super(torch.autograd.Function, _Attention).apply
"""``_Attention.apply`` without its check for torch.func transforms, which ``is_observed`` has made."""
