"""Explains the order of backends in a decision: measured times, TransformerEngine's order, or a priority."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mla_plugin import environment
from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.hooks.manager import BUILTIN_BACKENDS
from mla_plugin.hooks.types import FORWARD_ONLY, Platform, TraceEntry
from mla_plugin.resolver import attention_measured, attention_speed, choice, decode_preference
from mla_plugin.resolver.decode import DecodeDecision
from mla_plugin.resolver.explanation import Decision
from mla_plugin.resolver.preference import FALLBACK, triton_opt_in_obstacles

_NOTICEABLE = 1.01
"""Times closer than this ratio count as equal: two runs of one kernel differ by as much."""


def passes(decision: Decision | DecodeDecision) -> dict[str, str]:
    """The passes of a call and the backend that runs each; empty if no backend is left."""
    if isinstance(decision, DecodeDecision):
        return {"decode": decision.plan.forward_backend} if decision.plan else {}
    if decision.plan is None:
        return {}
    found = {"forward": decision.plan.forward_backend}
    return found | ({"backward": decision.plan.backward_backend} if decision.request.is_training else {})


def _times(decision: Decision | DecodeDecision, direction: str) -> Mapping[str, float]:
    """Measured times of the backends for one pass, in any unit; empty without measurements."""
    if decision.platform.device_type != "cuda":
        return {}
    if isinstance(decision, DecodeDecision):
        return decode_preference.measured_times(decision.request, decision.platform)
    return attention_speed.relative_times(decision.request, decision.platform, direction)


def _by_speed(decision: Decision | DecodeDecision, direction: str) -> list[str]:
    """Fused built-in backends, fastest first, whether they can run or not; empty off CUDA, where speed is not used."""
    if decision.platform.device_type != "cuda":
        return []
    if isinstance(decision, DecodeDecision):
        return list(decode_preference.measured_order(decision.request, decision.platform))
    known = attention_speed.known_order(decision.request, decision.platform)
    order = attention_speed.fastest_first(decision.request, decision.platform, attention_measured.BACKENDS, direction)
    times = _times(decision, direction)
    return [name for name in order if name in times or name in known]


def why_before(
    decision: Decision | DecodeDecision, first: str, second: str, direction: str, environ: Mapping[str, str]
) -> str:
    """Why ``first`` is tried before ``second`` for one pass, both of which can run."""
    request = decision.request
    if {first, second} - set(BUILTIN_BACKENDS):
        return "a third-party backend is placed by its priority"
    if isinstance(request, AttentionRequest):
        if first == "triton" and _is_put_first(request, decision.platform, environ):
            return "NVTE_MLA_TRITON=1 puts triton first"
        if choice.is_as_strict_as_te(request, environ):
            return "that is TransformerEngine's order"
    if second == FALLBACK:
        return f"{FALLBACK} is the fallback, tried after the fused backends"
    times = _times(decision, direction)
    if first in times and second in times:
        return f"measured: {second} takes {times[second] / times[first]:.2f} times as long"
    if times:
        return f"{second} was not measured for this {direction}"
    capability = decision.platform.compute_capability
    order = ", ".join(_by_speed(decision, direction))
    return f"no measurements for compute_capability={capability}; expected order on such GPUs: {order}"


def faster(decision: Decision | DecodeDecision, environ: Mapping[str, str]) -> Iterator[str]:
    """One line for each backend that would be faster for a pass than the chosen one, and why it does not run."""
    reasons = {entry.backend: entry for entry in decision.trace}
    for direction, chosen in passes(decision).items():
        order, times = _by_speed(decision, direction), _times(decision, direction)
        ahead = order[: order.index(chosen)] if chosen in order else order if chosen == FALLBACK else []
        for name in ahead:
            if {name, chosen} <= times.keys() and times[chosen] < _NOTICEABLE * times[name]:
                continue
            gain = f"{times[chosen] / times[name]:.2f} times as fast" if {name, chosen} <= times.keys() else "faster"
            entry = reasons[name]
            why = "; ".join(entry.reasons)
            if entry.accepted:
                why = why_not_chosen(entry, decision, chosen, direction, environ)
            yield f"{direction} on {name} would be {gain}: {why}"


def why_not_chosen(
    entry: TraceEntry,
    decision: Decision | DecodeDecision,
    chosen: str,
    direction: str,
    environ: Mapping[str, str],
) -> str:
    """Why a pass runs on ``chosen`` and not on a backend that can run the request."""
    if direction == "backward" and isinstance(decision.request, AttentionRequest) and decision.plan:
        if forward_only := [note for note in entry.reasons if note.startswith(FORWARD_ONLY)]:
            return "; ".join(forward_only)
        forward = decision.plan.forward_backend
        if not _are_chosen_apart(decision.request, forward, environ):
            if forward != chosen:
                return f"{forward} leaves this request's backward to {chosen}"
            return "this request's backward runs on the forward's backend"
    return why_before(decision, chosen, entry.backend, direction, environ)


def _are_chosen_apart(request: AttentionRequest, forward: str, environ: Mapping[str, str]) -> bool:
    """Whether forward and backward are chosen independently, given what was chosen for the forward."""
    if forward not in BUILTIN_BACKENDS or request.dropout_p:
        return False
    return not choice.is_as_strict_as_te(request, environ)


def _is_put_first(request: AttentionRequest, platform: Platform, environ: Mapping[str, str]) -> bool:
    """Whether NVTE_MLA_TRITON=1 puts our Triton kernels before all others, whatever was measured."""
    is_asked_for = environment.parse("NVTE_MLA_TRITON", environ) == "1"
    return is_asked_for and not triton_opt_in_obstacles(request, platform)
