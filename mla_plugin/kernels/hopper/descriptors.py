"""TMA descriptors of the tensors of a Hopper kernel."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_plugin.kernels.descriptors import Address
from mla_plugin.kernels.hopper.common import tile_layout
from mla_plugin.kernels.prefill.packing import Kind


@dataclass(frozen=True, eq=False)  # compared and hashed by identity, which is fast
class Source:
    """A tensor that TMA copies tiles from: [B, H, S, D] with the first three strides, in tiles of rows x columns."""

    dtype: torch.dtype
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    rows: int
    columns: int

    @classmethod
    def of(cls, kind: Kind, shape: tuple[int, ...], strides: tuple[int, ...], rows: int, columns: int) -> Source:
        """One tensor of a call; packed sequences count as one long sequence."""
        batch, heads, tokens = kind.layout.pick(shape)
        batch = 1 if kind.layout.is_packed else batch
        return cls(kind.dtype, (batch, heads, tokens, shape[-1]), kind.pick(strides), rows, columns)


@functools.lru_cache(maxsize=4096)
def descriptor(address: int, source: Source) -> TensorDescriptor:
    """The descriptor of the tensor at this address."""
    element = triton.language.bfloat16 if source.dtype == torch.bfloat16 else triton.language.float16
    sizes = zip(source.shape, source.strides, strict=False)
    steps = [stride if size > 1 else 8 for size, stride in sizes]  # the stride of a dimension of size 1 is arbitrary
    memory, block = Address(address, source.dtype), [1, 1, source.rows, source.columns]
    return TensorDescriptor(memory, list(source.shape), [*steps, 1], block, tile_layout(element))
