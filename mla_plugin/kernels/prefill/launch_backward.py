"""Launches the backward kernels: row statistics, then dK and dV, then dQ."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mla_plugin.arguments.layout import Layout
from mla_plugin.kernels import tiles
from mla_plugin.kernels.descriptors import descriptor
from mla_plugin.kernels.hopper.rule import plain_dkv_for, plain_dq_for
from mla_plugin.kernels.launch import Launch, compile_together, named_strides, on_device_of
from mla_plugin.kernels.prefill import shared_heads
from mla_plugin.kernels.prefill.backward_kv import attention_backward_kv_kernel
from mla_plugin.kernels.prefill.backward_q import attention_backward_q_kernel
from mla_plugin.kernels.prefill.backward_rows import delta_kernel
from mla_plugin.kernels.prefill.packing import (
    OFFSETS,
    Kind,
    Packing,
    is_wide,
    launch_options,
    output_like,
    static_tile,
    with_aligned_rows,
    with_contiguous_rows,
)
from mla_plugin.kernels.prefill.tuning import measured_tile
from mla_plugin.kernels.tiles import ceil_div

_DELTA_ROWS = 64
_SOURCES = ("Q", "Q1", "K", "K1", "V", "V1_", "DOut", "DOut1")
_MAX_KINDS = 4096
_Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v, dout
_Call = tuple[Launch, tuple[object, ...]]


class _Kind(NamedTuple):
    """What a backward's launches depend on: the call's kind and the strides and options of the backward.

    ``kv_dtype`` is that of dk and dv, for which a launch keeps a compiled kernel.
    """

    call: Kind
    out_strides: tuple[int, ...]
    dout_strides: tuple[int, ...]
    has_dlse: bool
    by_descriptors: bool
    kv_dtype: torch.dtype

    @property
    def code(self) -> tuple[object, ...]:
        """What determines the kernels' code, except lengths and strides; a program has few of them."""
        call = self.call
        mask = (call.some_query_may_see_no_key, call.band.left >= 0, call.band.right >= 0, call.band.bottom_right)
        widths = (call.q_shape[-1], call.v_shape[-1], call.num_heads // call.num_kv_heads)
        tensors = (call.dtype, self.kv_dtype, call.device, call.qkv_format, call.has_lengths)
        return (*tensors, self.has_dlse, self.by_descriptors, *widths, *mask)


_compiled: set[tuple[object, ...]] = set()
"""``_Kind.code`` of the kernels compiled in parallel; others are compiled one by one when first launched."""


@functools.cache
def _has_tensor_memory_access(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _can_be_described(*tensors: torch.Tensor) -> bool:
    """The hardware's rule: addresses and strides are multiples of 16 bytes."""
    bits, unit = 0, 16 // tensors[0].element_size()
    for x in tensors:
        bits |= x.data_ptr()
        if any(stride <= 0 or stride % unit for stride in x.stride()[:-1]):
            return False
    return bits % 16 == 0


def _described(x: torch.Tensor, layout: Layout, rows: int, columns: tuple[int, int]) -> list[object]:
    """Descriptors over [B, H, S, D] for the two blocks of columns."""
    shape, strides = (*layout.pick(x.shape), x.shape[-1]), layout.pick(x.stride())
    first = descriptor(x.data_ptr(), x.dtype, shape, strides, (1, 1, rows, columns[0]))
    second = first
    if columns[1]:
        second = descriptor(x.data_ptr(), x.dtype, shape, strides, (1, 1, rows, columns[1]))
    return [first, second]


def _sources(kind: _Kind, tensors: _Inputs, tile: tiles.Tile) -> list[object]:
    """q, k, v, dout for a backward kernel, each twice: as descriptors if possible, else as pointers.

    Descriptors are 2 to 8 % faster on an H200. They cannot mask, which packed sequences, padded batches and queries
    without a key need.
    """
    if not (kind.by_descriptors and tile.suits_descriptors):
        return [x for tensor in tensors for x in (tensor, tensor)]
    found: list[object] = []
    blocks = kind.call.columns
    halves = (blocks[:2], blocks[:2], blocks[2:], blocks[2:])
    rows = (tile.block_m, tile.block_n, tile.block_n, tile.block_m)
    for x, height, columns in zip(tensors, rows, halves, strict=True):
        found += _described(x, kind.call.layout, height, columns)
    return found


def _heads_together(batch_heads: int) -> int:
    """Number of heads that run side by side: few heads do, to balance a causal mask over the SMs; many need not."""
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

    Arguments as ``forward``, with its out and lse and their gradients, of any strides. A query that sees no key
    contributes nothing, even if its gradient is not finite. ``hopper/rule.py`` says where the Hopper kernels run.
    """
    if q.numel() == 0 or k.numel() == 0:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    q, k, v, dout = map(with_aligned_rows, (q, k, v, dout))
    out = with_contiguous_rows(out)
    inputs, offsets = (q, k, v, dout), packing.offsets()
    kind = _kind_of(inputs, out, dlse, softmax_scale, packing)
    lse = lse.contiguous()
    rows = (torch.empty_like(lse), torch.empty_like(lse))
    dlse = None if dlse is None else dlse.contiguous()
    inputs_kv, kind_kv, copies = inputs, kind, shared_heads.copies(kind.call)
    heads = packing.layout.heads
    if copies > 1:
        k_copies, v_copies = (with_aligned_rows(shared_heads.repeated(x, heads, copies)) for x in (k, v))
        inputs_kv = (q, k_copies, v_copies, dout)
        kind_kv = _kind_of(inputs_kv, out, dlse, softmax_scale, packing)._replace(kv_dtype=torch.float32)
    is_plain_kv = plain_dkv_for(kind_kv.call, kind.dout_strides) is not None
    is_plain_q = plain_dq_for(kind.call, kind.dout_strides) is not None
    dq = _memory_like(q, is_plain_q, packing.layout)
    dk, dv = (_memory_like(x, is_plain_kv, packing.layout, kind_kv.kv_dtype) for x in inputs_kv[1:3])

    def call_kv(tile: tiles.Tile) -> _Call:
        return _kv_launch(kind_kv, tile), (*_sources(kind_kv, inputs_kv, tile), *rows, dk, dv, *offsets)

    def call_q(tile: tiles.Tile) -> _Call:
        return _q_launch(kind, tile), (*_sources(kind, inputs, tile), *rows, dq, *offsets)

    def plain(kernel: str, call: Callable[[tiles.Tile], _Call]) -> _Call:
        return _measured(kernel, call, q, v, packing) if tuned else call(static_tile(kernel, q, v))

    with on_device_of(q):
        calls: list[_Call] = [(_delta_launch(kind), (out, dout, lse, dlse, *rows))]
        if tuned:
            _run(*calls.pop())  # what is measured needs the row statistics
        if is_plain_kv:
            *before_kv, last_kv = [plain("backward_kv", call_kv)]
        else:
            *before_kv, last_kv = _hopper_launches(kind_kv).calls_kv(inputs_kv, rows, (dk, dv), offsets)
        if is_plain_q:
            *before_q, last_q = [plain("backward_q", call_q)]
        else:
            *before_q, last_q = _hopper_launches(kind).calls_q(inputs, rows, dq, offsets)
        calls += [*before_kv, *before_q, last_kv, last_q]  # with a kernel between the last two they would not overlap
        if q.is_cuda and kind_kv.code not in _compiled:
            compile_together(calls, q.device)
            _compiled.add(kind_kv.code)
        for call in calls:
            _run(*call)
    if copies > 1:
        dk, dv = (shared_heads.added(x, heads, copies, q.dtype) for x in (dk, dv))
    return dq, dk, dv


@functools.cache
def _hopper() -> Callable[..., Any]:
    """Gives the Hopper kernels' launches for a kind of call; Gluon is imported only where it is used."""
    from mla_plugin.kernels.hopper.launch_backward import backward_of

    return backward_of


def _hopper_launches(kind: _Kind) -> Any:
    return _hopper()(kind.call, kind.dout_strides, kind.kv_dtype)


def _memory_like(x: torch.Tensor, is_plain: bool, layout: Layout, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Memory for the gradient of x; the Hopper kernels write every row, padding too."""
    return output_like(x, x.shape[-1], layout, dtype) if is_plain else x.new_empty(x.shape, dtype=dtype)


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
    inputs: _Inputs, out: torch.Tensor, dlse: torch.Tensor | None, softmax_scale: float, packing: Packing
) -> _Kind:
    """``inputs``: q, k, v, dout."""
    q, k, v, dout = inputs
    call = Kind.of(q, k, v, softmax_scale, packing)
    described = (
        _has_tensor_memory_access(q.device) and call.shapes_show_every_query_a_key and _can_be_described(*inputs)
    )
    return _Kind(call, out.stride(), dout.stride(), dlse is not None, described, q.dtype)


@functools.lru_cache(maxsize=_MAX_KINDS)
def _delta_launch(kind: _Kind) -> Launch:
    """Writes lse in log2 and delta, both in lse's shape."""
    call = kind.call
    batch, heads, num_rows = call.pick(call.q_shape)
    out_strides, dout_strides = call.pick(kind.out_strides), call.pick(kind.dout_strides)
    fixed = named_strides("o", "bhm", out_strides) | named_strides("d", "bhm", dout_strides)
    fixed |= named_strides("l", "bh", call.lse_strides) | {"num_heads": heads, "num_rows": num_rows}
    _, _, first, second = call.columns
    constants = {"D_V": call.v_shape[-1], "V0": first, "V1": second, "BLOCK_M": _DELTA_ROWS}
    constants |= {"HAS_DLSE": kind.has_dlse, "WIDE": is_wide(out_strides, dout_strides)}
    sequences = 1 if call.layout.is_packed else batch
    grid = (ceil_div(num_rows, _DELTA_ROWS) * heads * sequences, 1, 1)
    given = ("Out", "DOut", "Lse", "DLse", "LseLog2", "Delta")
    return Launch(delta_kernel, grid, given, fixed | constants, {"num_warps": 4})


def _fixed(
    kind: _Kind, tile: tiles.Tile, num_heads: int, output_strides: tuple[tuple[int, int, int], ...]
) -> dict[str, object]:
    """The fixed arguments of both kernels, except their outputs' strides."""
    dout_strides = kind.call.pick(kind.dout_strides)
    return {
        **kind.call.arguments(tile),
        "SOME_SEE_NO_KEY": kind.call.some_query_may_see_no_key,
        **named_strides("d", "bhm", dout_strides),
        "HEADS_TOGETHER": _heads_together(kind.call.num_sequences * num_heads),
        "WIDE": kind.call.is_wide(dout_strides, *output_strides),
        "TMA": kind.by_descriptors and tile.suits_descriptors,
    }


@functools.lru_cache(maxsize=_MAX_KINDS)
def _kv_launch(kind: _Kind, tile: tiles.Tile) -> Launch:
    call = kind.call
    dk_strides = call.layout.contiguous_strides(call.k_shape)
    dv_strides = call.layout.contiguous_strides(call.v_shape)
    fixed = _fixed(kind, tile, call.num_kv_heads, (dk_strides, dv_strides))
    fixed |= named_strides("dk", "bhn", dk_strides) | named_strides("dv", "bhn", dv_strides)
    fixed |= {
        "num_kv_heads": call.num_kv_heads,
        "EVEN_M": call.shapes_show_every_query_a_key and call.seqlen_q % tile.block_m == 0,
        "EVEN_N": not call.has_lengths and call.seqlen_kv % tile.block_n == 0,
    }
    grid = (ceil_div(call.seqlen_kv, tile.block_n) * call.num_kv_heads * call.num_sequences, 1, 1)
    given = (*_SOURCES, "LseLog2", "Delta", "DK", "DV", *OFFSETS)
    return Launch(attention_backward_kv_kernel, grid, given, fixed, launch_options(tile))


@functools.lru_cache(maxsize=_MAX_KINDS)
def _q_launch(kind: _Kind, tile: tiles.Tile) -> Launch:
    call = kind.call
    dq_strides = call.layout.contiguous_strides(call.q_shape)
    fixed = _fixed(kind, tile, call.num_heads, (dq_strides,)) | named_strides("dq", "bhm", dq_strides)
    fixed |= {"num_heads": call.num_heads}
    grid = (ceil_div(call.seqlen_q, tile.block_m) * call.num_heads * call.num_sequences, 1, 1)
    given = (*_SOURCES, "LseLog2", "Delta", "DQ", *OFFSETS)
    return Launch(attention_backward_q_kernel, grid, given, fixed, launch_options(tile))
