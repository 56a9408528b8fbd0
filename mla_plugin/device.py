"""The only prober of hardware and installed packages. Nothing here imports a kernel library."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import re
import shutil
from pathlib import Path

import torch

from mla_plugin import environment
from mla_plugin.hooks.types import Platform

logger = logging.getLogger("mla_plugin")

DISTRIBUTIONS: tuple[str, ...] = (
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "flash-mla",
    "flashinfer-cubin",
    "flashinfer-jit-cache",
    "flashinfer-python",
    "megatron-core",
    "nvidia-cutlass-dsl",
    "pluggy",
    "sgl-flash-mla",
    "sgl-kernel",
    "sglang",
    "sglang-kernel",
    "torch",
    "transformer-engine",
    "transformers",
    "triton",
    "vllm",
)
"""Distributions whose version a decision or ``mla-plugin doctor`` may depend on."""

FLASH_ATTENTION_PROVIDERS: dict[str, tuple[tuple[str, str], ...]] = {
    "fa2": (("flash-attn", "flash_attn.flash_attn_interface"),),
    "fa3": (
        ("flash-attn-3", "flash_attn_interface"),
        ("vllm", "vllm.vllm_flash_attn"),
        ("sgl-kernel", "sgl_kernel.flash_attn"),
    ),
    "fa4": (("flash-attn-4", "flash_attn.cute.interface"),),
}
"""(distribution, module) of the packages that carry each version of FlashAttention, in the order of preference.

By distribution, because ``flash-attn`` ships an old ``flash_attn/cute`` that is not FlashAttention 4.
"""

FLASH_MLA_PROVIDERS: tuple[tuple[str, str, str | None], ...] = (
    ("flash-mla", "flash_mla.flash_mla_interface", None),
    ("sgl-flash-mla", "flash_mla.flash_mla_interface", None),
    ("vllm", "vllm.third_party.flashmla.flash_mla_interface", "0.15"),
    ("sglang-kernel", "sgl_kernel.flash_mla", None),
    ("sgl-kernel", "sgl_kernel.flash_mla", None),
)
"""(distribution, module, first release with it) of the packages that carry FlashMLA, in the order of preference.

vLLM's earlier releases have other modules (vllm-project/vllm pull request 32491).
"""

TOOLS = ("nvcc", "ninja")


@functools.cache
def installed_packages() -> tuple[tuple[str, str], ...]:
    """(name, version) of every installed distribution of ``DISTRIBUTIONS``, sorted by name."""
    found = []
    for name in DISTRIBUTIONS:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(found)


def version(distribution: str) -> str | None:
    """Version of any installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def nvidia_driver_version() -> str | None:
    """Version of the NVIDIA kernel driver that is loaded, whether or not PyTorch can use it; None without one."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\d+\.\d+(\.\d+)?", text)
    return found.group() if found else None


@functools.cache
def build_tools() -> frozenset[str]:
    """Build tools on the PATH or in CUDA's folder; ``triton-interpreter`` when Triton runs its kernels on the CPU."""
    found = {tool for tool in TOOLS if shutil.which(tool)}
    if any((Path(home) / "bin" / "nvcc").exists() for home in environment.cuda_homes()):
        found.add("nvcc")
    if environment.read("TRITON_INTERPRET"):
        found.add("triton-interpreter")
    return frozenset(found)


def _cudnn_version() -> tuple[int, int, int] | None:
    """None without cuDNN, and where a library loaded another cuDNN first, which PyTorch then refuses to use."""
    try:
        version = torch.backends.cudnn.version()
    except RuntimeError as reason:
        logger.warning("PyTorch cannot use cuDNN: %s", reason)
        return None
    if version is None:
        return None
    if version >= 90000:
        return version // 10000, version // 100 % 100, version % 100
    return version // 1000, version // 100 % 10, version % 100


def platform(device_type: str, device_index: int | None = None) -> Platform:
    """The platform of a device.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        device_index: CUDA ordinal; None for the current device.

    Raises:
        RuntimeError: a CUDA device was requested and PyTorch sees none.
    """
    if device_type != "cuda":
        return Platform(device_type, packages=installed_packages(), tools=build_tools())
    if not torch.cuda.is_available():
        raise RuntimeError(
            "a CUDA device was requested, but PyTorch sees none; use CPU tensors or install a CUDA build"
        )
    return _cuda_platform(torch.cuda.current_device() if device_index is None else device_index)


@functools.cache
def _cuda_platform(device_index: int) -> Platform:
    properties = torch.cuda.get_device_properties(device_index)
    return Platform(
        "cuda",
        compute_capability=(properties.major, properties.minor),
        packages=installed_packages(),
        cudnn_version=_cudnn_version(),
        cuda_version=torch.version.cuda,
        shared_memory_per_block=getattr(properties, "shared_memory_per_block_optin", None),
        multi_processor_count=properties.multi_processor_count,
        tools=build_tools(),
        device_name=properties.name,
    )
