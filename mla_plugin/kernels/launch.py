"""Launching one kind of call again and again at little cost."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import triton


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
    the only property of the remaining arguments that a compiled kernel depends on. It gets addresses instead of
    tensors: the launcher would ask the driver about each tensor.

    Attributes:
        kernel: the jitted function.
        grid: number of programs.
        arguments: what follows the tensors and the values.
        options: num_warps, num_stages, maxnreg, launch_pdl.
        compiled: the kernel for aligned tensors, once there is one.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: tuple[object, ...]
    options: dict[str, int | None]
    compiled: Any = None

    def __call__(self, *tensors: torch.Tensor | None, values: tuple[object, ...] = ()) -> None:
        """Launch on the current device and stream; ``values`` change from call to call, their types do not."""
        addresses = [None if x is None else x.data_ptr() for x in tensors]
        aligned = not any(address and address % 16 for address in addresses)
        if aligned and self.compiled is not None:
            self.compiled[self.grid](*addresses, *values, *self.arguments)
            return
        compiled = self.kernel[self.grid](*tensors, *values, *self.arguments, **self.options)
        if aligned:
            self.compiled = compiled


@dataclass(frozen=True)
class KernelCall:
    """One launch that is not repeated: kernel, number of programs, all its arguments, its options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[object, ...]
    options: dict[str, int | None]

    def __call__(self) -> None:
        """Launch on the current device and stream."""
        self.kernel[self.grid](*self.arguments, **self.options)


def compile_together(calls: Sequence[KernelCall], device: torch.device) -> None:
    """Compile and load what these calls need on a CUDA device and is not there yet, side by side; without a launch.

    Triton's compiler works outside of Python's lock, and its assembler and the compiler of its launchers are processes
    of their own, so three kernels take little longer than the slowest of them.
    """

    def load(kernel: Any) -> None:
        with torch.cuda.device(device):  # a thread starts on device 0
            kernel[(1, 1, 1)]

    with ThreadPoolExecutor(len(calls)) as threads:
        with triton.AsyncCompileMode(threads):
            found = [call.kernel.warmup(*call.arguments, grid=call.grid, **call.options) for call in calls]
        kernels = [kernel.result() if hasattr(kernel, "result") else kernel for kernel in found]
        list(threads.map(load, kernels))
