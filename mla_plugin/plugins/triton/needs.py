"""What the kernels need of the machine, for attention and for decode."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mla_plugin.hooks.types import Platform

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MIN_SHARED_MEMORY = 99 * 1024


def refusals(dtype: torch.dtype, platform: Platform) -> Iterator[str]:
    """Every reason why no kernel can run in this dtype on the platform."""
    if platform.version("triton") is None:
        yield "triton is not installed: pip install triton"
    if dtype not in DTYPES:
        yield f"dtype={dtype}, expected bfloat16, float16 or float32"
    if "triton-interpreter" in platform.tools:
        if dtype == torch.bfloat16:
            yield "dtype=torch.bfloat16: Triton's interpreter has no bfloat16 product; expected float16 or float32"
        return
    if platform.device_type != "cuda":
        yield f"device_type={platform.device_type!r}, expected 'cuda'"
        return
    if platform.compute_capability is None or platform.compute_capability < (8, 0):
        yield f"compute_capability={platform.compute_capability} < (8, 0)"
    memory = platform.shared_memory_per_block
    if memory is not None and memory < MIN_SHARED_MEMORY:
        yield f"shared_memory_per_block={memory} < {MIN_SHARED_MEMORY}"
