"""Which calls the Hopper kernels take; all others run on the plain kernels. Does not import Triton."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from mla_plugin.kernels.hopper.device import unfit_device_because

if TYPE_CHECKING:
    from mla_plugin.kernels.prefill.packing import Kind

QUERIES = 128
"""Queries of a tile: two warpgroups of 64. Over latents: ``LATENT_QUERIES``."""


class Tile(NamedTuple):
    """The configuration of a pair of head dimensions.

    Attributes:
        keys: keys of a tile of K and V.
        stages: tiles of K, and of V, in shared memory.
        ahead: K of each tile is loaded before V of the previous one, the order in which they are used and released. On
            an H100 that is 6 % faster at (1, 16, 8192), 128/128, causal, and 4 % at (1, 32, 8192), 64/64; but at
            192/128 5 to 9 % slower with 16,384 tokens and a causal mask, and at 256/256 2 %.
    """

    keys: int
    stages: int
    ahead: bool = False


TILES: dict[tuple[int, int], Tile] = {
    (192, 128): Tile(128, 2),
    (128, 128): Tile(128, 2, ahead=True),
    (64, 64): Tile(128, 2, ahead=True),
    (256, 256): Tile(64, 2),
    (96, 64): Tile(128, 2),
}
"""The forward's, by head_dim_qk and head_dim_v; the backward takes the same pairs, see ``plain_dq_because``."""
LATENT = (576, 512)
"""head_dim_qk and head_dim_v over latents, with absorbed weights, of ``latent_forward_kernel``."""
_LATENT_NAME = "{}/{}".format(*LATENT)
V_IN_K = f"k[..., :{LATENT[1]}] in k's memory"
LATENT_QUERIES = 64
"""Queries of a tile of ``latent_forward_kernel``: both warpgroups have the same."""


def is_latent(head_dim_qk: int, head_dim_v: int) -> bool:
    """These are the head dimensions of ``latent_forward_kernel``."""
    return (head_dim_qk, head_dim_v) == LATENT


def plain_kernel_because(
    capability: tuple[int, int] | None,
    version: str | None,
    dtype: torch.dtype,
    head_dim_qk: int,
    head_dim_v: int,
    *,
    window_left: int = -1,
    batch_invariant: bool = False,
) -> str | None:
    """Why the plain kernel computes such calls, wherever their tensors lie; None: see ``plain_kernel_for``.

    Args:
        capability, version: as of ``unfit_device_because``.
        dtype, head_dim_qk, head_dim_v, window_left, batch_invariant: of the call.
    """
    reason = unfit_device_because(capability, version)
    if reason is not None:
        return reason
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype}, the Hopper kernel needs bfloat16 or float16"
    if (head_dim_qk, head_dim_v) not in (*TILES, LATENT):
        widths = ", ".join(f"{qk}/{v}" for qk, v in (*TILES, LATENT))
        return f"head dimensions {head_dim_qk}/{head_dim_v}, the Hopper kernel has {widths}"
    if is_latent(head_dim_qk, head_dim_v) and window_left >= 0:
        return f"a window with left={window_left}, which the Hopper kernel of {_LATENT_NAME} does not have"
    if batch_invariant:
        return "batch_invariant=True: strides, which decide between the kernels, must not change the bits"
    return None


def plain_backward_because(head_dim_qk: int, head_dim_v: int) -> str | None:
    """Why the plain kernels compute the backward although the Hopper kernel computes the forward; None: they do not."""
    if is_latent(head_dim_qk, head_dim_v):
        return f"the Hopper kernels have no backward for head dimensions {_LATENT_NAME}"
    return None


def plain_dq_because(head_dim_qk: int, head_dim_v: int) -> str | None:
    """Why the plain kernel computes dQ although the Hopper kernel computes dK and dV; None: it does not.

    On an H200 at (1, 32, 8192), 64/64, causal: 647 against 561 TFLOP/s.
    """
    if (head_dim_qk, head_dim_v) == (64, 64):
        return "it is faster at head dimensions 64/64"
    return None


@functools.cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


@functools.lru_cache(maxsize=4096)
def plain_kernel_for(kind: Kind, batch_invariant: bool = False) -> str | None:
    """Why the plain kernel computes this kind of call; None: the Hopper kernel does.

    Of the addresses it matters whether v is in k, at 576/512. ``with_aligned_rows`` has copied tensors that are not
    aligned to 16 bytes.
    """
    import triton

    head_dims = kind.q_shape[-1], kind.v_shape[-1]
    capability = _capability(kind.device)
    reason = plain_kernel_because(
        *(capability, triton.__version__, kind.dtype, *head_dims),
        window_left=kind.band.left,
        batch_invariant=batch_invariant,
    )
    if reason is not None:
        return reason
    tensors = ((kind.q_shape, kind.q_strides), (kind.k_shape, kind.k_strides), (kind.v_shape, kind.v_strides))
    for name, (shape, strides) in zip("qkv", tensors, strict=True):
        if 0 in shape:
            return f"{name} is empty: {tuple(shape)}"
        if not _can_be_copied(shape, strides):
            return f"{name} has strides {strides}, TMA needs positive multiples of 8 elements"
    if is_latent(*head_dims) and not kind.v_is_in_k:
        return f"v is not {V_IN_K}, as the Hopper kernel of {_LATENT_NAME} needs it"
    return None


def _can_be_copied(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    return all(size == 1 or (stride > 0 and stride % 8 == 0) for size, stride in zip(shape[:-1], strides, strict=False))


@functools.lru_cache(maxsize=4096)
def plain_dkv_for(kind: Kind, dout_strides: tuple[int, ...]) -> str | None:
    """The same for the kernel of dK and dV, which reads q, k, v as the forward does, and dout."""
    reason = plain_backward_because(kind.q_shape[-1], kind.v_shape[-1]) or plain_kernel_for(kind)
    if reason is not None:
        return reason
    if not _can_be_copied(kind.q_shape, dout_strides):
        return f"dout has strides {dout_strides}, TMA needs positive multiples of 8 elements"
    return None


@functools.lru_cache(maxsize=4096)
def plain_dq_for(kind: Kind, dout_strides: tuple[int, ...]) -> str | None:
    """The same for the kernel of dQ."""
    return plain_dkv_for(kind, dout_strides) or plain_dq_because(kind.q_shape[-1], kind.v_shape[-1])
