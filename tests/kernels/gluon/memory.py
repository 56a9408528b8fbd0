"""Shared memory, and the tensor descriptors that TMA copies tiles from."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from tests.kernels.gluon.values import DTYPE_OF, Value, torch_dtype


@functools.cache
def _places(shape: tuple[int, ...], columns: int) -> torch.Tensor:
    """Where the elements of [..., rows, columns] lie: panels of ``columns`` columns one after another.

    The swizzle within a panel is left out: it is the same for all views of the memory.
    """
    *outer, rows, width = shape
    columns = min(columns, width)
    outside = torch.arange(math.prod(outer)).view(*outer, 1, 1) * (rows * width)
    row, column = torch.arange(rows)[:, None], torch.arange(width)[None]
    return outside + column // columns * (rows * columns) + row * columns + column % columns


def poison_of(dtype: torch.dtype) -> float:
    """What stands for contents that are undefined."""
    if dtype.is_floating_point:
        return torch.nan
    return 0x7F if dtype == torch.uint8 else -(2**31)


class Shared:
    """A view of an allocation in shared memory, from element ``start`` on.

    ``places`` are its elements' positions, [*shape]; None: in the order of the layout. ``words``: threads write it in
    elements of this dtype, each of one or several of the memory's.
    """

    def __init__(
        self,
        owner: Allocation,
        start: int,
        shape: list[int],
        layout: Any,
        places: torch.Tensor | None = None,
        words: torch.dtype | None = None,
    ) -> None:
        self.owner = owner
        self.start = start
        self.shape = shape
        self.layout = layout
        self._places = places
        self._words = words

    @property
    def dtype(self) -> Any:
        return DTYPE_OF[self._words or self.owner.data.dtype]

    @property
    def type(self) -> Shared:
        return self

    def _positions(self) -> torch.Tensor:
        if self._places is not None:
            return self._places
        if not hasattr(self.layout, "swizzle_byte_width"):
            return self.start + torch.arange(math.prod(self.shape)).view(self.shape)
        return self.start + _places(tuple(self.shape), self._panel())

    def _panel(self) -> int:
        """Columns of a panel."""
        columns: int = self.layout.swizzle_byte_width // self.owner.data.element_size()
        return columns

    def _of(self, places: torch.Tensor) -> Shared:
        return Shared(self.owner, self.start, list(places.shape), self.layout, places, self._words)

    def index(self, i: Any) -> Shared:
        """The i-th of the leading dimension.

        Raises:
            IndexError: there are fewer.
        """
        assert self._places is None
        i = int(i)
        if not 0 <= i < self.shape[0]:
            raise IndexError(f"index {i} of {self.shape}")
        start = self.start + i * math.prod(self.shape[1:])
        return Shared(self.owner, start, self.shape[1:], self.layout, None, self._words)

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Shared:
        """The same memory in another shape.

        Raises:
            IndexError: it ends behind the allocation.
        """
        assert self._places is None
        words = torch_dtype(dtype)
        shape = [int(size) for size in shape]
        assert getattr(layout, "swizzle_byte_width", None) == getattr(self.layout, "swizzle_byte_width", None)
        if words != self.owner.data.dtype:
            assert layout.element_bitwidth == 8 * words.itemsize
            shape[-1] *= words.itemsize // self.owner.data.element_size()
        if self.start + math.prod(shape) > self.owner.data.numel():
            raise IndexError(f"{shape} from element {self.start} ends behind {self.owner.data.numel()} elements")
        return Shared(self.owner, self.start, shape, layout, None, None if words == self.owner.data.dtype else words)

    def slice(self, start: int, length: int, dim: int) -> Shared:
        """Rows in eights, after which a swizzle begins anew; leading columns of one panel, or whole panels."""
        positions, panel = self._positions(), self._panel()
        assert 0 <= start <= start + length <= self.shape[dim]
        if dim == 0:
            assert start % 8 == length % 8 == 0
            return self._of(positions[start : start + length])
        assert self._words is None
        assert start % panel == 0
        assert length % panel == 0 or self.shape[1] <= panel
        return self._of(positions[:, start : start + length])

    def permute(self, order: tuple[int, int]) -> Shared:
        assert order == (1, 0)
        return self._of(self._positions().T)

    def read(self) -> torch.Tensor:
        """The elements."""
        data = self.owner.data[self._positions()]
        return data if self._words is None else data.view(self._words)

    def write(self, x: torch.Tensor) -> None:
        """Set the elements."""
        if self._words is not None:
            assert x.dtype == self._words
            x = x.contiguous().view(self.owner.data.dtype)
        self.owner.data[self._positions()] = x.to(self.owner.data.dtype).broadcast_to(self.shape)

    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.owner.data.element_size()

    def load(self, layout: Any) -> Value:
        self.owner.before_access()
        data = self.owner.data[self._positions()]
        return Value(data if self._words is None else data.view(self._words), layout)

    def store(self, x: Value) -> None:
        self.owner.before_access()
        data = x.data
        if self._words is None:
            data = data.to(self.owner.data.dtype)
        else:
            assert data.dtype == self._words
            data = data.contiguous().view(self.owner.data.dtype)
        assert list(data.shape) == self.shape
        self.write_by(self.owner.writer(), data)

    def poison(self) -> None:
        """Make the elements undefined."""
        dtype = self.owner.data.dtype
        self.owner.data[self._positions()] = torch.full(self.shape, poison_of(dtype), dtype=dtype)

    def write_by(self, writer: int, x: torch.Tensor) -> None:
        """Set the elements by threads, whose bit is ``writer``: products see them after a fence."""
        positions, data, unfenced = self._positions(), self.owner.data, self.owner.unfenced
        before = data[positions]
        data[positions] = x.broadcast_to(self.shape)
        after = data[positions]
        is_changed = ~(before.eq(after) | (before.isnan() & after.isnan()))
        others = torch.where(is_changed, 0, unfenced[positions])
        unfenced[positions] = torch.where(is_changed | (others != 0), others | writer, 0)

    def is_fenced(self) -> bool:
        """Whether its writers have called ``fence_async_shared`` since."""
        return not self.owner.unfenced[self._positions()].any()


class Allocation:
    """Memory that one ``allocate_shared_memory`` gives: NaN, also if its bytes are e4m3, or numbers that are no index.

    Attributes:
        unfenced: for each element the bits of the partitions whose threads have written its value, none of which has
            fenced since; 0 if one has. Two warpgroups may write the same zeros, and each fences its own.
        before_access: called before threads read or write it.
        writer: the bit of the partition that runs.
    """

    def __init__(
        self, dtype: Any, shape: list[int], before_access: Callable[[], None], writer: Callable[[], int]
    ) -> None:
        found = torch_dtype(dtype)
        self.data = torch.full((math.prod(shape),), poison_of(found), dtype=found)
        self.unfenced = torch.zeros(self.data.shape, dtype=torch.uint8)
        self.before_access, self.writer = before_access, writer

    def fence(self) -> None:
        """The partition that runs makes what it wrote visible to products and copies."""
        self.unfenced[self.unfenced & self.writer() != 0] = 0


class Descriptor:
    """What the host's ``TensorDescriptor`` describes."""

    def __init__(self, described: Any) -> None:
        dtype = described.base.dtype
        span = sum((size - 1) * stride for size, stride in zip(described.shape, described.strides, strict=True)) + 1
        address = described.base.data_ptr()
        assert address % 16 == 0
        assert all(stride * dtype.itemsize % 16 == 0 for stride in described.strides[:-1])
        self.dtype = DTYPE_OF[dtype]
        self.layout = described.layout
        self.block_shape = list(described.block_shape)
        assert self.layout.rank == len(self.block_shape)
        memory = torch.frombuffer((ctypes.c_char * (span * dtype.itemsize)).from_address(address), dtype=torch.uint8)
        self._tensor = memory.view(dtype).as_strided(described.shape, described.strides)

    def tile(self, start: list[Any]) -> torch.Tensor:
        """The block from ``start`` on; 0 outside of the tensor."""
        found = torch.zeros(self.block_shape, dtype=self._tensor.dtype)
        begins = [int(x) for x in start]
        ends = [min(a + n, size) for a, n, size in zip(begins, self.block_shape, self._tensor.shape, strict=True)]
        assert all(a >= 0 for a in begins)
        if all(a < b for a, b in zip(begins, ends, strict=True)):
            inside = tuple(slice(a, b) for a, b in zip(begins, ends, strict=True))
            found[tuple(slice(0, b - a) for a, b in zip(begins, ends, strict=True))] = self._tensor[inside]
        return found
