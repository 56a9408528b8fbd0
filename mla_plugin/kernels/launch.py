"""Launching one kind of call again and again at little cost."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch


def on_device_of(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes x's device the current one, which is where Triton launches; costs nothing when it is already."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return contextlib.nullcontext()


@dataclass
class Launch:
    """One kernel with everything but its tensors fixed.

    Triton looks at every argument of every call to find the compiled kernel; that costs 25 us of CPU time, twice the
    launch. Here the compiled kernel is kept, and used again while all tensors start on a 16-byte boundary, which is
    the only property of the remaining arguments that a compiled kernel depends on.

    Attributes:
        kernel: the jitted function.
        grid: number of programs.
        arguments: what follows the tensors.
        options: num_warps, num_stages, maxnreg.
        compiled: the kernel for aligned tensors, once there is one.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: tuple[object, ...]
    options: dict[str, int | None]
    compiled: Any = None

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        """Launch on the current device and stream."""
        address = 0
        for x in tensors:
            if x is not None:
                address |= x.data_ptr()
        if address % 16:
            self.kernel[self.grid](*tensors, *self.arguments, **self.options)
        elif self.compiled is None:
            self.compiled = self.kernel[self.grid](*tensors, *self.arguments, **self.options)
        else:
            self.compiled[self.grid](*tensors, *self.arguments)
