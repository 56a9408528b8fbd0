"""Launches the Hopper forward: the tile list of packed sequences, then the persistent kernel."""

from __future__ import annotations

import functools

import torch

from mla_plugin.kernels.hopper import plan
from mla_plugin.kernels.hopper.common import PANEL
from mla_plugin.kernels.hopper.descriptors import Source, descriptor
from mla_plugin.kernels.hopper.forward import attention_forward_kernel
from mla_plugin.kernels.hopper.forward_latent import latent_forward_kernel
from mla_plugin.kernels.hopper.latent import KEYS
from mla_plugin.kernels.hopper.rule import LATENT, LATENT_QUERIES, QUERIES, TILES
from mla_plugin.kernels.hopper.tickets import LOADING_REGISTERS, counter, heads_together, is_dynamic
from mla_plugin.kernels.launch import Launch, named_strides
from mla_plugin.kernels.prefill.packing import OFFSETS, Kind, l2_cache_bytes, multiprocessors
from mla_plugin.kernels.tiles import ceil_div


def _is_latent(kind: Kind) -> bool:
    return (kind.q_shape[-1], kind.v_shape[-1]) == LATENT


def _sources(kind: Kind) -> tuple[Source, ...]:
    """q, k and v; over latents q and k, which holds v."""
    if _is_latent(kind):
        return (
            Source.of(kind, kind.q_shape, kind.q_strides, LATENT_QUERIES, PANEL.value),
            Source.of(kind, kind.k_shape, kind.k_strides, KEYS.value, PANEL.value),
        )
    tile = TILES[kind.q_shape[-1], kind.v_shape[-1]]
    return (
        Source.of(kind, kind.q_shape, kind.q_strides, QUERIES // 2, PANEL.value),
        Source.of(kind, kind.k_shape, kind.k_strides, tile.keys, PANEL.value),
        Source.of(kind, kind.v_shape, kind.v_strides, tile.keys, kind.v_shape[-1]),
    )


class Forward:
    """The launches of one kind of call, complete except for the tensors' addresses; called like the plain kernel's."""

    def __init__(self, kind: Kind) -> None:
        packed = kind.layout.is_packed
        is_causal = kind.band.right == 0 and kind.band.left < 0
        heads = kind.num_heads if packed else kind.num_heads * kind.num_sequences
        queries = LATENT_QUERIES if _is_latent(kind) else QUERIES
        tiles = ceil_div(kind.seqlen_q, queries)
        if packed:
            tiles = plan.capacity(kind.pick(kind.q_shape)[2], kind.num_sequences, queries)
        self._sources = _sources(kind)
        self._is_dynamic = is_dynamic(kind)
        is_shifted = kind.band.bottom_right and not kind.same_lengths
        rank = plan.rank(is_causal, is_shifted)
        self._plan = plan.launch(kind, "q", queries, rank, has_lse=True) if packed else None
        self._work_size = plan.HEADER + 2 * tiles
        self._launch = _forward_launch(kind, tiles, heads)

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
            work = counter(q.device)
        described = [descriptor(x.data_ptr(), source) for x, source in zip((q, k, v), self._sources, strict=False)]
        self._launch(*described, out, lse, work, *offsets)


def _forward_launch(kind: Kind, tiles: int, heads: int) -> Launch:
    """``tiles``, ``heads``: packed at most those of all sequences, and H; dense those of one sequence, and B * H."""
    head_dim_qk, head_dim_v = kind.q_shape[-1], kind.v_shape[-1]
    group, columns = kind.num_heads // kind.num_kv_heads, head_dim_qk + (0 if _is_latent(kind) else head_dim_v)
    kv_bytes = kind.pick(kind.k_shape)[2] * columns * kind.dtype.itemsize
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
        "window_right": kind.band.right,
        "softmax_scale": kind.softmax_scale,
        "DYNAMIC": is_dynamic(kind),
        "PACKED": kind.layout.is_packed,
        "HAS_LENGTHS": kind.has_lengths,
        "BOTTOM_RIGHT": kind.band.bottom_right,
        "HAS_RIGHT": kind.band.right >= 0,
        "REGISTERS": LOADING_REGISTERS,
    }
    grid = (min(multiprocessors(kind.device), tiles * heads), 1, 1)
    outputs = ("Out", "Lse", "Work", *OFFSETS)
    if _is_latent(kind):
        return Launch(latent_forward_kernel, grid, ("Q", "K", *outputs), fixed, {"num_warps": 4})
    tile = TILES[head_dim_qk, head_dim_v]
    fixed |= {
        "window_left": kind.band.left,
        "D_V": head_dim_v,
        "BLOCK_N": tile.keys,
        "STAGES": tile.stages,
        "D_QK": head_dim_qk,
        "V_COLUMNS": head_dim_v,
        "AHEAD": tile.ahead,
        "HAS_LEFT": kind.band.left >= 0,
    }
    return Launch(attention_forward_kernel, grid, ("Q", "K", "V", *outputs), fixed, {"num_warps": 4})


@functools.lru_cache(maxsize=4096)
def forward_of(kind: Kind) -> Forward:
    """The prepared call of a kind for which ``plain_kernel_for`` has no reason."""
    return Forward(kind)
