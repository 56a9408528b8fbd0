"""Which forwards the Hopper kernel takes; all others go to the plain kernel. Importing this imports no Triton."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from mla_plugin.kernels.prefill.packing import Kind

TRITON_VERSIONS = ("3.6", "3.7")
"""Gluon is experimental and changes: these are the versions that the kernel was tested with."""
CAPABILITY = (9, 0)
QUERIES = 128
"""Of a query tile: two warpgroups of 64."""


class Tile(NamedTuple):
    """What a pair of head dimensions is computed with.

    Attributes:
        keys: in a tile of K and V.
        stages: tiles of K, and of V, that shared memory holds.
    """

    keys: int
    stages: int


TILES: dict[tuple[int, int], Tile] = {
    (192, 128): Tile(128, 2),
    (128, 128): Tile(128, 2),
    (64, 64): Tile(128, 2),
}
"""By head_dim_qk and head_dim_v."""


def plain_kernel_because(
    capability: tuple[int, int] | None,
    version: str | None,
    dtype: torch.dtype,
    head_dim_qk: int,
    head_dim_v: int,
    *,
    batch_invariant: bool = False,
) -> str | None:
    """Why the plain kernel computes such calls whatever their tensors are like; None: see ``plain_kernel_for``.

    Args:
        capability: of the device; None without one.
        version: Triton's; None without it.
        dtype, head_dim_qk, head_dim_v, batch_invariant: of the call.
    """
    if capability != CAPABILITY:
        return f"compute capability {capability}, the Hopper kernel needs {CAPABILITY}"
    if version is None or ".".join(version.split(".")[:2]) not in TRITON_VERSIONS:
        return f"Triton {version}, the Hopper kernel needs {' or '.join(TRITON_VERSIONS)}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype}, the Hopper kernel needs bfloat16 or float16"
    if (head_dim_qk, head_dim_v) not in TILES:
        widths = ", ".join(f"{qk}/{v}" for qk, v in TILES)
        return f"head dimensions {head_dim_qk}/{head_dim_v}, the Hopper kernel has {widths}"
    if batch_invariant:
        return "batch_invariant=True: strides, which decide between the kernels, must not change the bits"
    return None


@functools.cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


@functools.lru_cache(maxsize=4096)
def plain_kernel_for(kind: Kind, batch_invariant: bool = False) -> str | None:
    """Why the plain kernel computes this kind of call; None: the Hopper kernel does.

    Addresses play no part: a tensor that does not start at a multiple of 16 bytes was copied, see
    ``with_aligned_rows``.
    """
    import triton

    head_dims = kind.q_shape[-1], kind.v_shape[-1]
    capability = _capability(kind.device)
    reason = plain_kernel_because(
        capability, triton.__version__, kind.dtype, *head_dims, batch_invariant=batch_invariant
    )
    if reason is not None:
        return reason
    tensors = ((kind.q_shape, kind.q_strides), (kind.k_shape, kind.k_strides), (kind.v_shape, kind.v_strides))
    for name, (shape, strides) in zip("qkv", tensors, strict=True):
        if 0 in shape:
            return f"{name} is empty: {tuple(shape)}"
        if any(size > 1 and (stride <= 0 or stride % 8) for size, stride in zip(shape[:-1], strides, strict=False)):
            return f"{name} has strides {strides}, the copy engine needs positive multiples of 8"
    return None
