"""Launches the forward kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from mla_plugin.kernels import tiles
from mla_plugin.kernels.hopper.rule import plain_kernel_for
from mla_plugin.kernels.launch import Launch, named_strides, on_device_of
from mla_plugin.kernels.prefill.forward import attention_forward_kernel
from mla_plugin.kernels.prefill.packing import (
    OFFSETS,
    Kind,
    Packing,
    gpu_class_of,
    is_in,
    l2_cache_bytes,
    launch_options,
    lse_like,
    output_like,
    with_aligned_rows,
)
from mla_plugin.kernels.prefill.tuning import measured_tile
from mla_plugin.kernels.tiles import ceil_div


@functools.lru_cache(maxsize=4096)
def _forward_launch(kind: Kind, tile: tiles.Tile | None) -> Launch:
    """No ``tile``: the table's."""
    if tile is None:
        tile = tiles.tile_for(tiles.FORWARD, gpu_class_of(kind.device), kind.dtype.itemsize, sum(kind.columns))
    out_strides = kind.layout.contiguous_strides((*kind.q_shape[:-1], kind.v_shape[-1]))
    kv_bytes = kind.seqlen_kv * (kind.q_shape[-1] + kind.v_shape[-1]) * kind.dtype.itemsize
    batch_heads, group = kind.num_sequences * kind.num_heads, kind.num_heads // kind.num_kv_heads
    fixed = kind.arguments(tile) | named_strides("o", "bhm", out_strides)
    fixed |= {
        "num_heads": kind.num_heads,
        "heads_together": heads_together(batch_heads, group, kv_bytes, l2_cache_bytes(kind.device)),
        "WIDE": kind.is_wide(out_strides),
    }
    grid = (ceil_div(kind.seqlen_q, tile.block_m) * batch_heads, 1, 1)
    return Launch(attention_forward_kernel, grid, ("Q", "K", "V", "Out", "Lse", *OFFSETS), fixed, launch_options(tile))


@functools.cache
def _hopper() -> Callable[[Kind], Callable[..., None]]:
    """Gives the Hopper kernel's launch for a kind of call; Gluon is imported only where it is used."""
    from mla_plugin.kernels.hopper.launch_forward import forward_of

    return forward_of


_KEPT, _KEPT_SHARED = "triton", "triton, k and v at one address"
"""Under which a launch is kept: the backend's name, or another one where v may lie in k."""


def heads_together(batch_heads: int, group: int, kv_bytes: int, l2_bytes: int) -> int:
    """Number of heads that run side by side: as many as fit half the L2 cache with their keys and values.

    Under a causal mask the longest rows of all of them then start first; with one head after another, the last head's
    longest rows start when most SMs are about to run out of work. On an H200 at (1, 16, 4096), 192/128: 472 against
    383 TFLOP/s; if the cache does not hold them (32 heads of 16,384 keys), 8 together are 5 % slower. ``kv_bytes``: of
    one head of k and v, which ``group`` heads of q share.
    """
    for together in (8, 4):
        if batch_heads % together == 0 and ceil_div(together, group) * kv_bytes <= l2_bytes // 2:
            return together
    return 1


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    packing: Packing,
    tuned: bool = False,
    kept: dict[str, Any] | None = None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (*q.shape[:-1], head_dim_v) and lse ([B, H, S_q] or [H, T]), one kernel.

    q, k, v may have any strides. ``softmax_scale`` > 0. ``tuned``: the tile is measured at the first call of each kind,
    see tuning.py; otherwise it is the table's. ``kept``: cache of the launch, for calls that differ only in their
    tensors' addresses; one for k and v at one address, and one for others. ``batch_invariant``: a row's bits are to
    depend on its keys alone.
    """
    if q.numel() == 0:
        return output_like(q, v.shape[-1], packing.layout), lse_like(q, packing.layout)
    known = None
    if kept is not None and not tuned:
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
        key = _KEPT_SHARED if addresses[1] == addresses[2] else _KEPT
        if (addresses[0] | addresses[1] | addresses[2]) % 16 == 0:
            known = kept.get(key)
    if known is not None:
        launch, out_shape, lse_shape, fills_gaps = known
        out, lse = q.new_empty(out_shape), q.new_empty(lse_shape, dtype=torch.float32)
        if not fills_gaps:
            out.zero_()
            lse.fill_(-torch.inf)
        with on_device_of(q):
            launch(q, k, v, out, lse, *packing.offsets())
        return out, lse
    given = (q, k, v)
    is_shared = is_in(v, k)
    q, k = with_aligned_rows(q), with_aligned_rows(k)
    v = k[..., : v.shape[-1]] if is_shared and k is not given[1] else with_aligned_rows(v)
    kind = Kind.of(q, k, v, softmax_scale, packing)
    is_plain = plain_kernel_for(kind, batch_invariant) is not None
    fills_gaps = not (is_plain and packing.layout.is_packed)
    if fills_gaps:
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        lse = q.new_empty(packing.layout.lse_shape(q.shape), dtype=torch.float32)
    else:
        out, lse = output_like(q, v.shape[-1], packing.layout), lse_like(q, packing.layout)
    arguments = (q, k, v, out, lse, *packing.offsets())
    with on_device_of(q):
        launch = _forward_launch(kind, None) if is_plain else _hopper()(kind)
        if kept is not None and not tuned and (q is given[0] and k is given[1] and v is given[2]):
            kept[key] = launch, out.shape, lse.shape, fills_gaps
        if tuned and is_plain:
            tile = measured_tile("forward", q, v, packing, lambda tile: _forward_launch(kind, tile)(*arguments))
            launch = _forward_launch(kind, tile)
        launch(*arguments)
    return out, lse
