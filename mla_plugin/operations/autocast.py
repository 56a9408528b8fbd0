"""What autocast does to the arguments of an operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def autocast(*tensors: Any, cast: Callable[[torch.Tensor, torch.dtype], torch.Tensor] | None = None) -> tuple[Any, ...]:
    """Under autocast, cast as PyTorch's own scaled_dot_product_attention does: floating-point tensors but float64.

    Args:
        tensors: of a call; the first says the device. None stays None.
        cast: how; the default is ``.to`` for those that are castable.
    """
    if not torch._C._is_any_autocast_enabled() or not isinstance(tensors[0], torch.Tensor):
        return tensors
    device_type = tensors[0].device.type
    if not (torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    cast = cast or _cast
    return tuple(None if x is None else cast(x, dtype) for x in tensors)


def is_castable(x: Any) -> bool:
    """A tensor that autocast changes the dtype of."""
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if is_castable(x) else x
