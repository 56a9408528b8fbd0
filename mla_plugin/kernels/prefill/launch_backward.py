"""Launches the backward kernels: row statistics, then dK and dV, then dQ."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton

from mla_plugin.kernels import tiles
from mla_plugin.kernels.launch import Launch, compile_together, descriptor, on_device_of
from mla_plugin.kernels.prefill.backward_kv import attention_backward_kv_kernel
from mla_plugin.kernels.prefill.backward_q import attention_backward_q_kernel
from mla_plugin.kernels.prefill.backward_rows import delta_kernel
from mla_plugin.kernels.prefill.packing import (
    Packing,
    columns_of,
    contiguous_strides,
    dot_precision,
    is_wide,
    launch_options,
    lse_strides,
    output_like,
    pick,
    sizes_of,
    static_tile,
    with_aligned_rows,
)
from mla_plugin.kernels.prefill.tuning import measured_tile
from mla_plugin.kernels.tile_math import split_head_dim

_DELTA_ROWS = 64
_MAX_KINDS = 4096
_Three = tuple[int, int, int]  # of the sequence, head and token dimensions
_Call = tuple[Launch, tuple[object, ...]]


class _Kind(NamedTuple):
    """What the launches of a backward are worked out from, once: everything but the memory of its tensors."""

    dtype: torch.dtype
    device: torch.device
    layout: str
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    q_strides: _Three
    k_strides: _Three
    v_strides: _Three
    out_strides: _Three
    dout_strides: _Three
    sizes: _Three  # sequences, query heads, key-value heads
    sight: tuple[int, int, int, int, bool]
    has_lengths: bool
    has_dlse: bool
    softmax_scale: float
    by_descriptors: bool

    @property
    def packed(self) -> bool:
        return self.layout == "thd"

    @property
    def columns(self) -> tuple[int, int, int, int]:
        return columns_of(self.q_shape[-1], self.v_shape[-1])

    @property
    def code(self) -> tuple[object, ...]:
        """What decides about the code of the kernels, lengths and strides aside; few of them in a program."""
        _, heads, kv_heads = self.sizes
        _, _, left, right, bottom_right = self.sight
        mask = (left >= 0, right >= 0, bottom_right)
        call = (self.layout, self.has_lengths, self.has_dlse, self.by_descriptors, heads // kv_heads)
        return (self.dtype, self.device, self.q_shape[-1], self.v_shape[-1], *mask, *call)

    @property
    def lse_strides(self) -> tuple[int, int]:
        """Between sequences and between heads."""
        return lse_strides(self.q_shape, self.sizes[1], self.sight[0], self.layout)


_compiled: set[tuple[object, ...]] = set()
"""``_Kind.code`` of what was compiled together; the rest is compiled kernel by kernel as it is met."""


@functools.cache
def _has_tensor_memory_access(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _can_be_described(tensors: tuple[torch.Tensor, ...], strides: tuple[_Three, ...]) -> bool:
    """The hardware's rule: memory and strides in steps of 16 bytes."""
    bits, unit = 0, 16 // tensors[0].element_size()
    for x, three in zip(tensors, strides, strict=True):
        bits |= x.data_ptr()
        if any(stride <= 0 or stride % unit for stride in three):
            return False
    return bits % 16 == 0


def _described(x: torch.Tensor, strides: _Three, layout: str, rows: int, columns: tuple[int, int]) -> list[object]:
    """Descriptors over [B, H, S, D] for the two blocks of columns."""
    shape = (*pick(x.shape, layout), x.shape[-1])
    first = descriptor(x.data_ptr(), x.dtype, shape, strides, (1, 1, rows, columns[0]))
    second = first
    if columns[1]:
        second = descriptor(x.data_ptr(), x.dtype, shape, strides, (1, 1, rows, columns[1]))
    return [first, second]


def _sources(kind: _Kind, tensors: tuple[torch.Tensor, ...], tile: tiles.Tile) -> list[object]:
    """q, k, v, dout for a backward kernel, each twice: as descriptors where that is possible, else as pointers.

    Descriptors are 2 to 8 % faster on an H200. Packed sequences and padded batches need masks that they lack.
    """
    if not (kind.by_descriptors and tile.suits_descriptors):
        return [x for tensor in tensors for x in (tensor, tensor)]
    found: list[object] = []
    strides = (kind.q_strides, kind.k_strides, kind.v_strides, kind.dout_strides)
    halves = (kind.columns[:2], kind.columns[:2], kind.columns[2:], kind.columns[2:])
    for x, three, rows, columns in zip(
        tensors, strides, (tile.block_m, tile.block_n, tile.block_n, tile.block_m), halves, strict=True
    ):
        found += _described(x, three, kind.layout, rows, columns)
    return found


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
    inputs, offsets = tuple(with_aligned_rows(x) for x in (q, k, v, dout)), packing.offsets()
    q, k, v, dout = inputs
    kind = _kind_of(q, k, v, out, dout, dlse, softmax_scale, packing)
    lse = lse.contiguous()
    rows = (torch.empty_like(lse), torch.empty_like(lse))
    dlse = None if dlse is None else dlse.contiguous()

    def call_kv(tile: tiles.Tile) -> _Call:
        return _kv_launch(kind, tile), (*_sources(kind, inputs, tile), *rows, dk, dv, *offsets)

    def call_q(tile: tiles.Tile) -> _Call:
        return _q_launch(kind, tile), (*_sources(kind, inputs, tile), *rows, dq, *offsets)

    with on_device_of(q):
        calls: list[_Call] = [(_delta_launch(kind), (out, dout, lse, dlse, *rows))]
        if tuned:
            _run(*calls.pop())  # what is measured needs the row statistics
            calls += [
                _measured("backward_kv", call_kv, q, v, packing),
                _measured("backward_q", call_q, q, v, packing),
            ]
        else:
            calls += [call_kv(static_tile("backward_kv", q, v)), call_q(static_tile("backward_q", q, v))]
        if q.is_cuda and kind.code not in _compiled:
            compile_together(calls, q.device)
            _compiled.add(kind.code)
        for call in calls:
            _run(*call)
    return dq, dk, dv


def _run(launch: Launch, arguments: tuple[object, ...]) -> None:
    launch(*arguments)


def _measured(
    kernel: str,
    call: Callable[[tiles.Tile], _Call],
    q: torch.Tensor,
    v: torch.Tensor,
    packing: Packing,
) -> _Call:
    return call(measured_tile(kernel, q, v, packing, lambda tile: _run(*call(tile))))


def _kind_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    softmax_scale: float,
    packing: Packing,
) -> _Kind:
    layout = packing.qkv_format
    q_strides, k_strides, v_strides, dout_strides = (pick(x.stride(), layout) for x in (q, k, v, dout))
    described = (
        packing.cu_seqlens_q is None
        and _has_tensor_memory_access(q.device)
        and _can_be_described((q, k, v, dout), (q_strides, k_strides, v_strides, dout_strides))
    )
    return _Kind(
        q.dtype,
        q.device,
        layout,
        q.shape,
        k.shape,
        v.shape,
        q_strides,
        k_strides,
        v_strides,
        pick(out.stride(), layout),
        dout_strides,
        sizes_of(q, k, packing),
        packing.sight,
        packing.cu_seqlens_q is not None,
        dlse is not None,
        softmax_scale,
        described,
    )


@functools.lru_cache(maxsize=_MAX_KINDS)
def _delta_launch(kind: _Kind) -> Launch:
    """Writes lse in log2 and delta, both in lse's shape."""
    batch, heads, _ = kind.sizes
    sequences, num_rows = (1, kind.q_shape[0]) if kind.packed else (batch, kind.sight[0])
    head_dim_v = kind.v_shape[-1]
    arguments = (
        *kind.out_strides,
        *kind.dout_strides,
        *kind.lse_strides,
        heads,
        num_rows,
        head_dim_v,
        *split_head_dim(head_dim_v),
        _DELTA_ROWS,
        kind.has_dlse,
        is_wide(kind.out_strides, kind.dout_strides),
    )
    grid = (triton.cdiv(num_rows, _DELTA_ROWS) * heads * sequences, 1, 1)
    return Launch(delta_kernel, grid, arguments, {"num_warps": 4})


def _common_arguments(
    kind: _Kind, tile: tiles.Tile, outputs: tuple[_Three, ...], num_heads: int
) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """What both kernels are told after their tensors: the first arguments, and the last."""
    batch, heads, kv_heads = kind.sizes
    max_seqlen_q, max_seqlen_kv, left, right, bottom_right = kind.sight
    strides = (kind.q_strides, kind.k_strides, kind.v_strides, kind.dout_strides, *outputs)
    first = (
        *(stride for three in strides for stride in three),
        *kind.lse_strides,
        num_heads,
        max_seqlen_q,
        max_seqlen_kv,
        left,
        right,
        kind.softmax_scale,
        kind.q_shape[-1],
        kind.v_shape[-1],
        *kind.columns,
        heads // kv_heads,
        tile.block_m,
        tile.block_n,
        kind.packed,
        kind.has_lengths,
        bottom_right,
        left >= 0,
        right >= 0,
        dot_precision(kind.dtype),
    )
    last = (_heads_together(batch * num_heads), is_wide(*strides), kind.by_descriptors and tile.suits_descriptors)
    return first, last


@functools.lru_cache(maxsize=_MAX_KINDS)
def _kv_launch(kind: _Kind, tile: tiles.Tile) -> Launch:
    batch, _, kv_heads = kind.sizes
    max_seqlen_q, max_seqlen_kv = kind.sight[:2]
    outputs = (contiguous_strides(kind.k_shape, kind.layout), contiguous_strides(kind.v_shape, kind.layout))
    first, last = _common_arguments(kind, tile, outputs, kv_heads)
    is_even = (
        not kind.has_lengths and max_seqlen_q % tile.block_m == 0,
        not kind.has_lengths and max_seqlen_kv % tile.block_n == 0,
    )
    grid = (triton.cdiv(max_seqlen_kv, tile.block_n) * kv_heads * batch, 1, 1)
    return Launch(attention_backward_kv_kernel, grid, (*first, *is_even, *last), launch_options(tile))


@functools.lru_cache(maxsize=_MAX_KINDS)
def _q_launch(kind: _Kind, tile: tiles.Tile) -> Launch:
    batch, heads, _ = kind.sizes
    first, last = _common_arguments(kind, tile, (contiguous_strides(kind.q_shape, kind.layout),), heads)
    grid = (triton.cdiv(kind.sight[0], tile.block_m) * heads * batch, 1, 1)
    return Launch(attention_backward_q_kernel, grid, (*first, *last), launch_options(tile))
