"""Latent attention on one device."""

from __future__ import annotations

import torch

from mla_plugin.arguments.latent import LatentSizes, LatentTensors
from mla_plugin.arguments.options import CallOptions
from mla_plugin.hooks.attention import AttentionOutput
from mla_plugin.operations.latent import compute
from mla_plugin.operations.latent.compute import Call, Decision, Part


def decide(tensors: LatentTensors, options: CallOptions, backend: str | None) -> Decision:
    """Check and resolve the call; errors as ``compute.decide``."""
    return compute.decide(_call(tensors, options), backend)


def forward(tensors: LatentTensors, options: CallOptions, decision: Decision) -> AttentionOutput:
    """out and lse."""
    call = _call(tensors, options)
    return compute.forward(call, decision, latent_rows(tensors, call.sizes))


def backward(
    tensors: LatentTensors,
    options: CallOptions,
    decision: Decision,
    output: AttentionOutput,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    *,
    wants_latents: bool,
    wants_weights: bool,
) -> tuple[torch.Tensor | None, ...]:
    """dq, dc_kv, dk_rope, dw_uk, dw_uv; None where none is wanted."""
    call = _call(tensors, options)
    x = latent_rows(tensors, call.sizes)
    wants = {"wants_latents": wants_latents, "wants_weights": wants_weights}
    found = compute.backward(call, decision, x, output, dout, dlse, **wants)
    if found.dx is None:
        return found.dq, None, None, found.dw_uk, found.dw_uv
    dc_kv, dk_rope = split_rows(found.dx, tensors)
    return found.dq, dc_kv, dk_rope, found.dw_uk, found.dw_uv


def _call(tensors: LatentTensors, options: CallOptions) -> Call:
    sizes = LatentSizes.of(tensors, options.qkv_format)
    q = tensors.q if tensors.q.stride(-1) == 1 else tensors.q.contiguous()
    leading = tuple(tensors.c_kv.shape[:-1])
    parts = (Part(options, tensors.lengths),)
    return Call(q, tensors.w_uk, tensors.w_uv, tensors.softmax_scale, sizes, leading, parts)


def latent_rows(tensors: LatentTensors, sizes: LatentSizes) -> torch.Tensor:
    """x = [c_kv, k_rope] as [tokens, R + Dr]; rows of padding are 0, whatever the caller has there.

    0 times NaN is NaN, so what is in these rows must not enter a sum over tokens.
    """
    x = torch.cat([tensors.c_kv, tensors.k_rope], -1)
    is_padding = _padding(tensors, sizes)
    if is_padding is not None:
        x.masked_fill_(is_padding[..., None], 0)
    return x.flatten(0, -2)


def split_rows(dx: torch.Tensor, tensors: LatentTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """dc_kv and dk_rope of dx [tokens, R + Dr], contiguous, in the dtype of the latents: the one rounding."""
    rank = tensors.c_kv.shape[-1]
    dc_kv, dk_rope = tensors.c_kv.new_empty(tensors.c_kv.shape), tensors.k_rope.new_empty(tensors.k_rope.shape)
    dc_kv.view(-1, rank).copy_(dx[:, :rank])
    dk_rope.flatten(0, -2).copy_(dx[:, rank:])
    return dc_kv, dk_rope


def _padding(tensors: LatentTensors, sizes: LatentSizes) -> torch.Tensor | None:
    """True for the tokens of c_kv that belong to no sequence, found on the device; None for a call without lengths."""
    cu, padded = tensors.cu_seqlens_kv, tensors.cu_seqlens_kv_padded
    if cu is None:
        return None
    lengths = cu.diff()
    position = torch.arange(tensors.c_kv.shape[sizes.tokens_axis], device=cu.device)
    if not sizes.layout.is_packed:
        outside = position >= lengths[:, None]  # [B, S]
        return outside.t() if sizes.tokens_axis == 0 else outside
    if lengths.shape[0] == 0:
        return torch.ones_like(position, dtype=torch.bool)
    starts = (cu if padded is None else padded)[:-1].long().contiguous()
    sequence = torch.searchsorted(starts, position, right=True) - 1  # the last of those that start at one place
    clamped = sequence.clamp(min=0)
    return (sequence < 0) | (position - starts[clamped] >= lengths[clamped])
