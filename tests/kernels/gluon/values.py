"""Scalars, tensors in registers and pointers, with Triton's arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl

TORCH_OF = {
    "int1": torch.bool,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp8e4nv": torch.float8_e4m3fn,
}
E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
DTYPE_OF = {found: tl.dtype(name) for name, found in TORCH_OF.items()}


def torch_dtype(dtype: Any) -> torch.dtype:
    """PyTorch's dtype for one of Triton's."""
    return TORCH_OF[dtype.name]


class Value:
    """A scalar (0-dimensional) or a tensor that a partition of warps holds in registers.

    A product that was issued and not waited for has no data yet: reading it is an error, as on the GPU, where it would
    give whatever the registers hold.
    """

    def __init__(self, data: torch.Tensor | None, layout: Any = None) -> None:
        self._data = data
        self.layout = layout

    @property
    def data(self) -> torch.Tensor:
        """The elements.

        Raises:
            RuntimeError: a product in flight.
        """
        if self._data is None:
            raise RuntimeError("a product is read before warpgroup_mma_wait has waited for it")
        return self._data

    def complete(self, data: torch.Tensor) -> None:
        """The product has ended."""
        self._data = data

    @property
    def dtype(self) -> Any:
        return DTYPE_OF[self.data.dtype]

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def type(self) -> Value:
        return self

    def to(self, dtype: Any, bitcast: bool = False) -> Value:
        found = torch_dtype(dtype)
        if bitcast:
            assert found.itemsize == self.data.element_size()
        elif found == torch.float8_e4m3fn:
            # the GPU saturates, PyTorch may not: no kernel of ours relies on either
            assert not (self.data.abs() > E4M3_MAX).any(), "a number above e4m3's largest one"
        return Value(self.data.view(found) if bitcast else self.data.to(found), self.layout)

    def reshape(self, shape: list[int]) -> Value:
        return Value(self.data.reshape([int(size) for size in shape]))

    def permute(self, order: tuple[int, ...]) -> Value:
        return Value(self.data.permute(order))

    def split(self) -> tuple[Value, Value]:
        first, second = self.data.unbind(-1)
        return Value(first), Value(second)

    def __getitem__(self, key: Any) -> Value:
        return Value(self.data[key], self.layout)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    def __neg__(self) -> Value:
        return Value(-self.data, self.layout)

    def __hash__(self) -> int:
        return id(self)


def raw(x: Any) -> Any:
    """A Value's data; other things as they are."""
    return x.data if isinstance(x, Value) else x


def as_value(x: Any) -> Value:
    """A number as a scalar: int32, int64 if it needs that, or float32."""
    if isinstance(x, Value):
        return x
    if isinstance(x, bool):
        return Value(torch.tensor(x))
    if isinstance(x, int):
        return Value(torch.tensor(x, dtype=torch.int32 if -(2**31) <= x < 2**31 else torch.int64))
    return Value(torch.as_tensor(x, dtype=torch.float32))


def _pair(a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Both in their common dtype, which a Python number does not widen, and the result's layout."""
    values = [x for x in (a, b) if isinstance(x, Value)]
    widest = max(values, key=lambda x: x.data.dim())
    dtype = values[0].data.dtype
    if len(values) == 2:
        dtype = torch.promote_types(dtype, values[1].data.dtype)
    elif isinstance(a, float) or isinstance(b, float):
        dtype = dtype if dtype.is_floating_point else torch.float32
    elif dtype == torch.bool and not (isinstance(a, bool) or isinstance(b, bool)):
        dtype = torch.int32
    x, y = (x.data.to(dtype) if isinstance(x, Value) else torch.tensor(x, dtype=dtype) for x in (a, b))
    return x, y, widest.layout


def _binary(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], reflected: bool = False) -> Any:
    def method(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        a, b = (other, self) if reflected else (self, other)
        x, y, layout = _pair(a, b)
        return Value(function(x, y), layout)

    return method


def _floor(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Integer division rounds towards 0, as in C."""
    return torch.div(x, y, rounding_mode="trunc")


_OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "truediv": torch.true_divide,
    "floordiv": _floor,
    "mod": torch.fmod,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "lshift": torch.bitwise_left_shift,
    "rshift": torch.bitwise_right_shift,
}
for _name, _function in _OPERATIONS.items():
    setattr(Value, f"__{_name}__", _binary(_function))
    setattr(Value, f"__r{_name}__", _binary(_function, reflected=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", _binary(getattr(torch, _name)))


class PointerType:
    """What ``tl.pointer_type`` makes."""

    def __init__(self, element_ty: Any) -> None:
        self.element_ty = element_ty


class Pointer:
    """One address, or a tensor of them, into the memory of a tensor, in bytes from its start."""

    def __init__(self, memory: torch.Tensor, offset: Any, element_ty: Any) -> None:
        self.memory = memory  # of bytes
        self.offset = offset  # an int, or int64
        self.dtype = PointerType(element_ty)

    @classmethod
    def of(cls, x: torch.Tensor) -> Pointer:
        """A tensor's address."""
        storage = x.untyped_storage()
        memory = torch.empty(0, dtype=torch.uint8).set_(storage)
        return cls(memory, x.storage_offset() * x.element_size(), DTYPE_OF[x.dtype])

    def __add__(self, elements: Any) -> Pointer:
        size = torch_dtype(self.dtype.element_ty).itemsize
        found = raw(elements)
        steps = found.long() if isinstance(found, torch.Tensor) else found
        return Pointer(self.memory, self.offset + steps * size, self.dtype.element_ty)

    __radd__ = __add__

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.memory, self.offset[key], self.dtype.element_ty)

    def to(self, kind: PointerType, bitcast: bool = True) -> Pointer:
        assert bitcast
        return Pointer(self.memory, self.offset, kind.element_ty)

    def _elements(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory in this dtype, and the positions in it."""
        dtype = torch_dtype(self.dtype.element_ty)
        offset = torch.as_tensor(self.offset, dtype=torch.int64)
        if (offset % dtype.itemsize != 0).any():
            raise RuntimeError(f"an address is not aligned to {dtype.itemsize} bytes")
        whole = self.memory.numel() // dtype.itemsize * dtype.itemsize
        return self.memory[:whole].view(dtype), offset // dtype.itemsize

    def _positions(self, mask: Any, shape: torch.Size | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        memory, places = self._elements()
        wanted = torch.as_tensor(True if mask is None else raw(mask))
        shape = torch.broadcast_shapes(places.shape, wanted.shape, *([] if shape is None else [shape]))
        places, wanted = places.broadcast_to(shape), wanted.broadcast_to(shape)
        outside = wanted & ((places < 0) | (places >= memory.numel()))
        if outside.any():
            raise RuntimeError(f"an address is outside of its tensor's memory: element {int(places[outside][0])}")
        return memory, torch.where(wanted, places, 0), wanted

    def load(self, mask: Any = None, other: Any = None) -> Value:
        """Elements where ``mask``, ``other`` elsewhere."""
        memory, places, wanted = self._positions(mask)
        found = memory[places] if memory.numel() else torch.zeros(places.shape, dtype=memory.dtype)
        default = torch.as_tensor(0 if other is None else raw(other), dtype=memory.dtype)
        return Value(torch.where(wanted, found, default))

    def store(self, x: Any, mask: Any = None) -> None:
        """Write x where ``mask``."""
        data = torch.as_tensor(raw(x))
        memory, places, wanted = self._positions(mask, data.shape)
        memory[places[wanted]] = data.broadcast_to(places.shape)[wanted].to(memory.dtype)
