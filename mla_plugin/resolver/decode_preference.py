"""The order in which backends are tried for a decode request: as measured, per compute capability and size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mla_plugin import environment
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.types import Platform
from mla_plugin.resolver.decode_measured import BACKENDS, MEASURED
from mla_plugin.resolver.preference import by_priority

FALLBACK = "sdpa"

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
    """Fused built-in backends, fastest first, in the measured call that is nearest in sequences, rows and keys."""
    milliseconds = measured_times(request, platform)
    return tuple(sorted(BACKENDS, key=milliseconds.__getitem__)) if milliseconds else UNMEASURED


def measured_times(request: DecodeRequest, platform: Platform) -> dict[str, float]:
    """Milliseconds of the measured call that is nearest, by backend; empty where nothing was measured."""
    calls = MEASURED.get(platform.compute_capability or (0, 0))
    if not calls:
        return {}
    wanted = (request.batch_size, request.seqlen_q * request.num_heads, request.max_seqlen_kv)

    def distance(call: tuple[float, ...]) -> float:
        return sum(abs(math.log2(max(a, 1) / b)) for a, b in zip(wanted, call, strict=False))

    return dict(zip(BACKENDS, min(calls, key=distance)[3:], strict=True))


def order(
    request: DecodeRequest, platform: Platform, priorities: Mapping[str, int], builtin: Sequence[str]
) -> list[str]:
    """Backends in the order in which they are tried.

    Args:
        request, platform: what is decided on.
        priorities: the priority that each backend of another package asked for.
        builtin: names of the built-in backends.
    """
    others = by_priority(priorities)
    fused = measured_order(request, platform) if platform.device_type == "cuda" else ()
    return [
        *(name for name in others if priorities[name] > 0),
        *(name for name in fused if name in builtin),
        *(name for name in others if priorities[name] == 0),
        *([FALLBACK] if FALLBACK in builtin else []),
        *(name for name in others if priorities[name] < 0),
    ]
