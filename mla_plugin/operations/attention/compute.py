"""One pass of a request on the backends of its plan: value checks before it, a check of what came back after it."""

from __future__ import annotations

from dataclasses import replace

import torch

from mla_plugin import environment
from mla_plugin.arguments.attention import AttentionTensors, check_length_values
from mla_plugin.arguments.layout import lse_dtype
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, Gradients, Plan, Residuals
from mla_plugin.operations.attention import dispatch
from mla_plugin.resolver.asking import check_backend_is_registered
from mla_plugin.resolver.attention import resolve


def plan_for(request: AttentionRequest, tensors: AttentionTensors, backend: str | None) -> Plan | None:
    """The decision, after a check of the lengths; None for a call without queries or keys, which no backend sees."""
    if _is_empty(tensors):
        check_backend_is_registered(backend)
        return None
    if reads_lengths(request):
        longest = (request.max_seqlen_q, request.max_seqlen_kv)
        check_length_values(tensors, request.qkv_format, longest, pad_between_seqs=request.pad_between_seqs)
    return resolve(request, backend=backend)


def reads_lengths(request: AttentionRequest) -> bool:
    """Values are read where it costs nothing, and where the user accepts that the host waits."""
    return request.has_padding and (request.device_type == "cpu" or environment.is_value_check_requested())


def forward(plan: Plan | None, request: AttentionRequest, tensors: AttentionTensors) -> AttentionOutput:
    """out and lse, contiguous and in memory of their own.

    Raises:
        RuntimeError: the backend returned other shapes or dtypes than the contract says.
    """
    if plan is None:
        return _empty_output(request, tensors.q)
    with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
        # autograd records nothing in a backend, whatever it switches on, and its products keep their dtype
        output = dispatch.forward(plan, tensors)
    _check_output(output, tensors.q, request, plan.forward_backend)
    return AttentionOutput(_own(output.out, tensors), _own(output.lse, tensors))


def backward(
    plan: Plan | None, request: AttentionRequest, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None
) -> Gradients:
    """The gradients, contiguous; dbias is None unless the request asks for it."""
    tensors = residuals.tensors
    if plan is None:
        inputs = (tensors.q, tensors.k, tensors.v)
        dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in inputs)
        bias = tensors.bias if request.bias_requires_grad else None
        return Gradients(dq, dk, dv, None if bias is None else torch.zeros_like(bias))
    with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
        gradients = dispatch.backward(plan, residuals, dout, dlse)
    dbias = gradients.dbias if request.bias_requires_grad else None
    _check_gradients(gradients, tensors, request, plan.backward_backend)
    return Gradients(
        gradients.dq.contiguous(),
        gradients.dk.contiguous(),
        gradients.dv.contiguous(),
        None if dbias is None else dbias.contiguous(),
    )


def with_contiguous_rows(tensors: AttentionTensors) -> AttentionTensors:
    """The contract promises backends a contiguous last dimension: PyTorch's CPU kernel reads garbage without it."""
    q, k, v = tensors.q, tensors.k, tensors.v
    if q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return tensors
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return replace(tensors, q=q, k=k, v=v)


def _is_empty(tensors: AttentionTensors) -> bool:
    return tensors.q.numel() == 0 or tensors.k.numel() == 0


def _empty_output(request: AttentionRequest, q: torch.Tensor) -> AttentionOutput:
    lse = q.new_full(request.layout.lse_shape(q.shape), -torch.inf, dtype=lse_dtype(q.dtype))
    return AttentionOutput(q.new_zeros((*q.shape[:-1], request.head_dim_v)), lse)


def _check_output(output: AttentionOutput, q: torch.Tensor, request: AttentionRequest, backend: str) -> None:
    """What compiled code was promised by the fake operator: it would read beyond a smaller tensor."""
    for name, x, shape, dtype in (
        ("out", output.out, (*q.shape[:-1], request.head_dim_v), q.dtype),
        ("lse", output.lse, request.layout.lse_shape(q.shape), lse_dtype(q.dtype)),
    ):
        _check_result(name, x, shape, dtype, q.device, backend)


def _check_gradients(gradients: Gradients, tensors: AttentionTensors, request: AttentionRequest, backend: str) -> None:
    """Autograd would sum, cast or drop what does not fit."""
    wanted = {"dq": tensors.q, "dk": tensors.k, "dv": tensors.v}
    if request.bias_requires_grad and tensors.bias is not None:
        wanted["dbias"] = tensors.bias
    for name, x in wanted.items():
        _check_result(name, getattr(gradients, name), x.shape, x.dtype, x.device, backend)


def _check_result(
    name: str, x: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, backend: str
) -> None:
    if not isinstance(x, torch.Tensor):
        given = type(x).__name__
    elif x.shape != shape or x.dtype != dtype or x.device != device or x.layout != torch.strided:
        given = f"{tuple(x.shape)} {x.dtype} on {x.device}, {x.layout}"
    else:
        return
    raise RuntimeError(
        f"the backend {backend!r} returned {name} as {given}; a dense tensor {tuple(shape)} {dtype} on {device} is the "
        f"contract. MLA_PLUGIN_BLOCK={backend} leaves it out, mla_plugin.conformance tests it"
    )


def _own(x: torch.Tensor, tensors: AttentionTensors) -> torch.Tensor:
    """x contiguous, in memory of its own, and no view, which PyTorch would not let the caller change in place."""
    x = x.contiguous()
    memory = x.untyped_storage().data_ptr()
    if memory and any(memory == y.untyped_storage().data_ptr() for y in (tensors.q, tensors.k, tensors.v)):
        return x.clone()
    return x.new_empty(0).set_(x) if x._is_view() else x  # type: ignore[call-overload]
