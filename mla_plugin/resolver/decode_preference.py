"""The order in which backends are tried for a decode request: as measured, per compute capability and size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mla_plugin import environment
from mla_plugin.decode_types import DecodeRequest
from mla_plugin.types import Platform

FALLBACK = "sdpa"


class Measured(NamedTuple):
    """Which order was fastest up to some size.

    Attributes:
        rows: query tokens times heads of a sequence, at most; None for any number.
        tokens: sequences times keys that the cache has room for in each, at most; None for any number.
        order: built-in backends, fastest first.
    """

    rows: int | None
    tokens: int | None
    order: tuple[str, ...]


MEASURED: Mapping[tuple[int, int], tuple[Measured, ...]] = {
    # NVIDIA H200, bfloat16, kv_lora_rank 512, rope 64, pages of 64, under CUDA graphs with inputs that the L2 does not
    # hold, by benchmarks/decode_backends.py; FlashInfer 0.6.13, FlashAttention 3 of vLLM 0.25.1. Milliseconds:
    #   B, H, keys     triton  flashinfer  fa3
    #   1, 16, 4096    0.0123  0.0216      0.0205
    #   1, 16, 65536   1.18 times as fast as the best other
    #   32, 16, 4096   0.0585  0.0557      0.0596
    #   128, 16, 8192  0.304   0.306       0.299
    #   1, 128, 4096   0.0229  0.0229      0.0218
    #   32, 128, 4096  0.145   0.0808      0.0839
    #   1, 128, 65536  0.099   0.059       0.061
    #   128, 128, 8192 1.02    0.572       0.557
    (9, 0): (
        Measured(32, 1 << 16, ("triton", "fa3", "flashinfer")),
        Measured(32, 1 << 18, ("flashinfer", "triton", "fa3")),
        Measured(32, None, ("fa3", "triton", "flashinfer")),
        Measured(None, 1 << 14, ("fa3", "flashinfer", "triton")),
        Measured(None, 1 << 18, ("flashinfer", "fa3", "triton")),
        Measured(None, None, ("fa3", "flashinfer", "triton")),
    ),
}
"""By compute capability; of a capability's entries the first whose bounds hold."""

UNMEASURED = ("triton", "flashinfer", "fa3")
"""Elsewhere: off Hopper FlashInfer runs its ``fa2`` kernel, which on the H200 was slower than ours in every case."""


def switched_off(environ: Mapping[str, str]) -> dict[str, str]:
    """Backends that a variable keeps off, and the variable."""
    off = {}
    if environment.parse("NVTE_MLA_TRITON", environ) == "0":
        off["triton"] = "NVTE_MLA_TRITON=0"
    for name in ("NVTE_FLASH_ATTN_V3", "NVTE_FLASH_ATTN"):
        if not environment.parse(name, environ):
            off["fa3"] = f"{name}=0"
    if not environment.parse("NVTE_UNFUSED_ATTN", environ):
        off[FALLBACK] = "NVTE_UNFUSED_ATTN=0"
    return off


def measured_order(request: DecodeRequest, platform: Platform) -> tuple[str, ...]:
    """Fused built-in backends, fastest first."""
    rows, tokens = request.seqlen_q * request.num_heads, request.batch_size * request.max_seqlen_kv
    for entry in MEASURED.get(platform.compute_capability or (0, 0), ()):
        if (entry.rows is None or rows <= entry.rows) and (entry.tokens is None or tokens <= entry.tokens):
            return entry.order
    return UNMEASURED


def order(
    request: DecodeRequest, platform: Platform, priorities: Mapping[str, int], builtin: Sequence[str]
) -> list[str]:
    """Backends in the order in which they are tried.

    Args:
        request, platform: what is decided on.
        priorities: the priority that each backend of another package asked for.
        builtin: names of the built-in backends.
    """
    others = sorted(priorities, key=lambda name: -priorities[name])
    fused = measured_order(request, platform) if platform.device_type == "cuda" else ()
    return [
        *(name for name in others if priorities[name] > 0),
        *(name for name in fused if name in builtin),
        *(name for name in others if priorities[name] == 0),
        *([FALLBACK] if FALLBACK in builtin else []),
        *(name for name in others if priorities[name] < 0),
    ]
