"""Launchers of the prefill kernels: which tensor goes where, which tile, what must be zeroed first."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from mla_plugin.kernels import tiles
from mla_plugin.kernels.backward_kv import attention_backward_kv_kernel
from mla_plugin.kernels.backward_q import attention_backward_q_kernel
from mla_plugin.kernels.backward_rows import delta_kernel
from mla_plugin.kernels.forward import attention_forward_kernel
from mla_plugin.kernels.tile_math import split_head_dim

_DELTA_ROWS = 64
_WIDE_STRIDE = 2**31 // 128  # 128 is the largest tile
_INTERPRETED_CLASS = 227  # the interpreter has no shared memory


@dataclass(frozen=True)
class Packing:
    """How sequences lie in the tensors, and what each query sees.

    Attributes:
        qkv_format: ``bshd``, ``sbhd``, ``bhsd`` or ``thd``.
        max_seqlen_q, max_seqlen_kv: longest sequence; S in a dense layout.
        cu_seqlens_q, cu_seqlens_kv: int32 [B + 1], true lengths; None: every sequence fills its row.
        cu_seqlens_q_padded, cu_seqlens_kv_padded: int32 [B + 1], first token of each sequence; ``thd`` only, None: as
            the true lengths.
        window_left, window_right: tokens seen on each side of the diagonal, -1 unlimited; a causal mask is right 0.
        bottom_right: the diagonal ends at the last query and the last key.
    """

    qkv_format: str
    max_seqlen_q: int
    max_seqlen_kv: int
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    cu_seqlens_q_padded: torch.Tensor | None = None
    cu_seqlens_kv_padded: torch.Tensor | None = None
    window_left: int = -1
    window_right: int = -1
    bottom_right: bool = False

    @property
    def packed(self) -> bool:
        """Sequences lie one after the other along one token dimension."""
        return self.qkv_format == "thd"

    def offsets(self) -> tuple[torch.Tensor | None, ...]:
        """cu_seqlens_q, cu_seqlens_kv and where the sequences start, as the kernels take them."""
        padded_q = self.cu_seqlens_q if self.cu_seqlens_q_padded is None else self.cu_seqlens_q_padded
        padded_kv = self.cu_seqlens_kv if self.cu_seqlens_kv_padded is None else self.cu_seqlens_kv_padded
        return self.cu_seqlens_q, self.cu_seqlens_kv, padded_q, padded_kv


_AXES = {"bshd": (0, 2, 1), "sbhd": (1, 2, 0), "bhsd": (0, 1, 2)}


def _strides(x: torch.Tensor, qkv_format: str) -> tuple[int, int, int]:
    """(sequence, head, token) strides; packed sequences differ by tokens alone."""
    if qkv_format == "thd":
        return 0, x.stride(1), x.stride(0)
    b, h, s = _AXES[qkv_format]
    return x.stride(b), x.stride(h), x.stride(s)


def _sizes(q: torch.Tensor, k: torch.Tensor, packing: Packing) -> tuple[int, int, int]:
    """(sequences, query heads, key-value heads)."""
    if packing.packed:
        assert packing.cu_seqlens_q is not None
        return packing.cu_seqlens_q.shape[0] - 1, q.shape[1], k.shape[1]
    b, h, _ = _AXES[packing.qkv_format]
    return q.shape[b], q.shape[h], k.shape[h]


def _lse_like(q: torch.Tensor, packing: Packing) -> torch.Tensor:
    batch, heads, _ = _sizes(q, q, packing)
    if packing.packed:
        return q.new_full((heads, q.shape[0]), -torch.inf, dtype=torch.float32)
    return q.new_empty((batch, heads, packing.max_seqlen_q), dtype=torch.float32)


def _lse_strides(lse: torch.Tensor) -> tuple[int, int]:
    return (0, lse.stride(0)) if lse.dim() == 2 else (lse.stride(0), lse.stride(1))


def _output_like(x: torch.Tensor, head_dim: int, packing: Packing) -> torch.Tensor:
    """Packed outputs start as zeros: tokens between and after the sequences belong to no program."""
    shape = (*x.shape[:-1], head_dim)
    return x.new_zeros(shape) if packing.packed else x.new_empty(shape)


@functools.lru_cache(maxsize=None)
def _memory_class(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_CLASS
    return tiles.shared_memory_class(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


@functools.lru_cache(maxsize=None)
def _columns(head_dim_qk: int, head_dim_v: int) -> tuple[int, int, int, int]:
    return (*split_head_dim(head_dim_qk), *split_head_dim(head_dim_v))


def _options(tile: tiles.Tile) -> dict[str, int | None]:
    options: dict[str, int | None] = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if tile.max_registers is not None:
        options["maxnreg"] = tile.max_registers
    return options


def _is_wide(packing: Packing, *tensors: torch.Tensor) -> bool:
    """One tile of some tensor spans more than an int32 offset reaches."""
    token = 0 if packing.packed else _AXES[packing.qkv_format][2]
    return any(x.stride(token) >= _WIDE_STRIDE for x in tensors)


def _precision(dtype: torch.dtype) -> str:
    """float32 products are computed in float32; TF32 would lose half of the digits."""
    return "ieee" if dtype == torch.float32 else "tf32"


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, packing: Packing
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (*q.shape[:-1], head_dim_v) and lse ([B, H, S_q] or [H, T]), one kernel.

    The last dimension of q, k, v is contiguous; every other stride is free. ``softmax_scale`` > 0.
    """
    head_dim_qk, head_dim_v = q.shape[-1], v.shape[-1]
    batch, heads, kv_heads = _sizes(q, k, packing)
    out, lse = _output_like(q, head_dim_v, packing), _lse_like(q, packing)
    if out.numel() == 0:
        return out, lse
    columns = _columns(head_dim_qk, head_dim_v)
    tile = tiles.tile_for(tiles.FORWARD, _memory_class(q.device), q.element_size(), sum(columns))
    layout = packing.qkv_format
    grid = (triton.cdiv(packing.max_seqlen_q, tile.block_m) * heads * batch,)
    attention_forward_kernel[grid](
        q,
        k,
        v,
        out,
        lse,
        *packing.offsets(),
        *_strides(q, layout),
        *_strides(k, layout),
        *_strides(v, layout),
        *_strides(out, layout),
        *_lse_strides(lse),
        heads,
        packing.max_seqlen_q,
        packing.max_seqlen_kv,
        packing.window_left,
        packing.window_right,
        softmax_scale,
        head_dim_qk,
        head_dim_v,
        *columns,
        heads // kv_heads,
        tile.block_m,
        tile.block_n,
        packing.packed,
        packing.cu_seqlens_q is not None,
        packing.bottom_right,
        packing.window_left >= 0,
        packing.window_right >= 0,
        _precision(q.dtype),
        _is_wide(packing, q, k, v, out),
        **_options(tile),
    )
    return out, lse


def _descriptors(
    x: torch.Tensor, layout: str, rows: int, columns: tuple[int, int]
) -> tuple[TensorDescriptor, TensorDescriptor] | None:
    """Tensor descriptors over [B, H, S, D] for the two blocks of columns; None when the hardware cannot take x."""
    b, h, s = _AXES[layout]
    shape = [x.shape[b], x.shape[h], x.shape[s], x.shape[-1]]
    strides = [x.stride(b), x.stride(h), x.stride(s), 1]
    unit = 16 // x.element_size()
    if x.data_ptr() % 16 or any(stride <= 0 or stride % unit for stride in strides[:3]):
        return None
    first = TensorDescriptor(x, shape, strides, [1, 1, rows, columns[0]])
    second = TensorDescriptor(x, shape, strides, [1, 1, rows, columns[1]]) if columns[1] else first
    return first, second


@functools.lru_cache(maxsize=None)
def _has_tensor_memory_access(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _sources(
    tensors: tuple[torch.Tensor, ...], columns: tuple[int, int, int, int], rows: tuple[int, ...], packing: Packing
) -> tuple[list[object], bool]:
    """q, k, v, dout for a backward kernel, each twice: as descriptors where that is possible, else as pointers.

    Descriptors are 2 to 8 % faster on an H200. Packed sequences and padded batches need masks that they lack.
    """
    halves = (columns[:2], columns[:2], columns[2:], columns[2:])
    if packing.cu_seqlens_q is None and _has_tensor_memory_access(tensors[0].device):
        found = [
            _descriptors(x, packing.qkv_format, r, half)  # type: ignore[arg-type]
            for x, r, half in zip(tensors, rows, halves, strict=True)
        ]
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv from three kernels without atomics, so two runs agree bit for bit.

    Arguments as ``forward``, with its out and lse and their gradients. The last dimension of dout is contiguous.
    """
    dq, dk = _output_like(q, q.shape[-1], packing), _output_like(k, q.shape[-1], packing)
    dv = _output_like(v, v.shape[-1], packing)
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    lse_log2, delta = _row_statistics(out, lse, dout, dlse, packing)
    rows = (lse_log2, delta)
    _backward_kv(q, k, v, dout, rows, dk, dv, softmax_scale, packing)
    _backward_q(q, k, v, dout, rows, dq, softmax_scale, packing)
    return dq, dk, dv


def _row_statistics(
    out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None, packing: Packing
) -> tuple[torch.Tensor, torch.Tensor]:
    """lse in log2 and delta, both in lse's shape."""
    batch, heads, _ = _sizes(out, out, packing)
    sequences = 1 if packing.packed else batch
    num_rows = out.shape[0] if packing.packed else packing.max_seqlen_q
    lse_log2, delta = torch.empty_like(lse), torch.empty_like(lse)
    dlse = None if dlse is None else dlse.contiguous()
    grid = (triton.cdiv(num_rows, _DELTA_ROWS) * heads * sequences,)
    delta_kernel[grid](
        out,
        dout,
        lse,
        dlse,
        lse_log2,
        delta,
        *_strides(out, packing.qkv_format),
        *_strides(dout, packing.qkv_format),
        *_lse_strides(lse),
        heads,
        num_rows,
        out.shape[-1],
        *split_head_dim(out.shape[-1]),
        _DELTA_ROWS,
        dlse is not None,
        _is_wide(packing, out, dout),
        num_warps=4,
    )
    return lse_log2, delta


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
) -> None:
    batch, heads, kv_heads = _sizes(q, k, packing)
    columns = _columns(q.shape[-1], v.shape[-1])
    tile = tiles.tile_for(tiles.BACKWARD_KV, _memory_class(q.device), q.element_size(), sum(columns))
    extents = (tile.block_m, tile.block_n, tile.block_n, tile.block_m)
    sources, tma = _sources((q, k, v, dout), columns, extents, packing)
    dense = packing.cu_seqlens_q is None
    layout = packing.qkv_format
    grid = (triton.cdiv(packing.max_seqlen_kv, tile.block_n) * kv_heads * batch,)
    attention_backward_kv_kernel[grid](
        *sources,
        *rows,
        dk,
        dv,
        *packing.offsets(),
        *_strides(q, layout),
        *_strides(k, layout),
        *_strides(v, layout),
        *_strides(dout, layout),
        *_strides(dk, layout),
        *_strides(dv, layout),
        *_lse_strides(rows[0]),
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
        _precision(q.dtype),
        dense and packing.max_seqlen_q % tile.block_m == 0,
        dense and packing.max_seqlen_kv % tile.block_n == 0,
        _heads_together(batch * kv_heads),
        _is_wide(packing, q, k, v, dout, dk, dv),
        tma,
        **_options(tile),
    )


def _backward_q(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor],
    dq: torch.Tensor,
    softmax_scale: float,
    packing: Packing,
) -> None:
    batch, heads, kv_heads = _sizes(q, k, packing)
    columns = _columns(q.shape[-1], v.shape[-1])
    tile = tiles.tile_for(tiles.BACKWARD_Q, _memory_class(q.device), q.element_size(), sum(columns))
    extents = (tile.block_m, tile.block_n, tile.block_n, tile.block_m)
    sources, tma = _sources((q, k, v, dout), columns, extents, packing)
    layout = packing.qkv_format
    grid = (triton.cdiv(packing.max_seqlen_q, tile.block_m) * heads * batch,)
    attention_backward_q_kernel[grid](
        *sources,
        *rows,
        dq,
        *packing.offsets(),
        *_strides(q, layout),
        *_strides(k, layout),
        *_strides(v, layout),
        *_strides(dout, layout),
        *_strides(dq, layout),
        *_lse_strides(rows[0]),
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
        _precision(q.dtype),
        _heads_together(batch * heads),
        _is_wide(packing, q, k, v, dout, dq),
        tma,
        **_options(tile),
    )
