"""Tensor descriptors (TMA): which strides they can have, and those of a cache for each call."""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from mla_plugin.arguments.cache_format import PLAIN
from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.arguments.decode_layout import starts_aligned
from mla_plugin.kernels.decode.device import Device
from mla_plugin.kernels.decode.tiles import DecodeTile
from mla_plugin.kernels.decode.workspace import Scratch
from mla_plugin.kernels.descriptors import descriptor

MAX_CACHES = 256
"""Of one layout: the layers of a model, each with its own."""


def strides_of(x: torch.Tensor) -> tuple[int, ...]:
    """All strides but the last; that of a dimension of size 1 is arbitrary, and replaced by a contiguous one."""
    found: list[int] = []
    inner = x.shape[-1]
    for size, stride in reversed(list(zip(x.shape[:-1], x.stride()[:-1], strict=True))):
        found.insert(0, stride if size > 1 else inner)
        inner = max(1, size) * found[0]  # as PyTorch's contiguous strides, which are positive for size 0 too
    return tuple(found)


def can_read(x: torch.Tensor) -> bool:
    """Whether all strides but the last are positive multiples of 16 bytes, as the hardware requires."""
    return all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in strides_of(x))


def can_use_descriptors(tensors: DecodeTensors, device: Device, tile: DecodeTile, page_size: int) -> bool:
    """Whether full tiles can be read by descriptors, and gain from it: large ones within one page."""
    c_kv, k_rope = tensors.c_kv, tensors.k_rope
    return (
        device.has_descriptors
        and tensors.kv_cache_format == PLAIN
        and starts_aligned(c_kv, k_rope)
        and tensors.leftpad_kv is None
        and c_kv.numel() > 0  # CUDA encodes no descriptor of an empty tensor
        and tile.block_m >= 64
        and page_size % tile.block_n == 0
        and all(can_read(x) for x in (c_kv, k_rope) if x.shape[-1] > 0)
    )


def _described(cache: torch.Tensor, block_n: int, width: int) -> TensorDescriptor | None:
    if width == 0:
        return None
    return descriptor(cache.data_ptr(), cache.dtype, tuple(cache.shape), strides_of(cache), (1, block_n, width))


def plain_arguments(
    tensors: DecodeTensors,
    scratch: Scratch,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    described: tuple[TensorDescriptor | None, ...] = (None, None, None),
) -> tuple[object, ...]:
    """The arguments of each call of ``decode_kernel``; without descriptors it reads the cache by pointers."""
    inputs = (tensors.q_nope_abs, tensors.q_rope, tensors.c_kv, tensors.k_rope)
    keys = (tensors.page_table, tensors.seqlens_kv, tensors.leftpad_kv, tensors.kv_scale)
    return (*inputs, *keys, *scratch, out, lse, *described, scale)


class CacheDescriptors:
    """Descriptors of c_kv's two column blocks and of k_rope, over [pages or B, page_size or S_kv, columns].

    Attributes:
        made: by the addresses of c_kv and k_rope; looking them up one by one took 5 us of host time per call.
        gathers, query_block, copies_queries: see ``Described``.
    """

    gathers = False
    query_block: tuple[int, ...] | None = None
    copies_queries = False

    def __init__(self, block_n: int, widths: tuple[int, int, int]) -> None:
        self._block_n, self._widths = block_n, widths
        self.made: dict[tuple[int, int], tuple[TensorDescriptor | None, ...]] = {}

    def of(self, tensors: DecodeTensors) -> tuple[TensorDescriptor | None, ...]:
        """Those of a call; None for a block without columns."""
        c_kv, k_rope = tensors.c_kv, tensors.k_rope
        key = (c_kv.data_ptr(), k_rope.data_ptr())
        found = self.made.get(key)
        if found is None:
            caches = zip((c_kv, c_kv, k_rope), self._widths, strict=True)
            found = tuple(_described(cache, self._block_n, width) for cache, width in caches)
            if len(self.made) >= MAX_CACHES:
                self.made.clear()
            self.made[key] = found
        return found

    def arguments(
        self, tensors: DecodeTensors, scratch: Scratch, out: torch.Tensor, lse: torch.Tensor | None, scale: float
    ) -> tuple[object, ...]:
        """Those of a call, see ``plain_arguments``."""
        return plain_arguments(tensors, scratch, out, lse, scale, self.of(tensors))
