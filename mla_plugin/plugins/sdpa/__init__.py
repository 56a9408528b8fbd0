"""The fallback that runs everywhere, CPU and CUDA, forward and backward.

It takes TransformerEngine's place of "unfused attention" without its memory: no [S_q, S_kv] matrix exists of more than
a few megabytes.

Decode has a module of its own. Attention has four routes, by request:

- ``flash``: PyTorch's CPU flash kernel, sequences of equal lengths as one batch, long ones of few heads in ``tiles``;
- ``small``: plain products on the CPU, for small dense calls of unequal head dims;
- ``efficient``: PyTorch's memory-efficient CUDA kernel, dense or packed;
- ``blocked``: explicit formulas over blocks of query rows, for what neither kernel takes.

The scores are multiplied by softmax_scale only. NVTE_APPLY_QK_LAYER_SCALING, which divides by the layer number and
multiplies by it again, does not change the result and is ignored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.arguments.layout import empty_output
from mla_plugin.hooks import hookimpl
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, Gradients, Plan, Residuals
from mla_plugin.hooks.decode import DecodeOutput, DecodeRequest
from mla_plugin.hooks.types import Accepted, Platform, Refused
from mla_plugin.plugins.sdpa import batches, decode, efficient, padded
from mla_plugin.plugins.shared.refusals import beyond_grid, beyond_plain_attention

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def refusals(request: AttentionRequest, platform: Platform) -> Iterator[str]:
    """Every reason why this backend cannot compute the request."""
    if request.device_type not in ("cpu", "cuda"):
        yield f"device_type={request.device_type!r}, expected 'cpu' or 'cuda'"
    if request.device_type != platform.device_type:
        yield f"device_type={request.device_type!r} on a platform of device_type={platform.device_type!r}"
    if request.dtype not in DTYPES:
        yield f"dtype={request.dtype}, expected float32, bfloat16, float16 or float64"
    if request.bias_type not in ("no_bias", "pre_scale_bias", "post_scale_bias"):
        yield f"bias_type={request.bias_type!r}, expected 'no_bias', 'pre_scale_bias' or 'post_scale_bias'"
    if request.dropout_p and request.cuda_graph:
        yield f"dropout_p={request.dropout_p} with cuda_graph=True: every replay would drop the same weights"
    yield from beyond_plain_attention(request)


def _blocked_because(request: AttentionRequest) -> Iterator[str]:
    """Every reason why no kernel of PyTorch can compute the request; empty if the device's kernel can."""
    if request.bias_type != "no_bias":
        yield f"bias_type={request.bias_type!r}"
    if request.dropout_p:
        yield f"dropout_p={request.dropout_p}"
    if request.attn_mask_type == "arbitrary":
        yield "attn_mask_type='arbitrary'"
    if request.device_type == "cpu":
        if not request.band.is_plain:
            yield f"window_size={request.window_size}"
        return
    if not efficient.takes_band(request):
        yield f"window_size={request.window_size} with {request.attn_mask_type!r}"
    if request.dtype == torch.float64:
        yield "dtype=torch.float64"
    yield from beyond_grid(request)


@functools.lru_cache(maxsize=4096)
def _uses_kernel(request: AttentionRequest) -> bool:
    return not any(_blocked_because(request))


@hookimpl
def select_backend(request: AttentionRequest | DecodeRequest, platform: Platform) -> Accepted | Refused:
    """Take everything but what ``refusals`` names, and every decode request."""
    if isinstance(request, DecodeRequest):
        return decode.select(request, platform)
    reasons = tuple(refusals(request, platform))
    if reasons:
        return Refused(reasons)
    causes = ", ".join(_blocked_because(request))
    kernel = "CPU flash kernel" if request.device_type == "cpu" else "memory-efficient CUDA kernel"
    return Accepted(notes=(f"blocked mathematics for {causes}" if causes else f"PyTorch's {kernel}",))


def _is_empty(tensors: AttentionTensors) -> bool:
    """There is no query or no key."""
    return not (tensors.q.numel() and tensors.k.numel())


def _empty_output(request: AttentionRequest, tensors: AttentionTensors) -> AttentionOutput:
    q = tensors.q
    rows = request.layout.to_bhsd(q).shape[:-1]
    shape = rows[1:] if request.layout.is_packed else rows
    lse = q.new_full(shape, -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    return AttentionOutput(empty_output(q, tensors.v.shape[-1]).zero_(), lse)


def _empty_gradients(request: AttentionRequest, tensors: AttentionTensors) -> Gradients:
    inputs = (tensors.q, tensors.k, tensors.v)
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in inputs)
    bias = tensors.bias if request.bias_requires_grad else None
    return Gradients(dq, dk, dv, None if bias is None else torch.zeros_like(bias))


@hookimpl
def forward(plan: Plan, tensors: AttentionTensors | DecodeTensors) -> AttentionOutput | DecodeOutput:
    """Attention by the request's implementation, or decode."""
    if isinstance(tensors, DecodeTensors):
        return decode.forward(tensors)
    kept = tensors.kept
    run = None if kept is None else kept.get("sdpa")
    if run is None:
        run = _forward_of(plan.request, tensors)
        if kept is not None:
            kept["sdpa"] = run
    return run(plan.request, tensors)


def _forward_of(
    request: AttentionRequest, tensors: AttentionTensors
) -> Callable[[AttentionRequest, AttentionTensors], AttentionOutput]:
    """The implementation, for all calls that differ from this one in values and addresses only."""
    if _is_empty(tensors):
        return _empty_output
    use_kernel = _uses_kernel(request)
    if request.device_type == "cpu":
        return functools.partial(batches.forward, use_kernel=use_kernel)
    return efficient.forward_of(request, tensors) if use_kernel else padded.forward


@hookimpl
def backward(plan: Plan, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
    """Gradients by the request's implementation."""
    request = plan.request
    if _is_empty(residuals.tensors):
        return _empty_gradients(request, residuals.tensors)
    use_kernel = _uses_kernel(request)
    if request.device_type == "cpu":
        return batches.backward(request, residuals, dout, dlse, use_kernel=use_kernel)
    if use_kernel:
        return efficient.backward(request, residuals, dout, dlse)
    return padded.backward(request, residuals, dout, dlse)
