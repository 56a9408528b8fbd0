"""Descriptors keep no memory alive, and launches that encode each once hand the driver what Triton's launcher does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from triton.backends.nvidia import driver

from mla_plugin.kernels import descriptors
from mla_plugin.kernels.descriptors import descriptor, encoding_once
from tests.kernels.versions import IS_RECORDED

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
        if not triton.__version__.startswith("3.6"):
            self.arg_annotations, self.kernel_signature = "annotations", "signature"


known_launcher = pytest.mark.skipif(not IS_RECORDED, reason="the launcher of this Triton encodes in every launch")


def arguments(address: int) -> tuple[object, ...]:
    first = descriptor(address, torch.bfloat16, (1, 2, 70, 64), (8960, 4480, 64), (1, 1, 64, 64))
    second = descriptor(2 * address, torch.bfloat16, (1, 2, 70, 64), (8960, 4480, 64), (1, 1, 32, 64))
    return first, address, second, 3, 64


@known_launcher
def test_the_driver_gets_the_same(encodings: list[tuple[Any, Any]]) -> None:
    run = Launcher(SIGNATURE, METADATA)
    direct = encoding_once(run, GRID, "function", "metadata")
    assert direct is not None
    for address in (1 << 20, 1 << 21, 1 << 20):
        run(*GRID, STREAM, "function", "metadata", None, None, None, *arguments(address))
        direct(STREAM, arguments(address))
        wanted, found = run.calls[-2:]
        assert found == wanted
    assert len(encodings) == 3 * 2 + 2 * 2  # by Triton in every launch, here once for each address


@known_launcher
def test_the_driver_gets_the_same_without_descriptors() -> None:
    run = Launcher({0: "*fp32", 1: "i32", 2: "constexpr"}, [])
    direct = encoding_once(run, GRID, "function", "metadata")
    assert direct is not None
    run(*GRID, STREAM, "function", "metadata", None, None, None, 1 << 20, 3, 64)
    direct(STREAM, (1 << 20, 3, 64))
    wanted, found = run.calls
    assert found == wanted


@known_launcher
def test_the_context_is_there_before_anything_is_encoded(
    encodings: list[tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new thread has none. What is known already needs none."""
    found = []
    monkeypatch.setattr(descriptors, "make_context_current", lambda: found.append(len(encodings)))
    direct = encoding_once(Launcher(SIGNATURE, METADATA), GRID, "function", "metadata")
    assert direct is not None
    for _ in range(2):
        direct(STREAM, arguments(1 << 22))
    assert found == [0, 1]


@known_launcher
def test_the_same_descriptor_in_two_places(encodings: list[tuple[Any, Any]]) -> None:
    """The kernel may want it encoded in two ways."""
    run = Launcher(SIGNATURE, METADATA)
    direct = encoding_once(run, GRID, "function", "metadata")
    assert direct is not None
    x = arguments(1 << 20)[0]
    for _ in range(2):
        run(*GRID, STREAM, "function", "metadata", None, None, None, x, 1, x, 3, 64)
        direct(STREAM, (x, 1, x, 3, 64))
        assert run.calls[-1] == run.calls[-2]


@known_launcher
def test_one_descriptor_for_two_kernels(encodings: list[tuple[Any, Any]]) -> None:
    """Each may lay its tiles out differently."""
    other = [{"kind": "third"}, {"kind": "fourth"}]
    runs = [Launcher(SIGNATURE, metadata) for metadata in (METADATA, other)]
    given = arguments(1 << 20)
    for run in (*runs, *runs):
        direct = encoding_once(run, GRID, "function", "metadata")
        assert direct is not None
        run(*GRID, STREAM, "function", "metadata", None, None, None, *given)
        direct(STREAM, given)
        assert run.calls[-1] == run.calls[-2]


def test_other_launchers_are_left_alone() -> None:
    assert (encoding_once(Launcher(SIGNATURE, METADATA), GRID, "function", "metadata") is not None) == IS_RECORDED
    assert encoding_once(Launcher(SIGNATURE, [None, None]), GRID, "function", "metadata") is None
    with_scratch = Launcher({0: "*fp32"}, [])
    with_scratch.profile_scratch_size = 128
    assert encoding_once(with_scratch, GRID, "function", "metadata") is None
    with_scratch = Launcher(SIGNATURE, METADATA)
    with_scratch.global_scratch_size = 128
    assert encoding_once(with_scratch, GRID, "function", "metadata") is None


def test_a_descriptor_keeps_no_cache_alive() -> None:
    """Cached by address, with a stand-in for the tensor; the launch reads address and dtype from it."""
    first = descriptor(4096, torch.bfloat16, (9, 64, 512), (64 * 576, 576), (1, 64, 512))
    again = descriptor(4096, torch.bfloat16, (9, 64, 512), (64 * 576, 576), (1, 64, 512))
    other = descriptor(8192, torch.bfloat16, (9, 64, 512), (64 * 576, 576), (1, 64, 512))
    assert first is again
    assert first.base.data_ptr() == 4096
    assert first.base.dtype == torch.bfloat16
    assert other.base.data_ptr() == 8192
    assert not isinstance(first.base, torch.Tensor)
