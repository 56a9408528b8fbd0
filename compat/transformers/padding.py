"""Masked keys, and the permutation that moves the tokens of each row to its front."""

from __future__ import annotations

import torch


def tokens_first(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of bool [B, n]: the order of each row's keys with its tokens first, [B, n], and cumulative numbers of tokens."""
    order = tokens.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return order, torch.nn.functional.pad(tokens.sum(1).cumsum(0), (1, 0)).to(torch.int32)


def hidden_by(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Where a 4-D mask hides keys: transformers writes the lowest number of either dtype into an additive one."""
    if mask.dtype == torch.bool:
        return ~mask
    return mask <= max(torch.finfo(mask.dtype).min, torch.finfo(dtype).min)
