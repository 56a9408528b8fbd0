"""A way back to tensors that a gradient's node does not keep, so that a second derivative reaches an error."""

from __future__ import annotations

from typing import Any

import torch


def edge_to(*tensors: torch.Tensor) -> torch.Tensor:
    """An empty tensor that depends on the tensors and holds none of their memory.

    A backward that gets it among its saved tensors, and makes its inputs depend on it, is differentiable in them as far
    as autograd can tell: what is wrong is then said by the operator, and not by PyTorch's word on unused tensors.
    """
    return _Edge.apply(*tensors)  # type: ignore[no-any-return, no-untyped-call]


class _Edge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.count = len(tensors)
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:
        count: int = ctx.count
        return (None,) * count
