"""What the launch of the decode kernels must know of a device."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton

from mla_plugin.kernels.decode.kernel import decode_kernel
from mla_plugin.kernels.tiles import card

_INTERPRETED = not isinstance(decode_kernel, triton.JITFunction)


class Device(NamedTuple):
    """What the launch must know of a device."""

    kind: str
    processors: int
    has_descriptors: bool
    has_dependent_launch: bool  # a kernel may start before the one before it has ended
    e4m3_way: str = "instruction"  # how bytes of e4m3 become numbers, see e4m3.py


@functools.cache
def device_of(device: torch.device) -> Device:
    """What the launch must know of it."""
    if _INTERPRETED:
        return Device("Hopper", 8, False, False, "fields")
    if device.type != "cuda":
        raise ValueError(f"the tensors are on {device}; the kernels need a CUDA device: move the tensors there")
    properties: Any = torch.cuda.get_device_properties(device)  # PyTorch's stub lacks the shared memory
    capability = (properties.major, properties.minor)
    kind = card(capability, properties.shared_memory_per_block_optin)
    is_hopper_or_newer = capability >= (9, 0)
    way = "instruction" if capability >= (8, 9) else "bits"
    return Device(kind, properties.multi_processor_count, is_hopper_or_newer, is_hopper_or_newer, way)
