"""How fast the built-in backends are at an attention call, as far as it was measured or is known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.hooks.types import Platform
from mla_plugin.resolver.attention_measured import MEASURED, Row

_BLACKWELL = ("cudnn", "fa4", "triton", "fa2")
_WITHOUT_TENSOR_MEMORY = ("fa2", "cudnn", "triton")
_WITHOUT_TENSOR_MEMORY_MLA = ("triton", "fa2", "cudnn")
"""Unequal head dims: FlashAttention 2 computes them with V padded, at 192/128 half again as many products of weights
and values; on an H200 ours is twice as fast as that. Before Hopper nothing was measured: with equal head dims the
kernels that were written for these cards go first."""

_KEYS_COST = 4.0  # a packed batch is not like a dense one, a window is not like a causal mask


def _known_order(request: AttentionRequest, capability: tuple[int, int]) -> tuple[str, ...]:
    """Where nothing was measured: what NVIDIA's and FlashAttention's own figures say of the generation."""
    if capability >= (10, 0):
        return _BLACKWELL
    return _WITHOUT_TENSOR_MEMORY if request.head_dim_qk == request.head_dim_v else _WITHOUT_TENSOR_MEMORY_MLA


def _place(
    dims: tuple[int, int], heads: int, kv_heads: int, batch: int, seqlens: tuple[int, int], mask: str, is_packed: bool
) -> tuple[float, ...]:
    """Coordinates in which near calls are about as fast: doublings, and switches that are far apart."""
    return (
        2 * math.log2(dims[0]),
        2 * math.log2(dims[1] / dims[0]),
        0.5 * math.log2(max(batch * heads, 1)),
        0.5 * math.log2(heads / kv_heads),
        math.log2(max(seqlens[0], 1)),
        math.log2(max(seqlens[1], 1) / max(seqlens[0], 1)),
        _KEYS_COST * (mask == "full"),
        _KEYS_COST * (mask == "window"),
        2 * _KEYS_COST * is_packed,
    )


def _place_of_row(row: Row) -> tuple[float, ...]:
    return _place(row.dims, row.heads, row.kv_heads, row.batch, (row.seqlen, row.seqlen), row.mask, row.is_packed)


def _place_of(request: AttentionRequest) -> tuple[float, ...]:
    mask = "window" if request.has_sliding_window else "causal" if request.is_causal else "full"
    return _place(
        (request.head_dim_qk, request.head_dim_v),
        request.num_heads,
        request.num_kv_heads,
        request.batch_size,
        (request.max_seqlen_q, request.max_seqlen_kv),
        mask,
        request.has_padding,
    )


def _estimates(rows: Sequence[Row], place: Sequence[float], direction: str) -> dict[str, float]:
    """Each backend's milliseconds beside the fastest of the same call, from the calls around, the near ones above all.

    A row counts for a backend by the logarithm of how far it is behind; where a backend has no figure it counts not.
    """
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    for row in rows:
        milliseconds = getattr(row, direction)
        distance = sum((a - b) ** 2 for a, b in zip(place, _place_of_row(row), strict=True))
        weight = 1 / (distance + 1e-3) ** 2
        fastest = min(milliseconds.values(), default=1.0)
        for name, value in milliseconds.items():
            sums[name] = sums.get(name, 0.0) + weight * math.log(value / fastest)
            weights[name] = weights.get(name, 0.0) + weight
    return {name: sums[name] / weights[name] for name in sums}


def fastest_first(request: AttentionRequest, platform: Platform, names: Sequence[str], direction: str) -> list[str]:
    """Fused built-in backends in the order of their speed at one pass.

    Measured on a card of the same compute capability (``attention_measured``), interpolated between the measured
    calls; elsewhere by what is known of the generation.

    Args:
        request, platform: what is decided on.
        names: of the backends.
        direction: ``"forward"`` or ``"backward"``.
    """
    capability = platform.compute_capability or (0, 0)
    rows = MEASURED.get(capability, ())
    known = _known_order(request, capability)
    behind: Mapping[str, float] = _estimates(rows, _place_of(request), direction)

    def rank(name: str) -> tuple[float, int]:
        return behind.get(name, math.inf), known.index(name) if name in known else len(known)

    return sorted(names, key=rank)
