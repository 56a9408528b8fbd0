"""``Launch`` with a kernel that only notes how it is called."""

from __future__ import annotations

import contextlib
import inspect
import threading

import pytest
import torch
import triton
from triton.knobs import HookChain
from triton.runtime import _async_compile

from mla_plugin.kernels.launch import Launch, compile_together, named_strides, on_device_of

GRID = (7, 1, 1)
STREAM = 4711


class Compiled:
    """What Triton returns from a launch: ``compiled[grid]`` launches again, and so does its launcher ``run``."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.observed: list[tuple[object, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        assert grid == GRID
        return lambda *arguments: self.observed.append(arguments)

    def run(self, *arguments: object) -> None:
        assert arguments[:9] == (*GRID, STREAM, "function", "metadata", None, None, None)
        self.calls.append(arguments[9:])


@pytest.fixture(autouse=True)
def one_device_and_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)


class Kernel:
    """A jitted function."""

    __name__ = "some_kernel"

    def __init__(self, *arg_names: str) -> None:
        self.arg_names = list(arg_names)
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
    return Kernel("X", "Y", "scale", "size", "BLOCK")


@pytest.fixture
def launch(kernel: Kernel) -> Launch:
    return Launch(kernel, GRID, ("X", "Y", "scale"), {"BLOCK": 3, "size": "size"}, {"num_warps": 8})


def aligned() -> torch.Tensor:
    return torch.empty(64)


def misaligned() -> torch.Tensor:
    return torch.empty(64)[1:]


def test_the_first_aligned_call_goes_through_triton_and_the_next_past_it(kernel: Kernel, launch: Launch) -> None:
    first, second = aligned(), aligned()
    launch(first, None, 0.5)
    launch(second, None, 0.7)
    assert kernel.calls == [((first, None, 0.5, "size", 3), {"num_warps": 8})]
    assert kernel.compiled.calls == [(second.data_ptr(), None, 0.7, "size", 3)]


def test_profilers_that_hook_into_launches_see_all_of_them(
    kernel: Kernel, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(aligned(), None, 0.5)
    chain = HookChain()
    monkeypatch.setattr(triton.knobs.runtime, "launch_exit_hook", chain)
    x = aligned()
    launch(x, None, 0.7)
    assert len(kernel.compiled.calls) == 1
    chain.add(lambda metadata: None)
    launch(x, None, 0.9)
    assert len(kernel.compiled.calls) == 1
    assert kernel.compiled.observed == [(x.data_ptr(), None, 0.9, "size", 3)]


def test_a_misaligned_tensor_is_inspected_every_time_and_leaves_the_known_kernel_alone(
    kernel: Kernel, launch: Launch
) -> None:
    for _ in range(2):
        launch(aligned(), misaligned(), 0.5)
    assert len(kernel.calls) == 2
    assert launch.run is None
    launch(aligned(), aligned(), 0.5)
    assert len(kernel.calls) == 3
    assert launch.run is not None
    launch(misaligned(), aligned(), 0.5)
    assert len(kernel.calls) == 4
    assert kernel.compiled.calls == []


@pytest.mark.parametrize(
    ("given", "fixed", "message"),
    [
        (("X", "Y"), {"scale": 1, "size": 2}, "some_kernel: missing: BLOCK$"),
        (("X",), {"scale": 1, "size": 2, "BLOCK": 3}, "some_kernel: missing: Y$"),
        ((), {}, "missing: X, Y, scale, size, BLOCK$"),
        (("X", "Y"), {"scale": 1, "size": 2, "BLOCK": 3, "stride": 4}, "unknown: stride$"),
        (("X", "Y", "Z"), {"scale": 1, "size": 2}, "missing: BLOCK; unknown: Z$"),
        (("X", "Y", "scale"), {"scale": 1, "size": 2, "BLOCK": 3}, "given in each call and fixed: scale$"),
        (("Y", "X"), {"scale": 1, "size": 2, "BLOCK": 3}, "each call gives Y, X, and the signature begins with X, Y$"),
        (("X", "scale"), {"Y": 1, "size": 2, "BLOCK": 3}, "gives X, scale, and the signature begins with X, Y$"),
    ],
)
def test_names_that_are_not_the_kernels(
    given: tuple[str, ...], fixed: dict[str, object], message: str, kernel: Kernel
) -> None:
    with pytest.raises(TypeError, match=message):
        Launch(kernel, GRID, given, fixed, {})


def test_strides_have_the_names_of_kernels() -> None:
    assert named_strides("q", "bhm", (6, 3, 1)) == {"stride_qb": 6, "stride_qh": 3, "stride_qm": 1}
    with pytest.raises(ValueError, match="shorter"):
        named_strides("l", "bh", (6,))


def test_tensors_on_the_cpu_need_no_device() -> None:
    assert isinstance(on_device_of(aligned()), contextlib.nullcontext)


class Compilable(Kernel):
    """A jitted function that can be compiled and loaded without a launch, here only while another is."""

    def __init__(self, meeting: threading.Barrier, loads: list[object]) -> None:
        super().__init__("n", "size")
        self.meeting = meeting
        self.loads = loads
        self.finished: list[object] = []

    def warmup(self, *arguments: object, grid: tuple[int, ...], **options: object) -> object:
        mode = _async_compile.active_mode.get()
        assert mode is not None
        ends = (lambda _: self.finished.append((arguments, grid, options)), lambda *_: None)
        return mode.submit(id(self), self._compile, *ends[: len(inspect.signature(mode.submit).parameters) - 2])

    def _compile(self) -> Compilable:
        self.meeting.wait(timeout=20)
        return self

    def __getitem__(self, grid: tuple[int, ...]):
        if grid == (1, 1, 1):  # what loads a compiled kernel
            self.meeting.wait(timeout=20)
            self.loads.append(self)
        return super().__getitem__(GRID)


def compilable_launch(kernel: Compilable) -> Launch:
    return Launch(kernel, GRID, ("n",), {"size": "size"}, {"num_warps": 4})


def test_kernels_are_compiled_and_loaded_side_by_side_and_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[object] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext(devices.append(device)))
    meeting, loads = threading.Barrier(2), []
    kernels = [Compilable(meeting, loads), Compilable(meeting, loads)]
    calls = [(compilable_launch(kernel), (n,)) for n, kernel in enumerate(kernels)]
    compile_together(calls, torch.device("cuda", 1))
    assert [kernel.finished for kernel in kernels] == [[((n, "size"), GRID, {"num_warps": 4})] for n in range(2)]
    assert set(loads) == set(kernels)
    assert devices == [torch.device("cuda", 1)] * 2
    assert all(kernel.calls == [] for kernel in kernels)
    calls[0][0](0)
    assert kernels[0].calls == [((0, "size"), {"num_warps": 4})]


def test_nothing_is_compiled_ahead_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernel = Compilable(threading.Barrier(1), [])
    compile_together([(compilable_launch(kernel), (0,))], torch.device("cuda", 0))
    assert kernel.finished == kernel.loads == []
