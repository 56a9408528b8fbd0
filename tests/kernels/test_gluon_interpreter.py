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
from tests.kernels.gluon import ptx
from tests.kernels.gluon.memory import Allocation, Descriptor, Shared
from tests.kernels.gluon.schedule import Barrier, Partition, Scheduler, StuckError
from tests.kernels.gluon.translate import Program
from tests.kernels.gluon.values import Pointer, Value

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


def test_a_product_of_registers_needs_a_fence_and_a_wait() -> None:
    """Of its right operand; the left one is converted in the layout of the product's operands."""
    interpreted = program()
    product = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    operand = gl.DotOperandLayout(0, product, 2)
    left, zeros = Value(torch.ones(128, 64).half(), operand), Value(torch.zeros(128, 16), product)
    b = interpreted._allocate(gl.float16, [64, 16], gl.NVMMASharedLayout(32, 16, 2))
    b.store(Value(torch.ones(64, 16)))
    with pytest.raises(RuntimeError, match="without fence_async_shared"):
        interpreted._multiply(left, b, zeros)
    interpreted._fence()
    found = interpreted._multiply(left, b, zeros, is_async=True)
    with pytest.raises(RuntimeError, match="before warpgroup_mma_wait"):
        interpreted._multiply(found, b, zeros)
    more = interpreted._multiply(Value(torch.ones(128, 64).half(), operand), b, found, is_async=True)
    b.write(torch.full((64, 16), 2.0))
    with pytest.raises(RuntimeError, match="changes while a product reads it"):
        interpreted._wait_for_products(0, [more])
    other = gl.NVMMADistributedLayout([3, 0], [2, 2], [16, 16, 16])
    wrongs = (gl.DotOperandLayout(1, product, 2), gl.DotOperandLayout(0, product, 1), gl.DotOperandLayout(0, other, 2))
    for wrong in (*wrongs, product):
        with pytest.raises(AssertionError):
            interpreted._multiply(Value(torch.ones(128, 64).half(), wrong), b, zeros)


def test_a_copy_over_what_threads_wrote_needs_a_fence() -> None:
    interpreted = program()
    target, full = written(interpreted, 8, 64), barrier(1)
    source = descriptor(torch.ones(8, 64, dtype=torch.bfloat16), 8)
    with pytest.raises(RuntimeError, match="without fence_async_shared"):
        full.copy(source, [0, 0], target)
    interpreted._fence()
    full.copy(source, [0, 0], target)


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


def test_words_of_e4m3() -> None:
    """Every byte; with a factor in bfloat16."""
    x = torch.arange(256, dtype=torch.uint8).view(4, 64)
    convert = program().translated(e4m3.words_from_e4m3)
    scale = torch.tensor([[1.0], [3.0], [0.7], [1e-3]])
    values = x.view(torch.float8_e4m3fn).float()
    for factor, expected in ((None, values.half()), (Value(scale), (values * scale).bfloat16())):
        low, high = convert(Value(x.view(torch.int32)), factor)
        halves = torch.stack([low.data, high.data], -1).view(4, -1).view(expected.dtype)
        assert torch.equal(halves.nan_to_num(7.0), expected.nan_to_num(7.0))
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


def test_rows_and_panels_of_a_tile() -> None:
    x = torch.arange(16 * 256).view(16, 256).half()
    memory = Shared(Allocation(gl.float16, [16, 256], lambda: None, lambda: 1), 0, [16, 256], PANELS)
    memory.write(x)
    assert torch.equal(memory.slice(8, 8, 0).read(), x[8:])
    assert torch.equal(memory.slice(64, 128, 1).permute((1, 0)).read(), x[:, 64:192].T)
    for start, length, dim in ((4, 8, 0), (8, 16, 0), (32, 64, 1), (64, 32, 1)):
        with pytest.raises(AssertionError):
            memory.slice(start, length, dim)


@pytest.mark.parametrize("width", [32, 64, 128])
def test_words_of_bytes(width: int) -> None:
    """They are read, and rows of them written, where their bytes lie: by panels of ``width``."""
    x = torch.randint(0, 256, (2, 16, width), dtype=torch.uint8)
    layout, words = gl.NVMMASharedLayout(width, 8, 3), gl.NVMMASharedLayout(width, 32, 2)
    memory = Shared(Allocation(gl.uint8, [2, 1, 16, width], lambda: None, lambda: 1), 0, [2, 1, 16, width], layout)
    assert (memory.index(1).read() == 0x7F).all()  # NaN in e4m3
    for panel in range(2):
        memory.index(panel).write(x[panel][None])
    tile = memory.index(0)._reinterpret(gl.int32, [16, 2 * width // 4], words)
    assert torch.equal(tile.load(None).data, torch.cat([x[0], x[1]], 1).view(torch.int32))
    tile.slice(8, 8, 0).store(Value(torch.zeros(8, 2 * width // 4, dtype=torch.int32)))
    assert torch.equal(memory.index(1).read()[0, :8], x[1, :8])
    assert (memory.index(1).read()[0, 8:] == 0).all()
    other = gl.NVMMASharedLayout(128 if width < 128 else 64, 32, 2)
    with pytest.raises(AssertionError):
        memory.index(0)._reinterpret(gl.int32, [16, width // 4], other)


def test_assembly_that_converts_words_is_run() -> None:
    words = Value(torch.tensor([0x40383028, 0x7FC8D0B8], dtype=torch.int64).to(torch.int32))
    convert = "{\n.reg .b16 low, high;\nmov.b32 {low, high}, $2;\ncvt.rn.f16x2.e4m3x2 $0, high;\nmov.b32 $1, $2;\n}"
    assert ptx.can_run(convert)
    assert not ptx.can_run("{ add.u32 $0, $1; }")
    halves, same = ptx.run(convert, "=r,=r,r", [words], (gl.int32, gl.int32))
    expected = words.data.view(torch.float8_e4m3fn).view(2, 4)[:, 2:].half()
    assert torch.equal(halves.data.view(torch.float16).view(2, 2).nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(same.data, words.data)
    both = "{\nprmt.b32 $0, $1, $2, 0x5140;\n}"
    (mixed,) = ptx.run(both, "=r,r,r", [words, Value(torch.zeros_like(words.data))], (gl.int32,))
    assert mixed.data.tolist() == [0x00300028, 0x00D000B8]
    with pytest.raises(KeyError):
        ptx.run("{\nmov.b32 $0, never;\n}", "=r,r", [words], (gl.int32,))


def test_bits_and_halves() -> None:
    one = Value(torch.ones(2, 2))
    assert (one.to(gl.int32, bitcast=True).data == 127 << 23).all()
    assert torch.equal(one.to(gl.int32, bitcast=True).to(gl.float32, bitcast=True).data, one.data)
    with pytest.raises(AssertionError):
        one.to(gl.float16, bitcast=True)
    first, second = Value(torch.arange(6).view(3, 2)).split()
    assert (first.data.tolist(), second.data.tolist()) == ([0, 2, 4], [1, 3, 5])


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
