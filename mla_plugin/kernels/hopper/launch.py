"""Launches the Hopper forward: the list of tiles of packed sequences, then one program a multiprocessor."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_plugin.kernels.descriptors import Address
from mla_plugin.kernels.hopper import plan
from mla_plugin.kernels.hopper.forward import attention_forward_kernel
from mla_plugin.kernels.hopper.pieces import PANEL, tile_layout
from mla_plugin.kernels.hopper.rule import QUERIES, TILES
from mla_plugin.kernels.launch import Launch, named_strides
from mla_plugin.kernels.prefill.packing import OFFSETS, Kind, l2_cache_bytes

LOADING_REGISTERS = 24
"""Of each thread of the loading warp; the others have 240."""


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def heads_together(heads: int, group: int, kv_bytes: int, l2_bytes: int) -> int:
    """Heads whose query tiles are taken side by side: as many as fit half the L2 cache with their keys and values.

    One head after the other is 20 % slower on an H200 at (1, 16, 4096), 192/128, causal: 500 against 619 TFLOP/s.

    Args:
        heads: how many there are; the result divides it.
        group: heads of q that share a head of k and v.
        kv_bytes: of one head of k and v.
        l2_bytes: size of the cache.
    """
    for together in (16, 8, 4, 2):
        if heads % together == 0 and triton.cdiv(together, group) * kv_bytes <= l2_bytes // 2:
            return together
    return 1


@functools.cache
def _default_stream_counter(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def _counter(device: torch.device) -> torch.Tensor:
    """An int32 0. The kernel leaves 0 behind, so that calls on the default stream, one after another, share one.

    Other streams may be captured in CUDA graphs, or warmed up for that in memory that is used again: theirs is new.
    """
    if torch._C._cuda_getCurrentRawStream(device.index) == 0:
        return _default_stream_counter(device)
    return torch.zeros(1, dtype=torch.int32, device=device)


@dataclass(frozen=True, eq=False)  # compared and hashed as itself, which is fast
class _Source:
    """A tensor that tiles are copied from: [B, H, S, D] with strides of the first three, tiles of rows x columns."""

    dtype: torch.dtype
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    rows: int
    columns: int


@functools.lru_cache(maxsize=4096)
def _descriptor(address: int, source: _Source) -> TensorDescriptor:
    element = triton.language.bfloat16 if source.dtype == torch.bfloat16 else triton.language.float16
    sizes = zip(source.shape, source.strides, strict=False)
    steps = [stride if size > 1 else 8 for size, stride in sizes]  # of one: any will do
    memory, block = Address(address, source.dtype), [1, 1, source.rows, source.columns]
    return TensorDescriptor(memory, list(source.shape), [*steps, 1], block, tile_layout(element))


def _sources(kind: Kind) -> tuple[_Source, _Source, _Source]:
    """q, k and v."""
    tile = TILES[kind.q_shape[-1], kind.v_shape[-1]]

    def source(shape: tuple[int, ...], strides: tuple[int, ...], rows: int, columns: int) -> _Source:
        batch, heads, tokens = kind.layout.pick(shape)
        batch = 1 if kind.layout.is_packed else batch
        return _Source(kind.dtype, (batch, heads, tokens, shape[-1]), kind.pick(strides), rows, columns)

    return (
        source(kind.q_shape, kind.q_strides, QUERIES // 2, PANEL.value),
        source(kind.k_shape, kind.k_strides, tile.keys, PANEL.value),
        source(kind.v_shape, kind.v_strides, tile.keys, kind.v_shape[-1]),
    )


class Forward:
    """A kind of call with everything prepared but its tensors' addresses; called like the plain kernel's launch."""

    def __init__(self, kind: Kind) -> None:
        packed = kind.layout.is_packed
        is_causal = kind.band.right == 0 and kind.band.left < 0
        heads = kind.num_heads if packed else kind.num_heads * kind.num_sequences
        tiles = triton.cdiv(kind.seqlen_q, QUERIES)
        if packed:
            tiles = plan.capacity(kind.pick(kind.q_shape)[2], kind.num_sequences, QUERIES)
        self._sources = _sources(kind)
        self._is_dynamic = packed or is_causal  # where tiles differ in length, who is ready takes the next
        self._plan = _plan_launch(kind, tiles, is_causal) if packed else None
        self._work_size = plan.HEADER + 2 * tiles
        self._launch = _forward_launch(kind, tiles, heads, self._is_dynamic)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *offsets: torch.Tensor | None,
    ) -> None:
        """Launch on the current device and stream; the tensors start at multiples of 16 bytes.

        Every row of out and lse is written, those of no sequence too.
        """
        work = None
        if self._plan is not None:
            work = q.new_empty(self._work_size, dtype=torch.int32)
            self._plan(work, out, lse, *offsets[:3])
        elif self._is_dynamic:
            work = _counter(q.device)
        of_q, of_k, of_v = self._sources
        self._launch(
            _descriptor(q.data_ptr(), of_q),
            _descriptor(k.data_ptr(), of_k),
            _descriptor(v.data_ptr(), of_v),
            *(out, lse, work),
            *offsets,
        )


def _forward_launch(kind: Kind, tiles: int, heads: int, is_dynamic: bool) -> Launch:
    """``tiles``: of all sequences at most, dense of one; ``heads``: of all sequences in a dense batch."""
    head_dim_qk, head_dim_v = kind.q_shape[-1], kind.v_shape[-1]
    tile, group = TILES[head_dim_qk, head_dim_v], kind.num_heads // kind.num_kv_heads
    kv_bytes = kind.pick(kind.k_shape)[2] * (head_dim_qk + head_dim_v) * kind.dtype.itemsize
    fixed: dict[str, object] = {
        **named_strides("o", "bhm", kind.layout.contiguous_strides((*kind.q_shape[:-1], head_dim_v))),
        **named_strides("l", "bh", kind.lse_strides),
        "num_tiles": tiles,
        "num_tickets": tiles * heads,
        "num_heads": kind.num_heads,
        "group": group,
        "together": heads_together(heads, group, kv_bytes, l2_cache_bytes(kind.device)),
        "max_seqlen_q": kind.seqlen_q,
        "max_seqlen_kv": kind.seqlen_kv,
        "window_left": kind.band.left,
        "window_right": kind.band.right,
        "softmax_scale": kind.softmax_scale,
        "D_V": head_dim_v,
        "BLOCK_N": tile.keys,
        "STAGES": tile.stages,
        "QK_PANELS": head_dim_qk // PANEL.value,
        "V_COLUMNS": head_dim_v,
        "DYNAMIC": is_dynamic,
        "PACKED": kind.layout.is_packed,
        "HAS_LENGTHS": kind.has_lengths,
        "BOTTOM_RIGHT": kind.band.bottom_right,
        "HAS_LEFT": kind.band.left >= 0,
        "HAS_RIGHT": kind.band.right >= 0,
        "REGISTERS": LOADING_REGISTERS,
    }
    grid = (min(_multiprocessors(kind.device), tiles * heads), 1, 1)
    given = ("Q", "K", "V", "Out", "Lse", "Work", *OFFSETS)
    return Launch(attention_forward_kernel, grid, given, fixed, {"num_warps": 4})


def _plan_launch(kind: Kind, tiles: int, is_causal: bool) -> Launch:
    """``tiles``: of all sequences at most."""
    rank = "length"
    if is_causal:
        rank = "bottom_right" if kind.band.bottom_right and not kind.same_lengths else "top_left"
    row_size = kind.num_heads * kind.v_shape[-1]
    fixed = {
        "num_sequences": kind.num_sequences,
        "num_rows": kind.q_shape[0],
        "num_heads": kind.num_heads,
        "row_size": row_size,
        "QUERIES": QUERIES,
        "RANK": rank,
        "TILES": plan.TILES_AT_ONCE,
        "SEQUENCES": plan.SEQUENCES_AT_ONCE,
        "COLUMNS": min(plan.COLUMNS_AT_ONCE, triton.next_power_of_2(row_size)),
    }
    grid = (kind.num_sequences + 1, max(1, plan.PROGRAMS // (kind.num_sequences + 1)), 1)
    given = ("Work", "Out", "Lse", "cu_seqlens_q", "cu_seqlens_kv", "starts_q")
    return Launch(plan.plan_kernel, grid, given, fixed, {"num_warps": 4})


@functools.lru_cache(maxsize=4096)
def forward_of(kind: Kind) -> Forward:
    """The prepared call of a kind for which ``plain_kernel_for`` has no reason."""
    return Forward(kind)
