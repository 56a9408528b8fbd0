"""Launches the forward kernel."""

from __future__ import annotations

import functools

import torch
import triton

from mla_plugin.kernels import tiles
from mla_plugin.kernels.launch import Launch, on_device_of
from mla_plugin.kernels.prefill.forward import attention_forward_kernel
from mla_plugin.kernels.prefill.packing import (
    Packing,
    card_of,
    columns_of,
    contiguous_strides,
    dot_precision,
    is_wide,
    l2_cache_bytes,
    launch_options,
    lse_like,
    lse_strides,
    output_like,
    pick,
    sizes_of,
    with_aligned_rows,
)
from mla_plugin.kernels.prefill.tuning import measured_tile


@functools.lru_cache(maxsize=4096)
def _forward_launch(
    dtype: torch.dtype,
    device: torch.device,
    layout: str,
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
    strides: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
    sizes: tuple[int, int, int],
    sight: tuple[int, int, int, int, bool],
    has_lengths: bool,
    softmax_scale: float,
    tile: tiles.Tile | None,
) -> Launch:
    """One kind of forward. ``sight`` is what ``Packing`` says beside its tensors; no ``tile``: the table's."""
    (q_shape, _, v_shape), (batch, heads, kv_heads) = shapes, sizes
    max_seqlen_q, max_seqlen_kv, left, right, bottom_right = sight
    out_strides = contiguous_strides((*q_shape[:-1], v_shape[-1]), layout)
    picked = [pick(stride, layout) for stride in strides]
    columns = columns_of(q_shape[-1], v_shape[-1])
    if tile is None:
        tile = tiles.tile_for(tiles.FORWARD, card_of(device), dtype.itemsize, sum(columns))
    kv_bytes = max_seqlen_kv * (q_shape[-1] + v_shape[-1]) * dtype.itemsize
    arguments = (
        *(stride for three in (*picked, out_strides) for stride in three),
        *lse_strides(q_shape, heads, max_seqlen_q, layout),
        heads,
        max_seqlen_q,
        max_seqlen_kv,
        left,
        right,
        heads_together(batch * heads, heads // kv_heads, kv_bytes, l2_cache_bytes(device)),
        softmax_scale,
        q_shape[-1],
        v_shape[-1],
        *columns,
        heads // kv_heads,
        tile.block_m,
        tile.block_n,
        layout == "thd",
        has_lengths,
        bottom_right,
        left >= 0,
        right >= 0,
        dot_precision(dtype),
        is_wide(*picked, out_strides),
    )
    grid = (triton.cdiv(max_seqlen_q, tile.block_m) * heads * batch, 1, 1)
    return Launch(attention_forward_kernel, grid, arguments, launch_options(tile))


def heads_together(batch_heads: int, group: int, kv_bytes: int, l2_bytes: int) -> int:
    """How many heads advance side by side: as many as have keys and values that fit half the L2 cache.

    Under a causal mask the longest rows of all of them then go first; head after head, the last one's longest rows
    start when most processors are about to run dry. On an H200 at (1, 16, 4096), 192/128: 472 against 383 TFLOP/s;
    where the cache does not hold them (32 heads of 16,384 keys), 8 together are 5 % slower. ``kv_bytes``: of one head
    of k and v, which ``group`` heads of q share.
    """
    for together in (8, 4):
        if batch_heads % together == 0 and triton.cdiv(together, group) * kv_bytes <= l2_bytes // 2:
            return together
    return 1


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, packing: Packing, tuned: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (*q.shape[:-1], head_dim_v) and lse ([B, H, S_q] or [H, T]), one kernel.

    The last dimension of q, k, v is contiguous; every other stride is free. ``softmax_scale`` > 0. ``tuned``: the
    tile is measured at the first call of each kind, see tuning.py; otherwise it is the table's.
    """
    sizes = sizes_of(q, k, packing)
    out = output_like(q, v.shape[-1], packing)
    lse = lse_like(q, sizes[0], sizes[1], packing)
    if out.numel() == 0:
        return out, lse
    q, k, v = with_aligned_rows(q), with_aligned_rows(k), with_aligned_rows(v)
    kind = (
        q.dtype,
        q.device,
        packing.qkv_format,
        (q.shape, k.shape, v.shape),
        (q.stride(), k.stride(), v.stride()),
        sizes,
        packing.sight,
        packing.cu_seqlens_q is not None,
        softmax_scale,
    )

    def launch(tile: tiles.Tile | None) -> None:
        _forward_launch(*kind, tile)(q, k, v, out, lse, *packing.offsets())

    with on_device_of(q):
        launch(measured_tile("forward", q, v, packing, launch) if tuned else None)
    return out, lse
