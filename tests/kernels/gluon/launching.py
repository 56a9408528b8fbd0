"""Runs the launch of a Gluon kernel on a CPU, as ``Launch`` would on a GPU."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_plugin.kernels.launch import Launch
from tests.kernels.gluon.memory import Descriptor
from tests.kernels.gluon.translate import Program
from tests.kernels.gluon.values import Pointer, as_value

_OVERLAPPING = {"attention_backward_q_kernel": "attention_backward_kv_kernel"}
"""Kernels that read nothing that the one before them in the stream writes, and that one."""


def _argument(x: Any, is_constant: bool) -> Any:
    if is_constant or x is None:
        return x
    if isinstance(x, torch.Tensor):
        return Pointer.of(x)
    return Descriptor(x) if isinstance(x, TensorDescriptor) else as_value(x)


def run(launch: Launch, *given: object, seed: int = 0) -> None:
    """Every program of the grid, one after another."""
    kernel = launch.kernel
    constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    values = dict(zip(kernel.arg_names, (*given, *launch.arguments), strict=True))
    for n, index in enumerate(itertools.product(*(range(size) for size in launch.grid))):
        arguments = {name: _argument(x, name in constants) for name, x in values.items()}
        is_dependent, may_overlap = bool(launch.options.get("launch_pdl")), kernel.__name__ in _OVERLAPPING
        num_warps = launch.options.get("num_warps") or 4
        Program(launch.grid, index, 1000 * seed + n, is_dependent, may_overlap, num_warps).run(kernel, arguments)


def _launch(launch: Launch, arguments: tuple[object, ...], seed: int) -> None:
    if isinstance(launch.kernel, GluonJITFunction):
        run(launch, *arguments, seed=seed)
    else:
        launch.kernel[launch.grid](*arguments, *launch.arguments, **launch.options)


def interpreting(seed: int) -> Callable[..., None]:
    """``Launch.__call__``, with Gluon kernels here, in an order of partitions by ``seed``, others in Triton's.

    A kernel that another one may overlap runs after that one for every second seed.
    """
    seeds = itertools.count(seed)
    held: list[Callable[[], None]] = []

    def call(self: Launch, *arguments: object) -> None:
        name, number = self.kernel.__name__, next(seeds)
        launched = functools.partial(_launch, self, arguments, number)
        if name in _OVERLAPPING.values():
            held.append(launched)
            return
        calls = [*held, launched]
        held.clear()
        if name in _OVERLAPPING and number % 2:
            calls.reverse()
        for each in calls:
            each()

    return call
