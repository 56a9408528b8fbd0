"""Recognises dense masks of bidirectional attention that describe padded keys or packed sequences.

Text encoders get a bool mask in which all queries of a row see the same keys; transformers expands it over the queries,
which its strides show. The image tower of Pixtral, also in Mistral Large 4, gets an additive mask with one block per
image; no argument gives their bounds, so the mask is read, once for all layers of a forward.
"""

from __future__ import annotations

from typing import Any

import torch

from mla_plugin.compat.transformers.padding import hidden_by


def padded_keys(mask: torch.Tensor, s_q: int) -> torch.Tensor | None:
    """Which keys every query and head of a row sees, bool [B or 1, S_kv]; None for other masks. Reads no value."""
    if mask.ndim != 4 or mask.dtype != torch.bool or s_q == 1:
        return None
    is_same = (mask.shape[dim] == 1 or mask.stride(dim) == 0 for dim in (1, 2))
    return mask[:, 0, 0] if all(is_same) else None


def sequences(mask: torch.Tensor, dtype: torch.dtype) -> dict[str, Any] | None:
    """Packing arguments if the mask is block-diagonal, one block per sequence; None for other masks.

    Synchronises with the device, twice for a new mask.

    Args:
        mask: [B, 1, S, S], bool or additive.
        dtype: of the queries.
    """
    is_mask = mask.ndim == 4 and (mask.dtype == torch.bool or mask.is_floating_point())
    if torch.compiler.is_compiling() or not is_mask or mask.shape[1] != 1 or mask.shape[2] != mask.shape[3]:
        return None
    if mask.is_inference():  # inference tensors have no version counter
        return _sequences(mask, dtype)
    known = getattr(mask, "sequences", None)
    if known is None or known[0] != mask._version:
        known = mask.sequences = (mask._version, _sequences(mask, dtype))  # type: ignore[attr-defined]
    found: dict[str, Any] | None = known[1]
    return found


def _sequences(mask: torch.Tensor, dtype: torch.dtype) -> dict[str, Any] | None:
    hidden = hidden_by(mask, dtype)
    visible = ~hidden[:, 0]
    first = visible.to(torch.int8).argmax(-1)  # [B, S], the first key that each query sees
    is_block = (first[:, :, None] == first[:, None, :]) == visible
    is_ordered = first.diff(dim=1) >= 0
    checks = [is_block.all(), is_ordered.all()]
    if mask.dtype != torch.bool:
        checks.append((mask.masked_fill(hidden, 0.0) == 0).all())
    if not bool(torch.stack(checks).all()):
        return None
    position = torch.arange(first.shape[1], device=first.device)
    starts = (first == position).flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(starts, (0, 1), value=first.numel())
    longest = int(cu_seqlens.diff().max())
    cu_seqlens = cu_seqlens.to(torch.int32)
    return {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_kv": cu_seqlens,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }
