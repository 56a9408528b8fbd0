"""What the copy engine needs to know of a tensor, made once for each place in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_plugin.kernels.hopper.pieces import tile_layout
from mla_plugin.kernels.launch import Address
from mla_plugin.kernels.prefill.packing import Kind

_MAX_PLACES = 1024


class Source(NamedTuple):
    """A tensor that tiles are copied from: [B, H, S, D] with strides of the first three, tiles of rows x columns."""

    dtype: torch.dtype
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    rows: int
    columns: int

    @classmethod
    def of(cls, kind: Kind, shape: tuple[int, ...], strides: tuple[int, ...], rows: int, columns: int) -> Source:
        """One tensor of a call; packed sequences are one of all tokens."""
        batch, heads, tokens = kind.layout.pick(shape)
        batch = 1 if kind.layout.is_packed else batch
        return cls(kind.dtype, (batch, heads, tokens, shape[-1]), kind.pick(strides), rows, columns)

    def described(self, address: int) -> TensorDescriptor:
        """The descriptor of the tensor at this address."""
        dtype, shape, strides, rows, columns = self
        element = triton.language.bfloat16 if dtype == torch.bfloat16 else triton.language.float16
        steps = [stride if size > 1 else 8 for size, stride in zip(shape[:3], strides, strict=True)]  # of one: any
        memory = Address(address, dtype)
        return TensorDescriptor(memory, list(shape), [*steps, 1], [1, 1, rows, columns], tile_layout(element))


class Descriptors:
    """The descriptors of a kind of call."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._known: dict[tuple[int, ...], tuple[TensorDescriptor, ...]] = {}

    def of(self, *addresses: int) -> tuple[TensorDescriptor, ...]:
        """One for each source."""
        found = self._known.get(addresses)
        if found is None:
            if len(self._known) >= _MAX_PLACES:
                self._known.clear()
            made = (source.described(address) for address, source in zip(addresses, self._sources, strict=True))
            found = self._known[addresses] = tuple(made)
        return found
