"""What ``torch.autocast`` does to the arguments of an operation, in eager and in traced code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that autocast casts to on this device type; None if it is off or does not support the type (meta)."""
    if torch.compiler.is_compiling():  # the other functions cannot be traced by PyTorch 2.11
        is_on = device_type != "meta" and torch.is_autocast_enabled(device_type)
    else:
        is_on = (
            torch._C._is_any_autocast_enabled()
            and torch.amp.is_autocast_available(device_type)
            and torch.is_autocast_enabled(device_type)
        )
    return torch.get_autocast_dtype(device_type) if is_on else None


def autocast(*tensors: Any, cast: Callable[[torch.Tensor, torch.dtype], torch.Tensor] | None = None) -> tuple[Any, ...]:
    """Under autocast, cast as PyTorch's scaled_dot_product_attention does: floating-point tensors except float64.

    Args:
        tensors: of a call; the first one's device counts. None stays None.
        cast: casts a castable tensor; default ``.to``.
    """
    if not (torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled()):
        return tensors
    first = tensors[0]
    if not isinstance(first, torch.Tensor) or (dtype := autocast_dtype(first.device.type)) is None:
        return tensors
    cast = cast or _cast
    return tuple(None if x is None else cast(x, dtype) for x in tensors)


def is_castable(x: Any) -> bool:
    """True for a tensor whose dtype autocast changes."""
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if is_castable(x) else x


def as_if_cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor with the shape and dtype that ``autocast`` gives, but not the values: one element is expanded."""
    if not is_castable(x) or x.dtype == dtype:
        return x
    return x.new_empty((), dtype=dtype).expand(x.shape).requires_grad_(x.requires_grad and torch.is_grad_enabled())
