"""The interpreter of Gluon kernels finds what would hang or be undefined on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_plugin.kernels.decode import e4m3
from mla_plugin.kernels.hopper.common import gdc_wait
from tests.kernels.gluon.memory import Allocation, Descriptor, Shared
from tests.kernels.gluon.schedule import Barrier, Partition, Scheduler, StuckError
from tests.kernels.gluon.translate import Program
from tests.kernels.gluon.values import Pointer, Value, torch_dtype

PANELS = gl.NVMMASharedLayout(128, 16, 2)
SEEDS = pytest.mark.parametrize("seed", range(8))


@gluon.jit
def waits_first(X: Any) -> None:
    gdc_wait()
    gl.store(X, gl.load(X) + 1)


@gluon.jit
def waits_last(X: Any) -> None:
    gl.store(X, gl.load(X) + 1)
    gdc_wait()


@gluon.jit
def never_waits(X: Any) -> None:
    gl.store(X, gl.load(X) + 1)


def shared(*shape: int) -> Shared:
    return Shared(Allocation(gl.bfloat16, list(shape), lambda: None, lambda: 1), 0, list(shape), PANELS)


def barrier(count: int) -> Barrier:
    found = Barrier("a barrier")
    found.init(count)
    return found


def run(seed: int, make: Callable[[Scheduler], list[Callable[[], None]]]) -> None:
    scheduler = Scheduler(seed)
    scheduler.run([Partition(function, f"partition {n}") for n, function in enumerate(make(scheduler))])


def descriptor(x: torch.Tensor, rows: int) -> Descriptor:
    columns = x.shape[-1]
    given = SimpleNamespace(base=x, shape=list(x.shape), strides=list(x.stride()), block_shape=[rows, columns])
    given.layout = PANELS
    return Descriptor(given)


@SEEDS
def test_partitions_that_wait_for_each_other(seed: int) -> None:
    full, empty = barrier(1), barrier(1)

    def make(scheduler: Scheduler) -> list[Callable[[], None]]:
        def loading() -> None:
            scheduler.wait(empty, 0)
            full.arrive()

        def computing() -> None:
            scheduler.wait(full, 0)
            empty.arrive()

        return [loading, computing]

    with pytest.raises(StuckError, match="a barrier"):
        run(seed, make)


@SEEDS
def test_partitions_that_take_turns_end(seed: int) -> None:
    full, empty = barrier(1), barrier(1)
    values: list[int] = []

    def make(scheduler: Scheduler) -> list[Callable[[], None]]:
        def loading() -> None:
            for step in range(4):
                scheduler.wait(empty, step & 1 ^ 1)
                values.append(step)
                full.arrive()

        def computing() -> None:
            for step in range(4):
                scheduler.wait(full, step & 1)
                assert values == list(range(step + 1))
                empty.arrive()

        return [loading, computing]

    run(seed, make)
    assert values == [0, 1, 2, 3]


def test_a_failure_of_a_partition_is_raised() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(0, lambda scheduler: [fail])


def test_too_many_arrivals() -> None:
    with pytest.raises(RuntimeError, match="3 arrivals in a phase of 2"):
        barrier(2).arrive(3)


@pytest.mark.parametrize(("expected", "ends"), [(8 * 64 * 2, True), (8 * 64, False), (9 * 64 * 2, False)])
def test_a_phase_ends_with_the_bytes_that_it_expects(expected: int, ends: bool) -> None:
    source = torch.arange(8 * 64).view(8, 64).bfloat16()
    target, full = shared(8, 64), barrier(1)
    target.write(torch.zeros(8, 64))
    full.expect(expected)
    full.copy(descriptor(source, 8), [0, 0], target)
    assert target.read().isnan().all()  # not landed yet
    assert not full.has_ended(0)
    full.land()
    assert torch.equal(target.read(), source)
    assert full.has_ended(0) == ends


def test_a_copy_beyond_the_tensor_gives_zeros() -> None:
    source = torch.ones(5, 64, dtype=torch.bfloat16)
    found = descriptor(source, 4).tile([3, 0])
    assert torch.equal(found, torch.tensor([1.0, 1, 0, 0]).bfloat16()[:, None].expand(4, 64))


def program() -> Any:
    """A program, one of whose partitions is this thread."""
    found = Program((1, 1, 1), (0, 0, 0), 0)
    partition = Partition(lambda: None, "partition")
    partition.bit = 1
    found._scheduler.local.partition = partition
    return found


def written(interpreted: Any, rows: int, columns: int) -> Shared:
    found = interpreted._allocate(gl.bfloat16, [rows, columns], PANELS)
    found.store(Value(torch.ones(rows, columns)))
    return found


def test_a_product_needs_a_fence_and_a_wait() -> None:
    interpreted = program()
    a, b = written(interpreted, 64, 64), written(interpreted, 64, 64)
    zeros = Value(torch.zeros(64, 64))
    with pytest.raises(RuntimeError, match="without fence_async_shared"):
        interpreted._multiply(a, b, zeros)
    interpreted = program()
    a, b = written(interpreted, 64, 64), written(interpreted, 64, 64)
    interpreted._fence()
    found = interpreted._multiply(a, b, zeros, is_async=True)
    with pytest.raises(RuntimeError, match="before warpgroup_mma_wait"):
        found.data  # noqa: B018
    with pytest.raises(RuntimeError, match="1 products in flight"):
        interpreted._scheduler.current.check_idle()
    interpreted._wait_for_products(0, [found])
    assert (found.data == 64).all()
    found = interpreted._multiply(a, b, zeros, is_async=True)
    b.write(torch.full((64, 64), 2.0))
    with pytest.raises(RuntimeError, match="changes while a product reads it"):
        interpreted._wait_for_products(0, [found])


def test_copies_by_threads_need_a_wait_and_then_a_fence() -> None:
    interpreted = program()
    current = interpreted._scheduler.current
    a, zeros = written(interpreted, 64, 64), Value(torch.zeros(64, 64))
    target = interpreted._allocate(gl.bfloat16, [64, 64], PANELS)
    source = Pointer.of(torch.ones(64, 64, dtype=torch.bfloat16)) + Value(torch.arange(4096).view(64, 64))
    exists = Value(torch.arange(64) < 63)[:, None]
    for _ in range(2):
        current.copy(source, exists, target)
        interpreted._commit_copies()
    interpreted._fence()  # too early
    interpreted._wait_for_copies(2)
    assert target.read().isnan().all()  # none has landed yet
    with pytest.raises(RuntimeError, match="copies in flight"):
        current.check_idle()
    interpreted._wait_for_copies(0)
    assert (target.read()[:63] == 1).all()
    assert target.read()[63].isnan().all()  # left out: undefined
    with pytest.raises(RuntimeError, match="without fence_async_shared"):
        interpreted._multiply(target, a, zeros)
    interpreted._fence()
    assert (interpreted._multiply(target, a, zeros).data[:63] == 64).all()
    current.check_idle()


def test_words_of_four_bytes() -> None:
    """They are written where their halves lie."""
    x = torch.randn(64, 128).bfloat16()
    panels = shared(2, 64, 64)
    words = gl.NVMMASharedLayout(128, 32, 2)
    panels.index(0)._reinterpret(gl.int32, [64, 64], words).store(Value(x.view(torch.int32)))
    assert torch.equal(panels.index(0).read(), x[:, :64])
    assert torch.equal(panels.index(1).read(), x[:, 64:])
    assert not panels.index(1).is_fenced()
    with pytest.raises(AssertionError):
        panels.index(0)._reinterpret(gl.int32, [64, 32], PANELS)


@pytest.mark.parametrize("dtype", [gl.bfloat16, gl.float16])
def test_words_of_e4m3(dtype: Any) -> None:
    """Every byte."""
    found = torch_dtype(dtype)
    x = torch.arange(256, dtype=torch.uint8).view(4, 64)
    convert = program().translated(e4m3.words_from_e4m3)
    scale = torch.tensor([[1.0], [3.0], [0.7], [1e-3]])
    values = x.view(torch.float8_e4m3fn).float()
    cases = [(None, values), (Value(scale), values * scale)]
    for factor, expected in cases[: 1 + (dtype == gl.bfloat16)]:
        low, high = convert(Value(x.view(torch.int32)), factor, dtype)
        halves = torch.stack([low.data, high.data], -1).view(4, -1).view(found)
        assert torch.equal(halves.nan_to_num(7.0), expected.to(found).nan_to_num(7.0))
        assert halves.isnan().sum() == 2


def test_views_of_shared_memory() -> None:
    x = torch.arange(16 * 128).view(16, 128).bfloat16()
    memory = shared(16, 128)
    assert memory.read().isnan().all()  # nobody wrote it
    memory.write(x)
    assert torch.equal(memory.permute((1, 0)).read(), x.T)
    as_panels = memory._reinterpret(gl.bfloat16, [2, 16, 64], PANELS)
    assert torch.equal(as_panels.index(1).read(), x[:, 64:])
    assert torch.equal(as_panels.index(1).slice(0, 32, 1).permute((1, 0)).read(), x[:, 64:96].T)
    with pytest.raises(IndexError, match="index 2"):
        as_panels.index(2)
    with pytest.raises(IndexError, match="ends behind"):
        as_panels.index(1)._reinterpret(gl.bfloat16, [32, 64], PANELS)


def test_addresses() -> None:
    pointer = Pointer.of(torch.arange(4, dtype=torch.int32))
    assert (pointer + Value(torch.arange(4))).load().data.tolist() == [0, 1, 2, 3]
    inside = Value(torch.tensor([True, False]))
    assert (pointer + Value(torch.tensor([3, 4]))).load(inside, -1).data.tolist() == [3, -1]
    for wrong in (-1, 4):
        with pytest.raises(RuntimeError, match=f"outside of its tensor's memory: element {wrong}"):
            (pointer + wrong).load()
    with pytest.raises(RuntimeError, match="not aligned to 8 bytes"):
        (pointer + 1).to(SimpleNamespace(element_ty=gl.int64)).load()


@pytest.mark.parametrize(
    ("kernel", "may_overlap", "error"),
    [
        *((waits_first, False, None), (waits_first, True, None), (waits_last, True, None)),
        (waits_last, False, "before gdc_wait"),
        *((never_waits, False, "before gdc_wait"), (never_waits, True, "ends without gdc_wait")),
    ],
)
def test_a_dependent_launch_waits_for_the_kernel_before_it(kernel: Any, may_overlap: bool, error: str | None) -> None:
    x = torch.ones(1, dtype=torch.int32)
    interpreted = Program((1, 1, 1), (0, 0, 0), 0, is_dependent=True, may_overlap=may_overlap)
    if error is None:
        interpreted.run(kernel, {"X": Pointer.of(x)})
        assert x.item() == 2
    else:
        with pytest.raises(RuntimeError, match=error):
            interpreted.run(kernel, {"X": Pointer.of(x)})
