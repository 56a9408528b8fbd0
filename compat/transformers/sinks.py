"""Attention sinks: one more score per row, which takes weight and has no value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch


def with_sinks(attend: Callable[..., Any], *tensors: Any, s_aux: torch.Tensor | None, **arguments: Any) -> torch.Tensor:
    """``attend(*tensors, **arguments)``, then the sinks.

    A sink adds exp(s_aux) to the softmax's denominator exp(lse), which scales the row by sigmoid(lse - s_aux).

    Args:
        attend: ``mla_plugin.attention`` or ``mla_plugin.decode``.
        *tensors: its positional arguments.
        s_aux: [H] or None.
        **arguments: its other arguments.

    Returns:
        out [..., S_q, H, D].
    """
    if s_aux is None:
        plain: torch.Tensor = attend(*tensors, **arguments)
        return plain
    out, lse = attend(*tensors, return_lse=True, **arguments)
    weight = torch.sigmoid(lse.transpose(-1, -2) - s_aux)  # [..., S_q, H]
    return cast(torch.Tensor, out * weight.unsqueeze(-1).to(out.dtype))
