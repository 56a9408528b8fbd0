"""``Launch`` with a kernel that only notes how it is called."""

from __future__ import annotations

import contextlib

import pytest
import torch

from mla_plugin.kernels.launch import Launch, on_device_of

GRID = (7, 1, 1)


class Compiled:
    """What Triton returns from a launch, and launches again."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        assert grid == GRID
        return lambda *arguments: self.calls.append(arguments)


class Kernel:
    """A jitted function."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[object, ...], dict[str, object]]] = []
        self.compiled = Compiled()

    def __getitem__(self, grid: tuple[int, ...]):
        assert grid == GRID

        def call(*arguments: object, **options: object) -> Compiled:
            self.calls.append((arguments, options))
            return self.compiled

        return call


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def launch(kernel: Kernel) -> Launch:
    return Launch(kernel, GRID, ("size", 3), {"num_warps": 8})


def aligned() -> torch.Tensor:
    return torch.empty(64)


def misaligned() -> torch.Tensor:
    return torch.empty(64)[1:]


def test_the_first_aligned_call_goes_through_triton_and_the_next_past_it(kernel: Kernel, launch: Launch) -> None:
    first, second = (aligned(), None), (aligned(), None)
    launch(*first)
    launch(*second)
    assert kernel.calls == [((*first, "size", 3), {"num_warps": 8})]
    assert kernel.compiled.calls == [(*second, "size", 3)]


def test_a_misaligned_tensor_is_inspected_every_time_and_leaves_the_known_kernel_alone(
    kernel: Kernel, launch: Launch
) -> None:
    for _ in range(2):
        launch(aligned(), misaligned())
    assert len(kernel.calls) == 2
    assert launch.compiled is None
    launch(aligned(), aligned())
    assert len(kernel.calls) == 3
    assert launch.compiled is kernel.compiled
    launch(misaligned(), aligned())
    assert len(kernel.calls) == 4
    assert kernel.compiled.calls == []


def test_tensors_on_the_cpu_need_no_device() -> None:
    assert isinstance(on_device_of(aligned()), contextlib.nullcontext)
