"""Keeps an autograd connection to tensors that are not saved, so that a second derivative raises a clear error."""

from __future__ import annotations

from typing import Any

import torch


def edge_to(*tensors: torch.Tensor) -> torch.Tensor:
    """An empty tensor that depends on the tensors and holds none of their memory.

    A backward that saves it is differentiable in the tensors as far as autograd can tell. So a second derivative gets
    the operator's own error, not PyTorch's error about unused tensors.
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
