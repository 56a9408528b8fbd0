"""Chooses the backends of the forward and the backward in every host except TransformerEngine: the fastest that can.

The user's variables and the backends' answers decide which backends can run; a measured table (``attention_measured``)
decides which of them do. The two passes are chosen independently, because they share only out and lse.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from mla_plugin import environment
from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.hooks.types import Platform, TraceEntry
from mla_plugin.resolver.attention_speed import fastest_first
from mla_plugin.resolver.preference import FALLBACK, by_priority, triton_opt_in_obstacles

_SWITCHES: Mapping[str, tuple[str, ...]] = {
    "fa2": ("NVTE_FLASH_ATTN", "NVTE_FLASH_ATTN_V2"),
    "fa3": ("NVTE_FLASH_ATTN", "NVTE_FLASH_ATTN_V3"),
    "fa4": ("NVTE_FLASH_ATTN", "NVTE_FLASH_ATTN_V4"),
    "cudnn": ("NVTE_FUSED_ATTN",),
    FALLBACK: ("NVTE_UNFUSED_ATTN",),
}
"""The variables that switch a backend off when 0."""


def is_as_strict_as_te(request: AttentionRequest, environ: Mapping[str, str]) -> bool:
    """The host is TransformerEngine, or the user wants its decisions everywhere."""
    return request.host == "transformer_engine" or bool(environment.parse("MLA_PLUGIN_STRICT_TE", environ))


def switched_off(
    name: str, request: AttentionRequest, platform: Platform, environ: Mapping[str, str]
) -> TraceEntry | None:
    """What switches a built-in backend off, whatever it can compute; None if nothing does."""
    if name == "triton" and platform.device_type != "cuda":
        return TraceEntry(name, False, "host", ("Triton's interpreter is slow; it runs only when requested by name",))
    if name == "triton":
        off = ["NVTE_MLA_TRITON=0"] if environment.parse("NVTE_MLA_TRITON", environ) == "0" else []
    elif name == FALLBACK and _is_without_transformer_engine(request, environ):
        off = []
    else:
        switches = (switch for switch in _SWITCHES.get(name, ()) if not environment.parse(switch, environ))
        off = [f"{switch}={environ[switch]}" for switch in itertools.islice(switches, 1)]  # the next is not parsed then
    return TraceEntry(name, False, "environment", tuple(off)) if off else None


def _is_without_transformer_engine(request: AttentionRequest, environ: Mapping[str, str]) -> bool:
    """Megatron-Core sets all three variables to 0 for ``attention_backend=local``, which mla-plugin replaces."""
    switches = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
    return request.host == "megatron" and not any(environment.parse(switch, environ) for switch in switches)


def order(
    request: AttentionRequest,
    platform: Platform,
    environ: Mapping[str, str],
    priorities: Mapping[str, int],
    builtin: Sequence[str],
    direction: str,
) -> list[str]:
    """Backends in the order in which they are tried for one pass; those that are left out are not in the list.

    Args:
        request, platform, environ: what is decided on.
        priorities: the priority of each third-party backend.
        builtin: names of the built-in backends.
        direction: ``"forward"`` or ``"backward"``.
    """
    allowed = [name for name in builtin if switched_off(name, request, platform, environ) is None]
    fused = [name for name in allowed if name != FALLBACK]
    if platform.device_type == "cuda":
        fused = fastest_first(request, platform, fused, direction)
    opt_in = environment.parse("NVTE_MLA_TRITON", environ) == "1" and not triton_opt_in_obstacles(request, platform)
    if opt_in and "triton" in builtin:
        fused = ["triton", *(name for name in fused if name != "triton")]
    others = by_priority(priorities)
    return [
        *(name for name in others if priorities[name] > 0),
        *fused,
        *(name for name in others if priorities[name] == 0),
        *([FALLBACK] if FALLBACK in allowed else []),
        *(name for name in others if priorities[name] < 0),
    ]
