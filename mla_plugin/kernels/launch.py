"""Launches the same kind of call repeatedly with low CPU overhead."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
import triton

from mla_plugin.kernels.descriptors import encoding_once, make_context_current
from mla_plugin.kernels.sources import hash_sources

_HERE = contextlib.nullcontext()


def on_device_of(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make x's device current, where Triton launches; free if it already is."""
    if x.is_cuda and x.device.index != torch._C._cuda_getDevice():
        return torch.cuda.device(x.device)
    return _HERE


def named_strides(tensor: str, axes: str, strides: Sequence[int]) -> dict[str, int]:
    """Strides by the names that kernels give them: ``("q", "bhm", ...)`` are stride_qb, stride_qh and stride_qm."""
    return {f"stride_{tensor}{axis}": stride for axis, stride in zip(axes, strides, strict=True)}


@dataclass
class Launch:
    """One kernel with all arguments fixed except its tensors and whatever else changes from call to call.

    Triton inspects every argument of every call to find the compiled kernel, which costs 25 us of CPU time, twice the
    launch. Here the compiled kernel is cached, bound to its grid, and reused while all tensors start on a 16-byte
    boundary, the only property of the remaining arguments that a compiled kernel depends on. It gets addresses instead
    of tensors, because the launcher would query the driver for each tensor.

    The kernel's arguments are declared only in its signature: a launch names them, and they are sorted into the
    signature's order here, once.

    Attributes:
        kernel: the jitted function.
        grid: number of programs.
        given: names of the arguments of each call, in order: the first ones of the signature.
        fixed: the others by name, the same in every call.
        options: num_warps, num_stages, maxnreg, launch_pdl.
        run: launches the compiled kernel for aligned tensors; set after the first compilation.
        places: of the tensors among the arguments of each call; set with ``run``.
        arguments: the values of ``fixed`` in the signature's order.

    Raises:
        TypeError: ``given`` and ``fixed`` are not the kernel's arguments; the message names the wrong ones.
    """

    kernel: Any
    grid: tuple[int, int, int]
    given: tuple[str, ...]
    fixed: InitVar[Mapping[str, object]]
    options: dict[str, int | None]
    run: Any = None
    places: tuple[int, ...] = field(init=False, default=())
    arguments: tuple[object, ...] = field(init=False)

    def __post_init__(self, fixed: Mapping[str, object]) -> None:
        first, last = self.kernel.arg_names[: len(self.given)], self.kernel.arg_names[len(self.given) :]
        if tuple(first) != self.given or set(last) != set(fixed):
            raise TypeError(_mismatch(self.kernel, self.given, fixed))
        self.arguments = tuple(fixed[name] for name in last)

    def __call__(self, *arguments: object) -> None:
        """Launch on the current device and stream.

        ``arguments`` are those named by ``given``: tensors, descriptors, None, numbers; their types never change.
        """
        run = self.run
        if run is not None:
            values: list[Any] = list(arguments)
            bits = 0
            for place in self.places:
                address = values[place] = values[place].data_ptr()
                bits |= address
            if bits % 16 == 0:
                run(*values, *self.arguments)
                return
        hash_sources(self.kernel)
        make_context_current()  # Triton encodes descriptors first
        compiled = self.kernel[self.grid](*arguments, *self.arguments, **self.options)
        if compiled is None:  # by the interpreter
            return
        places = tuple(place for place, x in enumerate(arguments) if isinstance(x, torch.Tensor))
        if all(arguments[place].data_ptr() % 16 == 0 for place in places):  # type: ignore[attr-defined]
            self.places = places  # before run, for other threads
            self.run = _bound(compiled, self.grid)


def _bound(compiled: Any, grid: tuple[int, int, int]) -> Callable[..., None]:
    """``compiled[grid]``, but 4 us faster if no profiler has hooked into Triton's launches.

    Triton collects a launch's metadata for the hooks even if there are none.
    """
    general = compiled[grid]
    run, function, metadata, knobs = compiled.run, compiled.function, compiled.packed_metadata, triton.knobs.runtime
    device = torch.cuda.current_device()
    direct = encoding_once(run, grid, function, metadata)

    def launch(*arguments: object) -> None:
        enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook  # a chain of functions, a function, or None
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            make_context_current()
            general(*arguments)
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        if direct is None:
            make_context_current()
            run(*grid, stream, function, metadata, None, None, None, *arguments)
        else:
            direct(stream, arguments)

    return launch


def _mismatch(kernel: Any, given: tuple[str, ...], fixed: Mapping[str, object]) -> str:
    """How the names of a launch differ from its kernel's signature."""
    names, launched = kernel.arg_names, [*given, *fixed]
    faults = {
        "missing": [name for name in names if name not in launched],
        "unknown": [name for name in launched if name not in names],
        "given in each call and fixed": [name for name in given if name in fixed],
    }
    found = [f"{fault}: {', '.join(those)}" for fault, those in faults.items() if those]
    order = f"each call gives {', '.join(given)}, and the signature begins with {', '.join(names[: len(given)])}"
    return f"{kernel.__name__}: {'; '.join(found) or order}"


def compile_together(calls: Sequence[tuple[Launch, tuple[object, ...]]], device: torch.device) -> None:
    """Compile and load the missing kernels of these calls on a CUDA device in parallel, without launching them.

    Triton's compiler releases the GIL, and its assembler and the compiler of its launchers are separate processes:
    three kernels of 1.2 s each are ready after 1.5 s. Does nothing while a CUDA graph is captured, when other threads
    may not load kernels: each is then compiled and loaded at its launch.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return

    def load(kernel: Any) -> None:
        with torch.cuda.device(device):  # a thread starts on device 0
            kernel[(1, 1, 1)]

    for launch, _ in calls:
        hash_sources(launch.kernel)
    with ThreadPoolExecutor(len(calls)) as threads:
        with triton.AsyncCompileMode(threads):
            found = [
                launch.kernel.warmup(*arguments, *launch.arguments, grid=launch.grid, **launch.options)
                for launch, arguments in calls
            ]
        kernels = [kernel.result() if hasattr(kernel, "result") else kernel for kernel in found]
        list(threads.map(load, kernels))
