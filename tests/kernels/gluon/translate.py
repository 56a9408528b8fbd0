"""Kernels' functions as Python functions that work on the interpreter's values."""

from __future__ import annotations

import builtins
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra import cuda
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import ConstexprFunction, JITFunction

from mla_plugin.kernels.decode import e4m3
from tests.kernels.gluon import ptx
from tests.kernels.gluon.memory import Allocation, Descriptor, Shared
from tests.kernels.gluon.schedule import Barrier, Partition, Scheduler
from tests.kernels.gluon.values import Pointer, PointerType, Value, as_value, raw, torch_dtype

_CONVERSIONS = ("cvt.rn.bf16x2", "cvt.rn.f16x2", "shl.b32", "cvt.f32.f16")
"""What the kernels' inline assembly does: it converts between dtypes."""


class Program:
    """One program of a launch: what the names in a kernel's functions stand for."""

    def __init__(
        self,
        grid: tuple[int, ...],
        index: tuple[int, ...],
        seed: int,
        is_dependent: bool = False,
        may_overlap: bool = False,
        num_warps: int = 4,
    ) -> None:
        """``is_dependent``: launched with launch_pdl; ``may_overlap``: reads nothing that the kernel before writes."""
        self._num_warps = num_warps
        self._grid, self._index = grid, index
        self._has_waited = not is_dependent
        self._may_overlap = may_overlap
        self._scheduler = Scheduler(seed)
        self._partitions: list[Partition] = []
        self._allocations: list[Allocation] = []
        self._functions: dict[int, types.FunctionType] = {}
        self._members = self._language()
        self._named = {
            id(gl): self._members,
            id(tl): self._members,
            id(gluon): types.SimpleNamespace(),
            id(hopper.mbarrier): types.SimpleNamespace(
                MBarrierLayout=hopper.mbarrier.MBarrierLayout,
                init=lambda barrier, count: barrier.init(count),
                wait=lambda barrier, phase: self._scheduler.wait(barrier, int(phase)),
                arrive=self._arrive,
                expect=lambda barrier, size: barrier.expect(size),
            ),
            id(hopper.tma): types.SimpleNamespace(async_copy_global_to_shared=self._copy),
            id(async_copy): types.SimpleNamespace(
                async_copy_global_to_shared=lambda target, pointer, mask=None: self._scheduler.current.copy(
                    pointer, mask, target
                ),
                mbarrier_arrive=self._arrive_after_copies,
                commit_group=self._commit_copies,
                wait_group=self._wait_for_copies,
            ),
            id(hopper.fence_async_shared): self._fence,
            id(hopper.warpgroup_mma): self._multiply,
            id(hopper.warpgroup_mma_wait): self._wait_for_products,
            id(cuda.gdc_wait): self._wait_for_previous_kernel,
            id(cuda.gdc_launch_dependents): lambda: None,
            id(getattr(gl, "barrier", None) or gl.thread_barrier): lambda: None,
            id(builtins.range): self._range,
        }

    def run(self, kernel: Any, arguments: dict[str, Any]) -> None:
        """Run the kernel for this program."""
        self.translated(kernel)(**arguments)
        if not (self._has_waited or any(partition.has_waited for partition in self._partitions)):
            raise RuntimeError("a launch with launch_pdl ends without gdc_wait: the next kernel would not wait either")

    def translated(self, value: Any) -> Any:
        """What a global of a kernel's module stands for here."""
        if id(value) in self._named:
            return self._named[id(value)]
        if isinstance(value, tl.constexpr):
            return self.translated(value.value)
        if isinstance(value, ConstexprFunction):
            return value.fn
        if isinstance(value, (JITFunction, InterpretedFunction)):
            return self._function(value.fn)
        return value

    def _function(self, fn: Any) -> types.FunctionType:
        if id(fn) not in self._functions:
            names: dict[str, Any] = {"range": self._range}
            found = types.FunctionType(fn.__code__, names, fn.__name__, fn.__defaults__, fn.__closure__)
            found.__kwdefaults__ = fn.__kwdefaults__
            self._functions[id(fn)] = found  # before its globals, which may name it
            names |= {
                name: self.translated(fn.__globals__[name]) for name in _names(fn.__code__) if name in fn.__globals__
            }
            names["__builtins__"] = builtins
        return self._functions[id(fn)]

    @staticmethod
    def _range(*bounds: Any) -> Iterator[Value]:
        return (as_value(i) for i in range(*(int(bound) for bound in bounds)))

    def _fence(self) -> None:
        for allocation in self._allocations:
            allocation.fence()

    def _arrive(self, barrier: Barrier, count: int = 1) -> None:
        barrier.arrive(count)
        self._scheduler.pause()

    def _wait_for_previous_kernel(self) -> None:
        partition = self._scheduler.asking
        if partition is None:
            self._has_waited = True
        else:
            partition.has_waited = True

    def _check_order(self) -> None:
        partition = self._scheduler.asking
        has_waited = self._has_waited or (partition is not None and partition.has_waited)
        if not (has_waited or self._may_overlap):
            raise RuntimeError("global memory is accessed before gdc_wait, in a launch with launch_pdl")

    def _load(self, pointer: Pointer, mask: Any = None, other: Any = None) -> Value:
        self._check_order()
        return pointer.load(mask, other)

    def _store(self, pointer: Pointer, value: Any, mask: Any = None, eviction_policy: str = "") -> None:
        self._check_order()
        assert eviction_policy in ("", "evict_first", "evict_last")
        pointer.store(value, mask)

    def _copy(self, source: Descriptor, at: list[Any], barrier: Barrier, target: Shared) -> None:
        self._check_order()
        barrier.copy(source, at, target)

    def _arrive_after_copies(self, barrier: Barrier, increment_count: bool = True) -> None:
        assert not increment_count
        current = self._scheduler.current
        barrier.arrive_after(current.taken_copies(), current.threads)

    def _commit_copies(self) -> None:
        self._scheduler.current.commit_copies()

    def _wait_for_copies(self, most: int = 0) -> None:
        self._scheduler.current.wait_for_copies(int(most))

    def _multiply(self, a: Any, b: Shared, acc: Value, *, use_acc: bool = True, is_async: bool = False) -> Value:
        """acc + a b. ``acc`` may be in flight itself: products end in order."""
        left = a if isinstance(a, Shared) else Value(a.data, a.layout)  # registers are read when it is issued
        assert left.shape[0] % 64 == 0
        assert left.shape[1] == b.shape[0]
        if isinstance(left, Value):
            assert left.data.dtype != torch.float32
            assert _fits(left.layout, acc.layout, 4 // left.data.element_size())

        assert left.dtype == b.dtype
        shared = [operand for operand in (left, b) if isinstance(operand, Shared)]
        if not all(operand.is_fenced() for operand in shared):
            raise RuntimeError("a product reads shared memory that threads wrote without fence_async_shared")
        issued = [operand.read() for operand in shared]

        def product() -> torch.Tensor:
            if not all(_are_same_bits(operand.read(), x) for operand, x in zip(shared, issued, strict=True)):
                raise RuntimeError("shared memory changes while a product reads it")
            x = left.read() if isinstance(left, Shared) else left.data
            found = x.float() @ issued[-1].float()
            assert not use_acc or acc.data.shape == found.shape
            return acc.data + found if use_acc else found

        result = self._scheduler.current.issue(product, acc.layout)
        if is_async:
            self._scheduler.pause()
        else:
            self._scheduler.current.wait_for_products(0)
        return result

    def _wait_for_products(self, most: int, deps: list[Value]) -> Any:
        self._scheduler.current.wait_for_products(int(most))
        return deps[0] if len(deps) == 1 else tuple(deps)

    def _allocate(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        shape = [int(size) for size in shape]
        if isinstance(layout, hopper.mbarrier.MBarrierLayout):
            return Barriers(shape[0], self._scheduler.lands_at_once)
        # e4m3 as bytes: PyTorch does not compare such numbers
        is_e4m3 = torch_dtype(dtype) == torch.float8_e4m3fn
        memory = gl.uint8 if is_e4m3 else dtype
        self._allocations.append(Allocation(memory, shape, self._scheduler.pause, self._scheduler.bit))
        return Shared(self._allocations[-1], 0, shape, layout, None, torch.float8_e4m3fn if is_e4m3 else None)

    def _specialize(self, functions: list[Any], num_warps: list[int], registers: list[int]) -> None:
        assert len(num_warps) == len(registers) == len(functions) - 1
        bound = [(_bound(function, given), f"{function.__name__} {n}") for n, (function, given) in enumerate(functions)]
        warps = [self._num_warps, *num_warps]
        self._partitions = [Partition(*each, count) for each, count in zip(bound, warps, strict=True)]
        self._scheduler.run(self._partitions)

    def _language(self) -> types.SimpleNamespace:
        """``gl`` and ``tl``: their own layouts and dtypes, and functions on the interpreter's values."""
        own: dict[str, Callable[..., Any]] = {
            "program_id": lambda axis: as_value(self._index[axis]),
            "num_programs": lambda axis: as_value(self._grid[axis]),
            "load": self._load,
            "store": self._store,
            "atomic_add": _atomic_add,
            "arange": lambda first, last, layout=None: Value(torch.arange(first, last, dtype=torch.int32), layout),
            "full": _full,
            "zeros": lambda shape, dtype, layout=None: _full(shape, 0, dtype, layout),
            "where": _where,
            "maximum": lambda a, b: _elementwise(torch.fmax, a, b),
            "minimum": lambda a, b: _elementwise(torch.fmin, a, b),
            "cdiv": lambda a, b: (a + b - 1) // b,
            "abs": lambda x: Value(x.data.abs(), x.layout),
            "exp2": lambda x: Value(torch.exp2(x.data), x.layout),
            "log2": lambda x: Value(torch.log2(x.data), x.layout),
            "sum": lambda x, axis=None: _reduced(torch.sum, x, axis),
            "max": lambda x, axis=None: _reduced(torch.amax, x, axis),
            "cast": lambda x, dtype: as_value(x).to(dtype),
            "join": lambda a, b: Value(torch.stack([a.data, b.data], -1)),
            "convert_layout": lambda x, layout: Value(x.data, layout),
            "static_range": lambda *bounds: range(*(int(bound) for bound in bounds)),
            "pointer_type": PointerType,
            "allocate_shared_memory": self._allocate,
            "warp_specialize": self._specialize,
            "inline_asm_elementwise": _converted,
            "constexpr": lambda x: x,
            "static_assert": _static_assert,
        }
        found = types.SimpleNamespace(**{name: getattr(gl, name) for name in dir(gl)})
        for name, function in own.items():
            setattr(found, name, function)
        return found


class Barriers:
    """An array of barriers."""

    def __init__(self, count: int, lands_at_once: bool) -> None:
        self._barriers = [Barrier(f"barrier {n} of {count}", lands_at_once) for n in range(count)]

    def index(self, i: Any) -> Barrier:
        return self._barriers[int(i)]


def _fits(operand: Any, product: Any, width: int) -> bool:
    """Whether it is the layout of a product's left operand, which does not depend on the product's columns."""
    parent = getattr(operand, "parent", None)
    if not isinstance(operand, gl.DotOperandLayout) or not isinstance(parent, gl.NVMMADistributedLayout):
        return False
    of_rows = [(x.version, x.warps_per_cta, x.instr_shape[0], x.instr_shape[2]) for x in (parent, product)]
    return (operand.operand_index, operand.k_width) == (0, width) and of_rows[0] == of_rows[1]


def _are_same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """NaN is equal to NaN."""
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def _names(code: types.CodeType) -> set[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
    return found


def _bound(function: Callable[..., None], given: Any) -> Callable[[], None]:
    return lambda: function(*given)


def _static_assert(condition: Any, message: str = "") -> None:
    assert raw(condition), message


def _full(shape: list[int], x: Any, dtype: Any, layout: Any = None) -> Value:
    data = torch.as_tensor(raw(x)).to(torch_dtype(dtype))
    return Value(data.expand([int(size) for size in shape]).clone(), layout)


def _where(condition: Any, a: Any, b: Any) -> Value:
    values = [x for x in (a, b) if isinstance(x, Value)] or [as_value(a)]
    dtype = values[0].data.dtype
    for value in values:
        dtype = torch.promote_types(dtype, value.data.dtype)
    x, y = (torch.as_tensor(raw(x)).to(dtype) for x in (a, b))
    return Value(torch.where(torch.as_tensor(raw(condition)), x, y), max(values, key=lambda v: v.data.dim()).layout)


def _elementwise(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], a: Any, b: Any) -> Any:
    if not isinstance(a, Value) and not isinstance(b, Value):
        return raw(as_value(function(torch.tensor(a), torch.tensor(b)).item()))
    x, y = as_value(a), as_value(b)
    dtype = torch.promote_types(x.data.dtype, y.data.dtype)
    if not isinstance(a, Value) or not isinstance(b, Value):
        dtype = (x if isinstance(a, Value) else y).data.dtype  # a number does not widen
    layout = (x if x.data.dim() >= y.data.dim() else y).layout
    return Value(function(x.data.to(dtype), y.data.to(dtype)), layout)


def _reduced(function: Callable[..., torch.Tensor], x: Value, axis: int | None) -> Value:
    data = x.data
    if function is torch.amax and data.dtype.is_floating_point:
        data = data.nan_to_num(float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    axes = list(range(data.dim())) if axis is None else [axis]
    found = function(data, dim=axes)
    return Value(
        found.to(data.dtype) if data.dtype != torch.bool else found.int(),
        gl.SliceLayout(axes[0], x.layout) if x.layout is not None and data.dim() > 1 else None,
    )


def _atomic_add(pointer: Pointer, x: Any) -> Value:
    before = pointer.load()
    pointer.store(before + x)
    return before


def _halves_of_e4m3(x: torch.Tensor) -> tuple[Value, Value]:
    values = x.contiguous().view(torch.float8_e4m3fn).half().unflatten(-1, (-1, 4))
    low, high = (pair.contiguous().view(torch.int32)[..., 0] for pair in (values[..., :2], values[..., 2:]))
    return Value(low), Value(high)


def _bfloat16_of_float16(x: torch.Tensor, scale: torch.Tensor) -> Value:
    values = x.contiguous().view(torch.float16).unflatten(-1, (-1, 2)).float()
    return Value((values * scale[..., None]).bfloat16().contiguous().view(torch.int32)[..., 0])


_OF_WORDS: dict[str, Callable[..., Any]] = {
    e4m3._BY_INSTRUCTION.value: _halves_of_e4m3,
    e4m3._TO_SCALED_BFLOAT16.value: _bfloat16_of_float16,
}


def _converted(assembly: str, constraints: str, given: list[Value], dtype: Any, is_pure: bool, pack: int) -> Any:
    if assembly in _OF_WORDS:
        assert all(x.data.dtype == torch.int32 for x in given[:1])
        return _OF_WORDS[assembly](*(x.data for x in given))
    if pack == 1 and ptx.can_run(assembly):
        return ptx.run(assembly, constraints, given, dtype)
    assert any(name in assembly for name in _CONVERSIONS), f"assembly that is not known here: {assembly}"
    return given[0].to(dtype)
