"""Launches the backward kernels: row statistics, then dK and dV, then dQ."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from mla_plugin.kernels import tiles
from mla_plugin.kernels.backward_kv import attention_backward_kv_kernel
from mla_plugin.kernels.backward_q import attention_backward_q_kernel
from mla_plugin.kernels.backward_rows import delta_kernel
from mla_plugin.kernels.launch import KernelCall, compile_together, on_device_of
from mla_plugin.kernels.packing import (
    AXES,
    Packing,
    columns_of,
    dot_precision,
    is_wide,
    launch_options,
    lse_strides,
    output_like,
    sizes_of,
    static_tile,
    strides_of,
)
from mla_plugin.kernels.tile_math import split_head_dim
from mla_plugin.kernels.tuning import measured_tile

_DELTA_ROWS = 64
_MAX_KINDS = 4096


def _descriptors(
    x: torch.Tensor, layout: str, rows: int, columns: tuple[int, int]
) -> tuple[TensorDescriptor, TensorDescriptor] | None:
    """Tensor descriptors over [B, H, S, D] for the two blocks of columns; None when the hardware cannot take x."""
    b, h, s = AXES[layout]
    shape = [x.shape[b], x.shape[h], x.shape[s], x.shape[-1]]
    strides = [x.stride(b), x.stride(h), x.stride(s), 1]
    unit = 16 // x.element_size()
    if x.data_ptr() % 16 or any(stride <= 0 or stride % unit for stride in strides[:3]):
        return None
    first = TensorDescriptor(x, shape, strides, [1, 1, rows, columns[0]])
    second = TensorDescriptor(x, shape, strides, [1, 1, rows, columns[1]]) if columns[1] else first
    return first, second


@functools.cache
def _has_tensor_memory_access(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _sources(
    tensors: tuple[torch.Tensor, ...], columns: tuple[int, int, int, int], tile: tiles.Tile, packing: Packing
) -> tuple[list[object], bool]:
    """q, k, v, dout for a backward kernel, each twice: as descriptors where that is possible, else as pointers.

    Descriptors are 2 to 8 % faster on an H200. Packed sequences and padded batches need masks that they lack.
    """
    rows = (tile.block_m, tile.block_n, tile.block_n, tile.block_m)
    halves = (columns[:2], columns[:2], columns[2:], columns[2:])
    if tile.suits_descriptors and packing.cu_seqlens_q is None and _has_tensor_memory_access(tensors[0].device):
        found = [_descriptors(x, packing.qkv_format, r, half) for x, r, half in zip(tensors, rows, halves, strict=True)]
        if all(pair is not None for pair in found):
            return [descriptor for pair in found if pair is not None for descriptor in pair], True
    return [x for tensor in tensors for x in (tensor, tensor)], False


def _heads_together(batch_heads: int) -> int:
    """Few heads advance side by side, which balances a causal mask over the processors; many need no help."""
    return 8 if batch_heads <= 64 and batch_heads % 8 == 0 else 1


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    softmax_scale: float,
    packing: Packing,
    tuned: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv from three kernels without atomics, so two runs agree bit for bit.

    Arguments as ``forward``, with its out and lse and their gradients. The last dimension of dout is contiguous.
    """
    dq, dk = output_like(q, q.shape[-1], packing), output_like(k, q.shape[-1], packing)
    dv = output_like(v, v.shape[-1], packing)
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    lse_log2, delta = torch.empty_like(lse), torch.empty_like(lse)
    rows = (lse_log2, delta)
    makers = {
        "backward_kv": functools.partial(_backward_kv, q, k, v, dout, rows, dk, dv, softmax_scale, packing),
        "backward_q": functools.partial(_backward_q, q, k, v, dout, rows, dq, softmax_scale, packing),
    }
    with on_device_of(q):
        calls = [_row_statistics(out, lse, dout, dlse, rows, packing)]
        if tuned:
            calls[0]()
            calls = [_measured_call(name, make, q, v, packing) for name, make in makers.items()]
        else:
            calls += [make(static_tile(name, q, v)) for name, make in makers.items()]
            _compile_once(calls, q.device, (q.dtype, q.shape, k.shape, v.shape, packing.sight, packing.packed))
        for call in calls:
            call()
    return dq, dk, dv


def _measured_call(
    name: str, make: Callable[[tiles.Tile], KernelCall], q: torch.Tensor, v: torch.Tensor, packing: Packing
) -> KernelCall:
    return make(measured_tile(name, q, v, packing, lambda tile: make(tile)()))


_compiled: set[tuple[object, ...]] = set()


def _compile_once(calls: list[KernelCall], device: torch.device, kind: tuple[object, ...]) -> None:
    """Compile the kernels of a kind of call side by side when the kind is new: 2 s instead of 3.5 before the first."""
    kind = (device, *kind)
    if kind not in _compiled and isinstance(calls[0].kernel, triton.JITFunction):
        if len(_compiled) >= _MAX_KINDS:
            _compiled.clear()
        compile_together(calls, device)
        _compiled.add(kind)


def _row_statistics(
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    rows: tuple[torch.Tensor, torch.Tensor],
    packing: Packing,
) -> KernelCall:
    """Writes lse in log2 and delta, both in lse's shape, into ``rows``."""
    batch, heads, _ = sizes_of(out, out, packing)
    sequences = 1 if packing.packed else batch
    num_rows = out.shape[0] if packing.packed else packing.max_seqlen_q
    dlse = None if dlse is None else dlse.contiguous()
    arguments = (
        out,
        dout,
        lse,
        dlse,
        *rows,
        *strides_of(out, packing.qkv_format),
        *strides_of(dout, packing.qkv_format),
        *lse_strides(lse),
        heads,
        num_rows,
        out.shape[-1],
        *split_head_dim(out.shape[-1]),
        _DELTA_ROWS,
        dlse is not None,
        is_wide(packing, out, dout),
    )
    grid = (triton.cdiv(num_rows, _DELTA_ROWS) * heads * sequences,)
    return KernelCall(delta_kernel, grid, arguments, {"num_warps": 4})


def _backward_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor],
    dk: torch.Tensor,
    dv: torch.Tensor,
    softmax_scale: float,
    packing: Packing,
    tile: tiles.Tile,
) -> KernelCall:
    batch, heads, kv_heads = sizes_of(q, k, packing)
    columns = columns_of(q.shape[-1], v.shape[-1])
    sources, tma = _sources((q, k, v, dout), columns, tile, packing)
    dense = packing.cu_seqlens_q is None
    layout = packing.qkv_format
    grid = (triton.cdiv(packing.max_seqlen_kv, tile.block_n) * kv_heads * batch,)
    arguments = (
        *sources,
        *rows,
        dk,
        dv,
        *packing.offsets(),
        *strides_of(q, layout),
        *strides_of(k, layout),
        *strides_of(v, layout),
        *strides_of(dout, layout),
        *strides_of(dk, layout),
        *strides_of(dv, layout),
        *lse_strides(rows[0]),
        kv_heads,
        packing.max_seqlen_q,
        packing.max_seqlen_kv,
        packing.window_left,
        packing.window_right,
        softmax_scale,
        q.shape[-1],
        v.shape[-1],
        *columns,
        heads // kv_heads,
        tile.block_m,
        tile.block_n,
        packing.packed,
        not dense,
        packing.bottom_right,
        packing.window_left >= 0,
        packing.window_right >= 0,
        dot_precision(q.dtype),
        dense and packing.max_seqlen_q % tile.block_m == 0,
        dense and packing.max_seqlen_kv % tile.block_n == 0,
        _heads_together(batch * kv_heads),
        is_wide(packing, q, k, v, dout, dk, dv),
        tma,
    )
    return KernelCall(attention_backward_kv_kernel, grid, arguments, launch_options(tile))


def _backward_q(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor],
    dq: torch.Tensor,
    softmax_scale: float,
    packing: Packing,
    tile: tiles.Tile,
) -> KernelCall:
    batch, heads, kv_heads = sizes_of(q, k, packing)
    columns = columns_of(q.shape[-1], v.shape[-1])
    sources, tma = _sources((q, k, v, dout), columns, tile, packing)
    layout = packing.qkv_format
    grid = (triton.cdiv(packing.max_seqlen_q, tile.block_m) * heads * batch,)
    arguments = (
        *sources,
        *rows,
        dq,
        *packing.offsets(),
        *strides_of(q, layout),
        *strides_of(k, layout),
        *strides_of(v, layout),
        *strides_of(dout, layout),
        *strides_of(dq, layout),
        *lse_strides(rows[0]),
        heads,
        packing.max_seqlen_q,
        packing.max_seqlen_kv,
        packing.window_left,
        packing.window_right,
        softmax_scale,
        q.shape[-1],
        v.shape[-1],
        *columns,
        heads // kv_heads,
        tile.block_m,
        tile.block_n,
        packing.packed,
        packing.cu_seqlens_q is not None,
        packing.bottom_right,
        packing.window_left >= 0,
        packing.window_right >= 0,
        dot_precision(q.dtype),
        _heads_together(batch * heads),
        is_wide(packing, q, k, v, dout, dq),
        tma,
    )
    return KernelCall(attention_backward_q_kernel, grid, arguments, launch_options(tile))
