"""Properties of a device that the launch of the decode kernels needs."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton

from mla_plugin.kernels.decode.kernel import decode_kernel
from mla_plugin.kernels.hopper.device import unfit_device_because
from mla_plugin.kernels.tiles import gpu_class

_INTERPRETED = not isinstance(decode_kernel, triton.JITFunction)


class Device(NamedTuple):
    """Properties of a device that decide about the launch.

    Attributes:
        gpu_class: a key of ``tiles.GPU_CLASSES``.
        processors: streaming multiprocessors.
        has_descriptors: tensor descriptors (TMA).
        has_dependent_launch: a kernel may start before the previous one has ended.
        e4m3_conversion: how e4m3 bytes are converted, see ``from_e4m3``.
        has_gluon: Gluon kernels can run, see ``unfit_device_because``.
        memory: of the device, in bytes.
    """

    gpu_class: str
    processors: int
    has_descriptors: bool
    has_dependent_launch: bool
    e4m3_conversion: str = "instruction"
    has_gluon: bool = False
    memory: int = 0


@functools.cache
def device_of(device: torch.device) -> Device:
    """The properties of ``device``.

    Raises:
        ValueError: it is no CUDA device, outside the interpreter.
    """
    if _INTERPRETED:
        return Device("Hopper", 8, False, False, "fields")
    if device.type != "cuda":
        raise ValueError(f"the tensors are on {device}; the kernels need a CUDA device: move the tensors there")
    properties: Any = torch.cuda.get_device_properties(device)  # PyTorch's stub lacks the shared memory
    capability = (properties.major, properties.minor)
    name = gpu_class(capability, properties.shared_memory_per_block_optin)
    is_hopper_or_newer = capability >= (9, 0)
    conversion = "instruction" if capability >= (8, 9) else "bits"
    has_gluon = unfit_device_because(capability, triton.__version__) is None
    processors, memory = properties.multi_processor_count, properties.total_memory
    return Device(name, processors, is_hopper_or_newer, is_hopper_or_newer, conversion, has_gluon, memory)
