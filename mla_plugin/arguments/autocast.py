"""Whether ``torch.autocast`` is on, in eager and in traced code."""

from __future__ import annotations

import torch


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that autocast casts to on this type of device; None where it is off, or is not for the type (meta)."""
    if torch.compiler.is_compiling():  # the other functions cannot be traced by PyTorch 2.11
        is_on = device_type != "meta" and torch.is_autocast_enabled(device_type)
    else:
        is_on = (
            torch._C._is_any_autocast_enabled()
            and torch.amp.is_autocast_available(device_type)
            and torch.is_autocast_enabled(device_type)
        )
    return torch.get_autocast_dtype(device_type) if is_on else None
