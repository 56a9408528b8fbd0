"""Launches the Hopper forward: the tile list of packed sequences, then the persistent kernel."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from mla_plugin.kernels.hopper import plan
from mla_plugin.kernels.hopper.common import PANEL
from mla_plugin.kernels.hopper.descriptors import Source, descriptor
from mla_plugin.kernels.hopper.forward import attention_forward_kernel
from mla_plugin.kernels.hopper.forward_latent import latent_forward_kernel
from mla_plugin.kernels.hopper.latent import KEYS
from mla_plugin.kernels.hopper.rule import LATENT_QUERIES, QUERIES, TILES, is_latent
from mla_plugin.kernels.hopper.tickets import LOADING_REGISTERS, counter, heads_together, is_dynamic
from mla_plugin.kernels.launch import Launch, named_strides
from mla_plugin.kernels.prefill.packing import OFFSETS, Kind, l2_cache_bytes, multiprocessors
from mla_plugin.kernels.tiles import ceil_div


class _Variant(NamedTuple):
    """What differs between the kernel of separate K and V and that over latents.

    Attributes:
        kernel: to launch.
        queries: of a tile.
        sources: where q and k, and separate v, are copied from.
        constants: of this kernel alone.
    """

    kernel: Any
    queries: int
    sources: tuple[Source, ...]
    constants: dict[str, object]


def _separate(kind: Kind) -> _Variant:
    head_dim_qk, head_dim_v = kind.q_shape[-1], kind.v_shape[-1]
    tile = TILES[head_dim_qk, head_dim_v]
    sources = (
        Source.of(kind, kind.q_shape, kind.q_strides, QUERIES // 2, PANEL.value),
        Source.of(kind, kind.k_shape, kind.k_strides, tile.keys, PANEL.value),
        Source.of(kind, kind.v_shape, kind.v_strides, tile.keys, head_dim_v),
    )
    constants: dict[str, object] = {
        "window_left": kind.band.left,
        "D_V": head_dim_v,
        "BLOCK_N": tile.keys,
        "STAGES": tile.stages,
        "D_QK": head_dim_qk,
        "V_COLUMNS": head_dim_v,
        "AHEAD": tile.ahead,
        "HAS_LEFT": kind.band.left >= 0,
    }
    return _Variant(attention_forward_kernel, QUERIES, sources, constants)


def _over_latents(kind: Kind) -> _Variant:
    """V is in k, see ``plain_kernel_for``."""
    sources = (
        Source.of(kind, kind.q_shape, kind.q_strides, LATENT_QUERIES, PANEL.value),
        Source.of(kind, kind.k_shape, kind.k_strides, KEYS.value, PANEL.value),
    )
    return _Variant(latent_forward_kernel, LATENT_QUERIES, sources, {})


class Forward:
    """The launches of one kind of call, complete except for the tensors' addresses; called like the plain kernel's."""

    def __init__(self, kind: Kind) -> None:
        variant = _over_latents(kind) if is_latent(kind.q_shape[-1], kind.v_shape[-1]) else _separate(kind)
        packed = kind.layout.is_packed
        is_causal = kind.band.right == 0 and kind.band.left < 0
        heads = kind.num_heads if packed else kind.num_heads * kind.num_sequences
        tiles = ceil_div(kind.seqlen_q, variant.queries)
        if packed:
            tiles = plan.capacity(kind.pick(kind.q_shape)[2], kind.num_sequences, variant.queries)
        self._of_q, self._of_k, *self._of_v = variant.sources
        self._is_dynamic = is_dynamic(kind)
        is_shifted = kind.band.bottom_right and not kind.same_lengths
        rank = plan.rank(is_causal, is_shifted)
        self._plan = plan.launch(kind, "q", variant.queries, rank, has_lse=True) if packed else None
        self._work_size = plan.HEADER + 2 * tiles
        self._launch = _forward_launch(kind, variant, tiles, heads, self._is_dynamic)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *offsets: torch.Tensor | None,
    ) -> None:
        """Launch on the current device and stream; the tensors must be aligned to 16 bytes.

        Every row of out and lse is written, including padding.
        """
        work = None
        if self._plan is not None:
            work = q.new_empty(self._work_size, dtype=torch.int32)
            self._plan(work, out, None, lse, *offsets[:3])
        elif self._is_dynamic:
            work = counter(q.device, "forward")
        self._launch(
            descriptor(q.data_ptr(), self._of_q),
            descriptor(k.data_ptr(), self._of_k),
            *(descriptor(v.data_ptr(), source) for source in self._of_v),
            *(out, lse, work),
            *offsets,
        )


def _forward_launch(kind: Kind, variant: _Variant, tiles: int, heads: int, has_counter: bool) -> Launch:
    """``tiles``, ``heads``: packed at most those of all sequences, and H; dense those of one sequence, and B * H."""
    out_strides = kind.layout.contiguous_strides((*kind.q_shape[:-1], kind.v_shape[-1]))
    group = kind.num_heads // kind.num_kv_heads
    columns = sum(source.shape[-1] for source in variant.sources[1:])  # read of each key
    kv_bytes = kind.pick(kind.k_shape)[2] * columns * kind.dtype.itemsize
    fixed: dict[str, object] = {
        **named_strides("o", "bhm", out_strides),
        **named_strides("l", "bh", kind.lse_strides),
        "num_tiles": tiles,
        "num_tickets": tiles * heads,
        "num_heads": kind.num_heads,
        "group": group,
        "together": heads_together(heads, group, kv_bytes, l2_cache_bytes(kind.device)),
        "max_seqlen_q": kind.seqlen_q,
        "max_seqlen_kv": kind.seqlen_kv,
        "window_right": kind.band.right,
        "softmax_scale": kind.softmax_scale,
        "DYNAMIC": has_counter,
        "PACKED": kind.layout.is_packed,
        "HAS_LENGTHS": kind.has_lengths,
        "BOTTOM_RIGHT": kind.band.bottom_right,
        "HAS_RIGHT": kind.band.right >= 0,
        "REGISTERS": LOADING_REGISTERS,
        **variant.constants,
    }
    grid = (min(multiprocessors(kind.device), tiles * heads), 1, 1)
    described = ("Q", "K", "V")[: len(variant.sources)]
    given = (*described, "Out", "Lse", "Work", *OFFSETS)
    return Launch(variant.kernel, grid, given, fixed, {"num_warps": 4})


@functools.lru_cache(maxsize=4096)
def forward_of(kind: Kind) -> Forward:
    """The prepared call of a kind for which ``plain_kernel_for`` has no reason."""
    return Forward(kind)
