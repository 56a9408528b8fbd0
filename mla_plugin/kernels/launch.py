"""Launching one kind of call again and again at little cost."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor


def on_device_of(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes x's device the current one, which is where Triton launches; costs nothing when it is already."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return contextlib.nullcontext()


class _Address:
    """Stands for a tensor in a cached descriptor, which must not keep its memory alive."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._address = address

    def data_ptr(self) -> int:
        return self._address


@functools.lru_cache(maxsize=4096)
def descriptor(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]
) -> TensorDescriptor:
    """A tensor descriptor of some memory; ``strides`` without the last, which is 1. Making one takes 10 us."""
    return TensorDescriptor(_Address(address, dtype), list(shape), [*strides, 1], list(block))


@dataclass
class Launch:
    """One kernel with everything fixed but its tensors and what else changes from call to call.

    Triton looks at every argument of every call to find the compiled kernel; that costs 25 us of CPU time, twice the
    launch. Here the compiled kernel is kept, bound to its grid, and used again while all tensors start on a 16-byte
    boundary, which is the only property of the remaining arguments that a compiled kernel depends on. It gets addresses
    instead of tensors: the launcher would ask the driver about each tensor.

    Attributes:
        kernel: the jitted function.
        grid: number of programs.
        arguments: the last arguments, the same in every call.
        options: num_warps, num_stages, maxnreg, launch_pdl.
        run: launches the compiled kernel for aligned tensors, once there is one.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: tuple[object, ...]
    options: dict[str, int | None]
    run: Any = None

    def __call__(self, *arguments: object) -> None:
        """Launch on the current device and stream.

        ``arguments`` are the first ones: tensors, descriptors, None, numbers; their types are always the same.
        """
        addresses, bits = [], 0
        for x in arguments:
            if isinstance(x, torch.Tensor):
                x = x.data_ptr()
                bits |= x
            addresses.append(x)
        if bits % 16 == 0 and self.run is not None:
            self.run(*addresses, *self.arguments)
            return
        compiled = self.kernel[self.grid](*arguments, *self.arguments, **self.options)
        if bits % 16 == 0 and compiled is not None:  # the interpreter returns nothing
            self.run = compiled[self.grid]


def compile_together(calls: Sequence[tuple[Launch, tuple[object, ...]]], device: torch.device) -> None:
    """Compile and load what these calls need on a CUDA device and is not there yet, side by side; without a launch.

    Triton's compiler works outside of Python's lock, and its assembler and the compiler of its launchers are processes
    of their own: three kernels of 1.2 s each are there after 1.5 s. While a CUDA graph is captured nothing happens,
    since other threads may not load kernels then: each is compiled and loaded at its launch.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return

    def load(kernel: Any) -> None:
        with torch.cuda.device(device):  # a thread starts on device 0
            kernel[(1, 1, 1)]

    with ThreadPoolExecutor(len(calls)) as threads:
        with triton.AsyncCompileMode(threads):
            found = [
                launch.kernel.warmup(*arguments, *launch.arguments, grid=launch.grid, **launch.options)
                for launch, arguments in calls
            ]
        kernels = [kernel.result() if hasattr(kernel, "result") else kernel for kernel in found]
        list(threads.map(load, kernels))
