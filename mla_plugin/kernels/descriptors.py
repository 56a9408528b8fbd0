"""Tensor descriptors of a launch, made and encoded once for each place in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from mla_plugin.kernels.hopper.device import TRITON_VERSIONS


class Address:
    """Replaces a tensor in a cached descriptor, which must not keep its memory alive."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._address = address

    def data_ptr(self) -> int:
        """As ``Tensor.data_ptr``."""
        return self._address


@functools.lru_cache(maxsize=4096)
def descriptor(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]
) -> TensorDescriptor:
    """A tensor descriptor of some memory; ``strides`` without the last, which is 1. Making one takes 10 us."""
    return TensorDescriptor(Address(address, dtype), list(shape), [*strides, 1], list(block))


def make_context_current() -> None:
    """Give this thread the CUDA context of its current device, without which descriptors cannot be encoded.

    A new thread has none before its first call of CUDA's runtime, and memory from PyTorch's cache needs no such call.
    Allowed while a graph is captured.
    """
    if torch.cuda.is_available():
        torch.cuda.is_current_stream_capturing()


def encoding_once(
    run: Any, grid: tuple[int, int, int], function: object, metadata: object
) -> Callable[[int, tuple[object, ...]], None] | None:
    """A launch that encodes each descriptor once, where ``run`` of Triton 3.6 and 3.7 does so in every launch.

    What the driver makes of a descriptor depends on its address, shape and strides, and on how the kernel lays out
    tiles in shared memory. Encoding three takes 7 us. The result is kept on the descriptor, and goes with it. A kernel
    without descriptors is launched without what ``run`` does for scratch memory, which takes 2 us.

    Returns:
        a function of the stream and the arguments; None for a kernel with scratch memory or another ``run``.
    """
    outer: Any = getattr(run, "launch", None)
    is_known = ".".join(triton.__version__.split(".")[:2]) in TRITON_VERSIONS
    if not is_known or getattr(run, "global_scratch_size", None) != 0 or run.profile_scratch_size:
        return None
    launcher, places = outer, []
    names = getattr(getattr(outer, "__code__", None), "co_freevars", ())
    if {"launcher", "tensordesc_indices", "tensordesc_meta"} <= set(names):
        found = dict(zip(names, (cell.cell_contents for cell in outer.__closure__), strict=True))
        if None in found["tensordesc_meta"]:
            return None
        launcher = found["launcher"]
        places = [
            (place, meta, str(sorted(meta.items())))
            for place, meta in zip(sorted(found["tensordesc_indices"]), found["tensordesc_meta"], strict=True)
        ]
    from triton.backends.nvidia.driver import make_tensordesc_arg

    options = (run.launch_cooperative_grid, run.launch_pdl)
    no_hooks, no_scratch = (metadata, None, None, None), (None, None)

    def expanded(arguments: tuple[object, ...]) -> Sequence[object]:
        if not places:
            return arguments
        values: list[object] = []
        start = 0
        for place, meta, tiles in places:
            x: Any = arguments[place]
            known = x.__dict__.get(tiles)
            if known is None:
                make_context_current()
                known = x.__dict__[tiles] = make_tensordesc_arg(x, meta)
            values += arguments[start:place]
            values += known
            start = place + 1
        values += arguments[start:]
        return values

    if hasattr(run, "arg_annotations"):  # Triton 3.7
        signature = (run.arg_annotations, run.kernel_signature)
        fixed: tuple[object, ...] = (function, *options, *no_hooks, *no_scratch, *signature)
        return lambda stream, arguments: launcher(*grid, stream, *fixed, expanded(arguments))
    fixed = (function, *options, *no_scratch, *no_hooks)
    return lambda stream, arguments: launcher(*grid, stream, *fixed, *expanded(arguments))
