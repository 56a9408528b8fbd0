"""The latents as rows of one matrix, x = [c_kv, k_rope], and their gradients from it."""

from __future__ import annotations

import torch

from mla_plugin.arguments.latent import LatentSizes, LatentTensors


def join(tensors: LatentTensors) -> torch.Tensor:
    """[..., R + Dr], with the leading dimensions of c_kv; a copy."""
    return torch.cat([tensors.c_kv, tensors.k_rope], -1)


def clear_padding(x: torch.Tensor, tensors: LatentTensors, sizes: LatentSizes) -> torch.Tensor:
    """Set padding rows to 0, in place.

    They may hold NaN, and 0 * NaN is NaN, so they must not enter a sum over tokens.

    Args:
        x: [..., R + Dr] of whole sequences.
        tensors: with the offsets of the sequences.
        sizes: of the call.

    Returns:
        x.
    """
    is_padding = _padding(x.shape[sizes.tokens_axis], tensors, sizes)
    return x if is_padding is None else x.masked_fill_(is_padding[..., None], 0)


def split(dx: torch.Tensor, tensors: LatentTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """dc_kv and dk_rope of dx [tokens, R + Dr], contiguous, in the dtype of the latents; rounded only here."""
    rank = tensors.c_kv.shape[-1]
    dc_kv, dk_rope = tensors.c_kv.new_empty(tensors.c_kv.shape), tensors.k_rope.new_empty(tensors.k_rope.shape)
    dc_kv.flatten(0, -2).copy_(dx[:, :rank])
    dk_rope.flatten(0, -2).copy_(dx[:, rank:])
    return dc_kv, dk_rope


def _padding(tokens: int, tensors: LatentTensors, sizes: LatentSizes) -> torch.Tensor | None:
    """True for the tokens that belong to no sequence, found on the device; None for a call without lengths."""
    cu, padded = tensors.cu_seqlens_kv, tensors.cu_seqlens_kv_padded
    if cu is None:
        return None
    lengths = cu.diff()
    position = torch.arange(tokens, device=cu.device)
    if not sizes.layout.is_packed:
        outside = position >= lengths[:, None]  # [B, S]
        return outside.t() if sizes.tokens_axis == 0 else outside
    if lengths.shape[0] == 0:
        return torch.ones_like(position, dtype=torch.bool)
    starts = (cu if padded is None else padded)[:-1].long().contiguous()
    sequence = (
        torch.searchsorted(starts, position, right=True) - 1
    )  # the last of the sequences that start at the same token
    clamped = sequence.clamp(min=0)
    return (sequence < 0) | (position - starts[clamped] >= lengths[clamped])
