"""Runs one pass of a call on the backends of its plan, with checks of values before it and of results after it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from mla_plugin import environment
from mla_plugin.arguments.attention import AttentionTensors, check_length_values
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, Residuals
from mla_plugin.hooks.manager import get_manager
from mla_plugin.operations.attention import dispatch
from mla_plugin.operations.attention.known import Known


def _keys_above_backends() -> torch.DispatchKeySet:
    """The dispatch keys that run before an operator's kernel: autograd, autocast, view tracking."""
    with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
        excluded = torch._C._dispatch_tls_local_exclude_set()
    return excluded | torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


_ABOVE_BACKENDS = _keys_above_backends()


def _undisturbed() -> AbstractContextManager[object]:
    """Disable autograd and autocast in a backend, even if it enables gradients itself.

    Its results are then no views, which PyTorch would not allow the caller to modify in place.
    """
    return torch._C._ExcludeDispatchKeyGuard(_ABOVE_BACKENDS)


def reads_lengths(request: AttentionRequest) -> bool:
    """Whether to check values: on the CPU, where reading is free, or if the user accepts a synchronisation."""
    return request.has_padding and (request.device_type == "cpu" or environment.is_value_check_requested())


def forward(known: Known, tensors: AttentionTensors) -> AttentionOutput:
    """out and lse, contiguous and in new memory.

    Raises:
        ValueError: lengths do not fit the tensors.
        RuntimeError: the backend returned a result that does not follow the contract.
    """
    q, plan = tensors.q, known.plan
    if plan is None:
        lse = q.new_full(known.lse_shape, -torch.inf, dtype=known.lse_dtype)
        return AttentionOutput(q.new_zeros(known.out_shape), lse)
    request, hook = known.request, known.forward
    if request.has_padding and reads_lengths(request):
        longest = (request.max_seqlen_q, request.max_seqlen_kv)
        check_length_values(tensors, request.qkv_format, longest, pad_between_seqs=request.pad_between_seqs)
    with _undisturbed():
        output = dispatch.forward(plan, tensors) if hook is None else hook(plan=plan, tensors=tensors)
    out, lse, backend = output.out, output.lse, plan.forward_backend
    if hook is not None and _are_plugins_the_same(known):
        is_contiguous = out.is_contiguous() and lse.is_contiguous()
        return output if is_contiguous else AttentionOutput(out.contiguous(), lse.contiguous())
    # compiled code relies on the fake operator's shapes: it would read out of bounds in a smaller tensor
    _check_result("out", out, known.out_shape, q.dtype, q.device, backend)
    _check_result("lse", lse, known.lse_shape, known.lse_dtype, q.device, backend)
    return AttentionOutput(_own(out, tensors), _own(lse, tensors))


def backward(
    known: Known, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """dq, dk, dv and dbias, contiguous; dbias is None unless the request asks for it. Errors as ``forward``."""
    plan, tensors = known.plan, residuals.tensors
    q, k, v, bias = tensors.q, tensors.k, tensors.v, tensors.bias if known.request.bias_requires_grad else None
    if plan is None:
        dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        return dq, dk, dv, None if bias is None else torch.zeros_like(bias)
    with _undisturbed():
        found = dispatch.backward(plan, residuals, dout, dlse)
    backend = plan.backward_backend
    dq, dk, dv, dbias = found.dq, found.dk, found.dv, found.dbias
    if not (known.is_backward_ours and _are_plugins_the_same(known)):
        # autograd would silently sum, cast or drop a gradient that does not fit
        for name, given, x in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
            _check_result(name, given, x.shape, x.dtype, x.device, backend)
        if bias is not None:
            _check_result("dbias", dbias, bias.shape, bias.dtype, bias.device, backend)
        # a caller may add to one of them, or keep it
        others = (q, k, v, residuals.out, dout)
        dq = _apart_from(dq, *others)
        dk = _apart_from(dk, *others, dq)
        dv = _apart_from(dv, *others, dq, dk)
    if bias is None or dbias is None:
        return dq.contiguous(), dk.contiguous(), dv.contiguous(), None
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), dbias.contiguous()


def _are_plugins_the_same(known: Known) -> bool:
    """Whether the set of plugins is the same as when the call was cached; checked after the backend has run."""
    return get_manager().generation == known.generation


def with_contiguous_rows(tensors: AttentionTensors) -> AttentionTensors:
    """Make the last dimension contiguous, as the contract promises: PyTorch's CPU kernel reads garbage otherwise."""
    q, k, v = tensors.q, tensors.k, tensors.v
    if q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return tensors
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return replace(tensors, q=q, k=k, v=v)


def _check_result(
    name: str, x: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, backend: str
) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        given = type(x).__name__
    elif x.shape != shape or x.dtype != dtype or x.device != device or x.layout != torch.strided:
        given = f"{tuple(x.shape)} {x.dtype} on {x.device}, {x.layout}"
    else:
        return x
    raise RuntimeError(
        f"the backend {backend!r} returned {name} as {given}; expected a dense tensor {tuple(shape)} {dtype} on "
        f"{device}. MLA_PLUGIN_BLOCK={backend} excludes it; mla_plugin.conformance tests it"
    )


def _own(x: torch.Tensor, tensors: AttentionTensors) -> torch.Tensor:
    """x contiguous, in new memory, and no view, which PyTorch would not allow the caller to modify in place."""
    x = x.contiguous()
    if x.dtype == tensors.q.dtype:
        x = _apart_from(x, tensors.q, tensors.k, tensors.v)
    return x.new_empty(0).set_(x) if x._is_view() else x  # type: ignore[call-overload]


def _apart_from(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """x, copied if it shares memory with another tensor."""
    is_alias = torch._C._is_alias_of  # type: ignore[attr-defined]  # missing in PyTorch's stubs
    return x.clone() if any(is_alias(x, other) for other in others) else x
