"""Sums over sections: the softmax over several sets of keys, from the softmax over each."""

from __future__ import annotations

import torch

from mla_plugin.arguments.layout import Layout


def per_head(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Values of lse's shape, viewed so that they multiply a tensor of out's shape."""
    rows = x.unsqueeze(0) if layout.is_packed else x
    return layout.from_bhsd(rows.unsqueeze(-1))


def merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor, layout: Layout) -> None:
    """Add a section to out and lse, in place.

    lse' = log(e^lse + e^part_lse), out' = out e^(lse - lse') + part e^(part_lse - lse'). Where both are -inf no key
    is visible and lse - lse' would be NaN: there 0 is subtracted instead, and out stays 0.

    Args:
        out: float32 or float64, any strides; 0 where lse is -inf.
        lse: the same dtype, [B, H, S] or [H, T], any strides.
        part: out's shape, any floating dtype.
        part_lse: lse's shape and dtype.
        layout: of out.
    """
    total = torch.logaddexp(lse, part_lse)
    base = total.masked_fill(total.isneginf(), 0)
    out.mul_(per_head((lse - base).exp_(), layout))
    out.addcmul_(part, per_head((part_lse - base).exp_(), layout))
    lse.copy_(total)
