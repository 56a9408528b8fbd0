"""Shared by the launches of the Hopper kernels: number of SMs, the ticket counter, interleaved heads."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Literal

import torch

from mla_plugin.kernels.tiles import ceil_div

if TYPE_CHECKING:
    from mla_plugin.kernels.prefill.packing import Kind

LOADING_REGISTERS = 24
"""Registers of each thread of the loading warp; the others have 240."""


def is_dynamic(kind: Kind) -> bool:
    """Whether programs take their tickets by a counter, each the next one when it is ready, because tiles differ.

    With a window most tiles are equally long, but the counter is still faster: on an H100 at (1, 16, 16384), window
    4096, 192/128, the forward has 606 TFLOP/s instead of 520, the backward 441 instead of 382. Without a mask and
    lengths it gains nothing.
    """
    return kind.layout.is_packed or kind.has_lengths or not kind.band.is_open


def heads_together(heads: int, group: int, kv_bytes: int, l2_bytes: int) -> int:
    """Number of heads whose query tiles are interleaved: as many as fit half the L2 cache with their keys and values.

    For key tiles: with their queries and output gradients.

    One head after the other is 20 % slower on an H200 at (1, 16, 4096), 192/128, causal: 500 against 619 TFLOP/s.

    Args:
        heads: number of heads; the result divides it.
        group: heads of q that share a head of k and v.
        kv_bytes: of one head of k and v.
        l2_bytes: size of the cache.
    """
    for together in (16, 8, 4, 2):
        if heads % together == 0 and ceil_div(together, group) * kv_bytes <= l2_bytes // 2:
            return together
    return 1


@functools.cache
def _default_stream_counter(device: torch.device, kernel: str) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def counter(device: torch.device, kernel: Literal["forward", "dkv", "dq"]) -> torch.Tensor:
    """A ticket counter, int32, that is 0. A kernel resets it to 0, so its calls on the default stream share one.

    dQ has a counter of its own because it begins before dK and dV end.

    A call on another stream gets a new one: it may run concurrently, or be captured in a CUDA graph whose memory is
    reused.
    """
    if torch._C._cuda_getCurrentRawStream(device.index) == 0:
        return _default_stream_counter(device, kernel)
    return torch.zeros(1, dtype=torch.int32, device=device)
