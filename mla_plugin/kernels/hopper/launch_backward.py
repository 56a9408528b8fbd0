"""Launches the Hopper backward: the tile lists of packed sequences, then dK and dV, then dQ.

dQ starts on the SMs that dK and dV have left. Its inputs must be complete before dK and dV begin, so those are launched
without launch_pdl. A kernel launched between the two would wait for dK and dV, and dQ for it.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_plugin.kernels.hopper import plan
from mla_plugin.kernels.hopper.backward_kv import attention_backward_kv_kernel
from mla_plugin.kernels.hopper.backward_q import attention_backward_q_kernel
from mla_plugin.kernels.hopper.common import PANEL, ROWS, is_wide
from mla_plugin.kernels.hopper.descriptors import Source, descriptor
from mla_plugin.kernels.hopper.rule import QUERIES
from mla_plugin.kernels.hopper.tickets import LOADING_REGISTERS, counter, heads_together, is_dynamic
from mla_plugin.kernels.launch import Launch, named_strides
from mla_plugin.kernels.prefill.packing import OFFSETS, Kind, l2_cache_bytes, multiprocessors
from mla_plugin.kernels.tiles import ceil_div

_Call = tuple[Launch, tuple[object, ...]]
_Pair = tuple[torch.Tensor, torch.Tensor]
_Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_Offsets = tuple[torch.Tensor | None, ...]


class Backward:
    """The launches of one kind of call, complete except for the tensors' addresses."""

    def __init__(self, kind: Kind, dout_strides: tuple[int, ...]) -> None:
        self._is_packed = kind.layout.is_packed
        is_causal = kind.band.right == 0 and kind.band.left < 0
        self._is_dynamic = is_dynamic(kind)
        keys = _keys(kind)
        tiles_q, tiles_kv = ceil_div(kind.seqlen_q, QUERIES), ceil_div(kind.seqlen_kv, keys)
        if self._is_packed:
            tiles_q = plan.capacity(kind.pick(kind.q_shape)[2], kind.num_sequences, QUERIES)
            tiles_kv = plan.capacity(kind.pick(kind.k_shape)[2], kind.num_sequences, keys)
            same, bottom_right = kind.same_lengths, kind.band.bottom_right
            self._plan_q = plan.launch(kind, "q", QUERIES, plan.rank(is_causal, bottom_right and not same))
            self._plan_kv = plan.launch(kind, "kv", keys, plan.rank(is_causal, not (bottom_right or same)))
        self._size_q, self._size_kv = plan.HEADER + 2 * tiles_q, plan.HEADER + 2 * tiles_kv
        dout_shape = (*kind.q_shape[:-1], kind.v_shape[-1])
        tensors = (
            *((kind.q_shape, kind.q_strides), (kind.k_shape, kind.k_strides)),
            *((kind.v_shape, kind.v_strides), (dout_shape, dout_strides)),
        )
        self._sources = [Source.of(kind, *tensor, ROWS.value, PANEL.value) for tensor in tensors]
        self._launch_q = _launch_q(kind, tiles_q)
        self._launch_kv = _launch_kv(kind, tiles_kv)

    def calls_kv(self, inputs: _Inputs, rows: _Pair, gradients: _Pair, offsets: _Offsets) -> list[_Call]:
        """The launches that write dk and dv, in order; the tensors must be aligned to 16 bytes.

        Every row of the gradients is written, including padding.

        Args:
            inputs: q, k, v, dout.
            rows: lse in log2, and delta.
            gradients: memory for dk and dv.
            offsets: see ``Packing.offsets``.
        """
        found: list[_Call] = []
        work = self._work(inputs[0], self._size_kv, "dkv")
        if self._is_packed:
            lengths_q, lengths_kv, _, starts_kv = offsets
            found.append((self._plan_kv, (work, *gradients, None, lengths_kv, lengths_q, starts_kv)))
        found.append((self._launch_kv, (*self._described(inputs), *rows, *gradients, work, *offsets)))
        return found

    def calls_q(self, inputs: _Inputs, rows: _Pair, dq: torch.Tensor, offsets: _Offsets) -> list[_Call]:
        """The same for dq."""
        found: list[_Call] = []
        work = self._work(inputs[0], self._size_q, "dq")
        if self._is_packed:
            found.append((self._plan_q, (work, dq, None, None, *offsets[:3])))
        found.append((self._launch_q, (*self._described(inputs), *rows, dq, work, *offsets)))
        return found

    def _work(self, q: torch.Tensor, size: int, kernel: Literal["dkv", "dq"]) -> torch.Tensor | None:
        if self._is_packed:
            return q.new_empty(size, dtype=torch.int32)
        return counter(q.device, kernel) if self._is_dynamic else None

    def _described(self, inputs: _Inputs) -> list[TensorDescriptor]:
        return [descriptor(x.data_ptr(), source) for x, source in zip(inputs, self._sources, strict=True)]


def _first_sum(kind: Kind) -> int:
    """Columns of the first accumulator of dQ and dK, a power of 2. The others have a second one."""
    head_dim_qk = kind.q_shape[-1]
    columns: int = 1 << head_dim_qk.bit_length() - 1
    return columns


def _keys(kind: Kind) -> int:
    """Keys of a tile: 64 for each of two warpgroups, or 64 for both together."""
    rows: int = ROWS.value
    return rows if is_wide(_first_sum(kind)) else 2 * rows


def _fixed(kind: Kind, tiles: int, heads: int) -> dict[str, object]:
    """The fixed arguments of both kernels; ``heads``: heads with tiles in one sequence (q's or k's)."""
    head_dim_qk, head_dim_v = kind.q_shape[-1], kind.v_shape[-1]
    first = _first_sum(kind)
    return {
        **named_strides("l", "bh", kind.lse_strides),
        "num_tiles": tiles,
        "num_tickets": tiles * _heads(kind, heads),
        "num_heads": heads,
        "group": kind.num_heads // kind.num_kv_heads,
        "max_seqlen_q": kind.seqlen_q,
        "max_seqlen_kv": kind.seqlen_kv,
        "window_left": kind.band.left,
        "window_right": kind.band.right,
        "softmax_scale": kind.softmax_scale,
        "QK0": first,
        "QK1": head_dim_qk - first,
        "V_PANELS": head_dim_v // PANEL.value,
        "DYNAMIC": is_dynamic(kind),
        "PACKED": kind.layout.is_packed,
        "HAS_LENGTHS": kind.has_lengths,
        "BOTTOM_RIGHT": kind.band.bottom_right,
        "HAS_LEFT": kind.band.left >= 0,
        "HAS_RIGHT": kind.band.right >= 0,
        "REGISTERS": LOADING_REGISTERS,
    }


def _heads(kind: Kind, heads: int) -> int:
    return heads if kind.layout.is_packed else heads * kind.num_sequences


def _row_bytes(kind: Kind) -> int:
    """Bytes of one token of one head in q and dout, or in k and v."""
    return (kind.q_shape[-1] + kind.v_shape[-1]) * kind.dtype.itemsize


def _grid(kind: Kind, tickets: int) -> tuple[int, int, int]:
    return min(multiprocessors(kind.device), tickets), 1, 1


def _launch_q(kind: Kind, tiles: int) -> Launch:
    """``tiles``: at most those of all packed sequences; in a dense batch those of one sequence."""
    heads, kv_bytes = _heads(kind, kind.num_heads), kind.pick(kind.k_shape)[2] * _row_bytes(kind)
    group = kind.num_heads // kind.num_kv_heads
    fixed = _fixed(kind, tiles, kind.num_heads)
    fixed |= named_strides("dq", "bhm", kind.layout.contiguous_strides(kind.q_shape))
    fixed |= {"together": heads_together(heads, group, kv_bytes, l2_cache_bytes(kind.device))}
    given = ("Q", "K", "V", "DOut", "Lse", "Delta", "DQ", "Work", *OFFSETS)
    options: dict[str, int | None] = {"num_warps": 4, "launch_pdl": True}
    return Launch(attention_backward_q_kernel, _grid(kind, tiles * heads), given, fixed, options)


def _launch_kv(kind: Kind, tiles: int) -> Launch:
    """``tiles``: at most those of all packed sequences; in a dense batch those of one sequence."""
    heads, q_bytes = _heads(kind, kind.num_kv_heads), kind.pick(kind.q_shape)[2] * _row_bytes(kind)
    fixed = _fixed(kind, tiles, kind.num_kv_heads)
    fixed |= named_strides("dk", "bhn", kind.layout.contiguous_strides(kind.k_shape))
    fixed |= named_strides("dv", "bhn", kind.layout.contiguous_strides(kind.v_shape))
    # group 1: a program reads the heads of q that share a head of k and v one after another
    fixed |= {"together": heads_together(heads, 1, q_bytes, l2_cache_bytes(kind.device))}
    given = ("Q", "K", "V", "DOut", "Lse", "Delta", "DK", "DV", "Work", *OFFSETS)
    return Launch(attention_backward_kv_kernel, _grid(kind, tiles * heads), given, fixed, {"num_warps": 4})


@functools.lru_cache(maxsize=4096)
def backward_of(kind: Kind, dout_strides: tuple[int, ...], kv_dtype: torch.dtype) -> Backward:
    """The prepared call of a kind for which ``plain_dkv_for`` has no reason.

    ``kv_dtype``: of dk and dv; a launch keeps a kernel that is compiled for it, so each dtype has its own.
    """
    return Backward(kind, dout_strides)
