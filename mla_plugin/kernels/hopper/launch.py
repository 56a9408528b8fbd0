"""Launches the Hopper forward: the list of tiles of packed sequences, then one program a multiprocessor."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_plugin.kernels.hopper import plan
from mla_plugin.kernels.hopper.forward import PANEL, attention_forward_kernel, tile_layout
from mla_plugin.kernels.hopper.rule import QUERIES, TILES
from mla_plugin.kernels.launch import Address, Launch, named_strides
from mla_plugin.kernels.prefill.packing import OFFSETS, Kind, l2_cache_bytes

_ROWS = QUERIES // 2
_LOADING_REGISTERS = 24


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def heads_together(heads: int, group: int, kv_bytes: int, l2_bytes: int) -> int:
    """Heads whose query tiles are taken side by side: as many as fit half the L2 cache with their keys and values.

    ``heads``: those to choose from; the result divides it. ``kv_bytes``: of a head of k and v, which ``group`` heads
    of q share.
    """
    for together in (16, 8, 4, 2):
        if heads % together == 0 and triton.cdiv(together, group) * kv_bytes <= l2_bytes // 2:
            return together
    return 1


_counters: dict[tuple[int | None, int], torch.Tensor] = {}
_SPECIAL_STREAMS = (1, 2)
"""CUDA's handles that stand for another stream in every thread, or for the default stream a second time."""


def _tickets(device: torch.device) -> torch.Tensor:
    """A counter at 0, which the kernel sets to 0 again: one for each stream, whose kernels run one after another.

    A CUDA graph, which may run beside anything, gets one of its own, and so do calls on a stream that is not one.
    """
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    if stream in _SPECIAL_STREAMS or torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    found = _counters.get((device.index, stream))
    if found is None:
        found = _counters.setdefault((device.index, stream), torch.zeros(1, dtype=torch.int32, device=device))
    return found


@functools.lru_cache(maxsize=4096)
def _descriptor(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    strides: tuple[int, int, int],
    rows: int,
    columns: int,
) -> TensorDescriptor:
    """A descriptor over [B, H, S, D] of tiles of rows x columns; an axis of one element may have any stride."""
    element = triton.language.bfloat16 if dtype == torch.bfloat16 else triton.language.float16
    steps = [stride if size > 1 else 8 for size, stride in zip(shape[:3], strides, strict=True)]
    return TensorDescriptor(
        Address(address, dtype), list(shape), [*steps, 1], [1, 1, rows, columns], tile_layout(element)
    )


class Forward:
    """A kind of call with everything prepared but its tensors' addresses; called like the plain kernel's launch.

    Attributes:
        kind: what it is for.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        layout, packed = kind.layout, kind.layout.is_packed
        tile = TILES[kind.q_shape[-1], kind.v_shape[-1]]
        columns = kind.v_shape[-1]
        is_causal = kind.band.right == 0 and kind.band.left < 0
        tokens = layout.pick(kind.k_shape)[2]
        kv_bytes = tokens * (kind.q_shape[-1] + kind.v_shape[-1]) * kind.dtype.itemsize
        heads = kind.num_heads if packed else kind.num_heads * kind.num_sequences
        num_tiles = triton.cdiv(kind.seqlen_q, QUERIES)
        capacity = plan.capacity(layout.pick(kind.q_shape)[2], kind.num_sequences, QUERIES) if packed else num_tiles
        self._is_dynamic = packed or is_causal
        self._work_size = plan.HEADER + 2 * capacity if packed else 1
        fixed: dict[str, object] = named_strides(
            "o", "bhm", layout.contiguous_strides((*kind.q_shape[:-1], columns))
        ) | named_strides("l", "bh", kind.lse_strides)
        fixed |= {
            "num_tiles": num_tiles,
            "num_tickets": num_tiles * heads,
            "num_heads": kind.num_heads,
            "group": kind.num_heads // kind.num_kv_heads,
            "together": heads_together(
                heads, kind.num_heads // kind.num_kv_heads, kv_bytes, l2_cache_bytes(kind.device)
            ),
            "max_seqlen_q": kind.seqlen_q,
            "max_seqlen_kv": kind.seqlen_kv,
            "window_left": kind.band.left,
            "window_right": kind.band.right,
            "softmax_scale": kind.softmax_scale,
            "D_V": columns,
            "BLOCK_N": tile.keys,
            "STAGES": tile.stages,
            "QK_PANELS": triton.cdiv(kind.q_shape[-1], PANEL.value),
            "V_COLUMNS": columns,
            "DYNAMIC": self._is_dynamic,
            "PACKED": packed,
            "HAS_LENGTHS": kind.has_lengths,
            "BOTTOM_RIGHT": kind.band.bottom_right,
            "HAS_LEFT": kind.band.left >= 0,
            "HAS_RIGHT": kind.band.right >= 0,
            "REGISTERS": _LOADING_REGISTERS,
        }
        grid = (min(_multiprocessors(kind.device), capacity * heads), 1, 1)
        given = ("Q", "K", "V", "Out", "Lse", "Work", *OFFSETS)
        self._launch = Launch(attention_forward_kernel, grid, given, fixed, {"num_warps": 4})
        self._plan = _plan_launch(kind, capacity, is_causal) if packed else None
        self._sources = tuple(
            (kind.dtype, (*layout.pick(shape), shape[-1]), layout.pick(strides), rows, width)
            for shape, strides, rows, width in (
                (kind.q_shape, kind.q_strides, _ROWS, PANEL.value),
                (kind.k_shape, kind.k_strides, tile.keys, PANEL.value),
                (kind.v_shape, kind.v_strides, tile.keys, columns),
            )
        )
        if packed:  # one sequence of all tokens
            self._sources = tuple((d, (1, *shape[1:]), *rest) for d, shape, *rest in self._sources)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *offsets: torch.Tensor | None,
    ) -> None:
        """Launch on the current device and stream; the tensors start at multiples of 16 bytes."""
        work = None
        if self._plan is not None:
            work = q.new_empty(self._work_size, dtype=torch.int32)
            self._plan(work, offsets[0], offsets[1])
        elif self._is_dynamic:
            work = _tickets(q.device)
        sources = [_descriptor(x.data_ptr(), *rest) for x, rest in zip((q, k, v), self._sources, strict=True)]
        self._launch(*sources, out, lse, work, *offsets)


def _plan_launch(kind: Kind, capacity: int, is_causal: bool) -> Launch:
    rank = "length"
    if is_causal:
        rank = "bottom_right" if kind.band.bottom_right and not kind.same_lengths else "top_left"
    shares = max(1, min(triton.cdiv(capacity, plan.TILES_AT_ONCE), 256 // kind.num_sequences))
    fixed: dict[str, Any] = {
        "num_sequences": kind.num_sequences,
        "QUERIES": QUERIES,
        "RANK": rank,
        "TILES": plan.TILES_AT_ONCE,
        "SEQUENCES": plan.SEQUENCES_AT_ONCE,
    }
    grid = (kind.num_sequences, shares, 1)
    return Launch(plan.plan_kernel, grid, ("Work", "cu_seqlens_q", "cu_seqlens_kv"), fixed, {"num_warps": 4})


@functools.lru_cache(maxsize=4096)
def forward_of(kind: Kind) -> Forward:
    """The prepared call."""
    return Forward(kind)
