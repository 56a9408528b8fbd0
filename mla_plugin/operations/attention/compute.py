"""One pass of a known call on the backends of its plan: value checks before it, a check of what came back after it."""

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
    """What PyTorch does before an operator's kernel: autograd, autocast, keeping account of views."""
    with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
        excluded = torch._C._dispatch_tls_local_exclude_set()
    return excluded | torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


_ABOVE_BACKENDS = _keys_above_backends()


def _undisturbed() -> AbstractContextManager[object]:
    """Autograd records nothing in a backend, whatever that switches on; its products keep their dtype.

    Its results are no views, which PyTorch would not let the caller change in place.
    """
    return torch._C._ExcludeDispatchKeyGuard(_ABOVE_BACKENDS)


def reads_lengths(request: AttentionRequest) -> bool:
    """Values are read where it costs nothing, and where the user accepts that the host waits."""
    return request.has_padding and (request.device_type == "cpu" or environment.is_value_check_requested())


def forward(known: Known, tensors: AttentionTensors) -> AttentionOutput:
    """out and lse, contiguous and in memory of their own.

    Raises:
        ValueError: lengths do not fit the tensors.
        RuntimeError: the backend returned other shapes or dtypes than the contract says.
    """
    q, plan = tensors.q, known.plan
    if plan is None:
        lse = q.new_full(known.lse_shape, -torch.inf, dtype=known.lse_dtype)
        return AttentionOutput(q.new_zeros(known.out_shape), lse)
    if reads_lengths(request := known.request):
        longest = (request.max_seqlen_q, request.max_seqlen_kv)
        check_length_values(tensors, request.qkv_format, longest, pad_between_seqs=request.pad_between_seqs)
    with _undisturbed():
        output = dispatch.forward(plan, tensors)
    out, lse, backend = output.out, output.lse, plan.forward_backend
    if known.is_forward_ours and _are_plugins_the_same(known):
        is_contiguous = out.is_contiguous() and lse.is_contiguous()
        return output if is_contiguous else AttentionOutput(out.contiguous(), lse.contiguous())
    # compiled code was promised this by the fake operator: it would read beyond a smaller tensor
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
        # autograd would sum, cast or drop what does not fit
        for name, given, x in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
            _check_result(name, given, x.shape, x.dtype, x.device, backend)
        if bias is not None:
            _check_result("dbias", dbias, bias.shape, bias.dtype, bias.device, backend)
    if bias is None or dbias is None:
        return dq.contiguous(), dk.contiguous(), dv.contiguous(), None
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), dbias.contiguous()


def _are_plugins_the_same(known: Known) -> bool:
    """Asked after the backend has run: no plugin came or went since the call became known."""
    return get_manager().generation == known.generation


def with_contiguous_rows(tensors: AttentionTensors) -> AttentionTensors:
    """The contract promises backends a contiguous last dimension: PyTorch's CPU kernel reads garbage without it."""
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
        f"the backend {backend!r} returned {name} as {given}; a dense tensor {tuple(shape)} {dtype} on {device} is the "
        f"contract. MLA_PLUGIN_BLOCK={backend} leaves it out, mla_plugin.conformance tests it"
    )


def _own(x: torch.Tensor, tensors: AttentionTensors) -> torch.Tensor:
    """x contiguous, in memory of its own, and no view, which PyTorch would not let the caller change in place."""
    x = x.contiguous()
    is_alias = torch._C._is_alias_of  # type: ignore[attr-defined]  # missing in PyTorch's stubs
    q = tensors.q
    if x.dtype == q.dtype and (is_alias(x, q) or is_alias(x, tensors.k) or is_alias(x, tensors.v)):
        return x.clone()
    return x.new_empty(0).set_(x) if x._is_view() else x  # type: ignore[call-overload]
