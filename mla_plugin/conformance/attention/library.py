"""The same calls through ``mla_plugin.attention`` and autograd, as a user makes them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from mla_plugin.conformance import checks
from mla_plugin.conformance.attention.call import Call
from mla_plugin.hooks import manager as process
from mla_plugin.hooks.attention import Plan
from mla_plugin.hooks.manager import BackendManager
from mla_plugin.operations.attention.api import attention

if TYPE_CHECKING:
    from mla_plugin.conformance.attention.suite import BackendConformance

_generations = itertools.count(1_000_000, 1_000)


@contextmanager
def as_the_process_manager(manager: BackendManager) -> Iterator[None]:
    """The library's entries find their backends in this manager."""
    before = process._manager
    if manager is before:
        yield
        return
    if manager.generation < 1_000_000:
        manager.generation += next(_generations)  # decisions are cached under it, and no two managers may share one
    process._manager = manager
    try:
        yield
    finally:
        process._manager = before


def options_of(call: Call, backend: str) -> dict[str, Any]:
    """The arguments of ``mla_plugin.attention`` besides q, k and v."""
    case, request, tensors = call.case, call.request, call.tensors
    return {
        "softmax_scale": tensors.softmax_scale,
        "attn_mask_type": case.attn_mask_type,
        "qkv_format": case.qkv_format,
        "window_size": case.window_size,
        "bottom_right_diagonal": None if "causal" in case.attn_mask_type else case.bottom_right_diagonal,
        "attention_mask": tensors.attention_mask,
        "cu_seqlens_q": tensors.cu_seqlens_q,
        "cu_seqlens_kv": tensors.cu_seqlens_kv,
        "cu_seqlens_q_padded": tensors.cu_seqlens_q_padded,
        "cu_seqlens_kv_padded": tensors.cu_seqlens_kv_padded,
        "max_seqlen_q": request.max_seqlen_q,
        "max_seqlen_kv": request.max_seqlen_kv,
        "core_attention_bias_type": case.bias_type,
        "core_attention_bias": tensors.bias,
        "deterministic": case.deterministic,
        "return_lse": case.return_lse,
        "backend": backend,
    }


def attend(call: Call, backend: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out, and lse where the case asks for it."""
    tensors = call.tensors
    result = attention(tensors.q, tensors.k, tensors.v, **options_of(call, backend))
    return result if isinstance(result, tuple) else (result, None)


def check(suite: BackendConformance, plan: Plan, call: Call) -> None:
    """One call with its backward, as a user makes it."""
    if not call.tensors.q.numel() or not call.tensors.k.numel():
        return
    with as_the_process_manager(suite._manager()):
        out, lse = attend(call, plan.forward_backend)
        gradients = differentiate(call, out, lse)
    check_results(call, out, lse, gradients)


def differentiate(call: Call, out: torch.Tensor, lse: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The gradients of what requires one."""
    leaves = {name: x for name, x in call.inputs.items() if x is not None and x.requires_grad}
    outputs, weights = ([out], [call.dout]) if lse is None else ([out, lse], [call.dout, call.dlse])
    return dict(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), weights), strict=True))


def check_results(call: Call, out: torch.Tensor, lse: torch.Tensor | None, gradients: dict[str, torch.Tensor]) -> None:
    """By the budgets of the hooks' own results."""
    expected_out, expected_lse = call.expected()
    checks.check_tensor("out", out, expected_out.exact, call.case.dtype)
    checks.check_error("out", out.detach(), expected_out)
    if lse is not None:
        checks.check_lse(lse.detach(), expected_lse)
    yardsticks = call.expected_gradients()
    for name, x in gradients.items():
        checks.check_error(f"d{name}", x, yardsticks[f"d{name}"])
