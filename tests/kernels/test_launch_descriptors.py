"""Launches that encode each descriptor once hand the driver what Triton's own launcher hands it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from triton.backends.nvidia import driver

from mla_plugin.kernels import launch
from mla_plugin.kernels.launch import descriptor

GRID, STREAM = (7, 1, 1), 4711
SIGNATURE = {
    0: "tensordesc<bf16[1, 1, 64, 64]>",
    1: "*fp32",
    2: "tensordesc<bf16[1, 1, 32, 64]>",
    3: "i32",
    4: "constexpr",
}
METADATA = [{"kind": "first"}, {"kind": "second"}]


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """What was encoded for which kind of descriptor."""
    found: list[tuple[Any, Any]] = []

    def encode(x: Any, kind: Any) -> list[object]:
        found.append((x, kind))
        return [("map", x.base.data_ptr(), kind["kind"]), *x.shape, *x.strides]

    monkeypatch.setattr(driver, "make_tensordesc_arg", encode)
    return found


class Launcher(driver.CudaLauncher):
    """Triton's, but that the driver only notes what it is given."""

    def __init__(self, signature: dict[int, str], metadata: list[Any]) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.num_ctas = 1
        self.launch = driver.wrap_handle_tensordesc(lambda *given: self.calls.append(given), signature, metadata)
        self.global_scratch_size = self.profile_scratch_size = 0
        self.global_scratch_align = self.profile_scratch_align = 1
        self.launch_cooperative_grid, self.launch_pdl = False, True
        if triton.__version__.startswith("3.7"):
            self.arg_annotations, self.kernel_signature = "annotations", "signature"


def arguments(address: int) -> tuple[object, ...]:
    first = descriptor(address, torch.bfloat16, (1, 2, 70, 64), (8960, 4480, 64), (1, 1, 64, 64))
    second = descriptor(2 * address, torch.bfloat16, (1, 2, 70, 64), (8960, 4480, 64), (1, 1, 32, 64))
    return first, address, second, 3, 64


def test_the_driver_gets_the_same(encodings: list[tuple[Any, Any]]) -> None:
    run = Launcher(SIGNATURE, METADATA)
    direct = launch._direct(run, GRID, "function", "metadata")
    assert direct is not None
    for address in (1 << 20, 1 << 21, 1 << 20):
        run(*GRID, STREAM, "function", "metadata", None, None, None, *arguments(address))
        direct(STREAM, arguments(address))
        wanted, found = run.calls[-2:]
        assert found == wanted
    assert len(encodings) == 3 * 2 + 2 * 2  # by Triton in every launch, here once for each address


def test_the_same_descriptor_in_two_places(encodings: list[tuple[Any, Any]]) -> None:
    """The kernel may want it encoded in two ways."""
    run = Launcher(SIGNATURE, METADATA)
    direct = launch._direct(run, GRID, "function", "metadata")
    assert direct is not None
    x = arguments(1 << 20)[0]
    for _ in range(2):
        run(*GRID, STREAM, "function", "metadata", None, None, None, x, 1, x, 3, 64)
        direct(STREAM, (x, 1, x, 3, 64))
        assert run.calls[-1] == run.calls[-2]


def test_many_addresses_are_not_kept(encodings: list[tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_MAX_ENCODED", 4)
    run = Launcher(SIGNATURE, METADATA)
    direct = launch._direct(run, GRID, "function", "metadata")
    assert direct is not None
    for n in range(20):
        run(*GRID, STREAM, "function", "metadata", None, None, None, *arguments((n % 7 + 1) << 20))
        direct(STREAM, arguments((n % 7 + 1) << 20))
        assert run.calls[-1] == run.calls[-2]


def test_other_launchers_are_left_alone() -> None:
    assert launch._direct(Launcher({0: "*fp32"}, []), GRID, "function", "metadata") is None
    assert launch._direct(Launcher(SIGNATURE, [None, None]), GRID, "function", "metadata") is None
    with_scratch = Launcher(SIGNATURE, METADATA)
    with_scratch.global_scratch_size = 128
    assert launch._direct(with_scratch, GRID, "function", "metadata") is None
