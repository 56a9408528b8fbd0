"""Chooses the backends of the forward and the backward in every host except TransformerEngine: the fastest that can.

The user's variables and the backends' answers decide which backends can run; a measured table (``attention_measured``)
decides which of them do. The two passes are chosen independently, because they share only out and lse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mla_plugin import environment
from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.hooks.types import Platform, TraceEntry
from mla_plugin.resolver.attention_speed import fastest_first
from mla_plugin.resolver.preference import FALLBACK, by_priority, triton_opt_in_obstacles
from mla_plugin.resolver.switches import switched_off

_INTERPRETER = "Triton's interpreter is slow; it runs only when requested by name or by NVTE_MLA_TRITON=1"


def is_as_strict_as_te(request: AttentionRequest, environ: Mapping[str, str]) -> bool:
    """The host is TransformerEngine, or the user wants its decisions everywhere."""
    return request.host == "transformer_engine" or bool(environment.parse("MLA_PLUGIN_STRICT_TE", environ))


def left_out(name: str, request: AttentionRequest, platform: Platform, environ: Mapping[str, str]) -> TraceEntry | None:
    """The line of a built-in backend that is not tried, whatever it can compute; None if nothing leaves it out."""
    if name == "triton" and platform.device_type != "cuda":
        return TraceEntry(name, False, "host", (_INTERPRETER,))
    off = switched_off(name, request, environ)
    return TraceEntry(name, False, "environment", off) if off else None


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
    allowed = [name for name in builtin if left_out(name, request, platform, environ) is None]
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
