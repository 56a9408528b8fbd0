"""From a decode request to a plan: ask every backend, take the first in the measured order that can run.

TransformerEngine has no absorbed decode, so its selection does not apply; its variables that switch backends off do.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

from mla_plugin import environment
from mla_plugin.hooks.decode import DecodePlan, DecodeRequest
from mla_plugin.hooks.manager import get_manager
from mla_plugin.hooks.types import Accepted, NoBackendError, Platform, Refused, TraceEntry
from mla_plugin.resolver import decode_preference
from mla_plugin.resolver.asking import ask_all, check_backend_name, check_hypothetical
from mla_plugin.resolver.explanation import ADVICE, describe_platform, lines, log_decision
from mla_plugin.resolver.switches import switched_off

_CACHE_SIZE = 4096


class DecodeDecision(NamedTuple):
    """Everything that led to a decision.

    Attributes:
        request, platform: what was decided on.
        trace: every backend with its verdict, in the order tried, those left out last.
        plan: the plan; None when no backend is left.
    """

    request: DecodeRequest
    platform: Platform
    trace: tuple[TraceEntry, ...]
    plan: DecodePlan | None = None

    @property
    def error(self) -> str | None:
        """The message of the NoBackendError, or None when a backend was found."""
        return None if self.plan else no_backend_message(self)


def describe_request(request: DecodeRequest) -> str:
    """The request in one line, with its defaults left out."""
    cache = "contiguous cache" if request.page_size is None else f"pages of {request.page_size}"
    parts = [
        f"decode {str(request.dtype).removeprefix('torch.')}",
        f"batch {request.batch_size}",
        f"lengths {request.seqlen_q} x {request.max_seqlen_kv}",
        f"{request.num_heads} heads",
        f"kv_lora_rank {request.kv_lora_rank}, rope {request.qk_rope_head_dim}",
        cache,
    ]
    if request.kv_cache_format != "plain":
        parts.append(f"kv_cache_format {request.kv_cache_format}")
    if request.profile is not None and request.has_seqlens_kv:
        parts.append(f"mean length about {request.profile.mean}, the longest {request.profile.spread} times as long")
    flags = ("causal", "has_seqlens_kv", "has_host_lengths", "has_leftpad_kv", "return_lse", "batch_invariant")
    if not request.has_aligned_rows:
        parts.append("rows not 16-byte aligned")
    if not request.has_joined_rows:
        parts.append("c_kv and k_rope in separate tensors")
    parts.extend(flag for flag in flags if getattr(request, flag))
    return ", ".join(parts)


def no_backend_message(decision: DecodeDecision) -> str:
    """Every backend with every reason, and what to do."""
    return "\n".join(
        [
            f"no decode backend takes this request on {describe_platform(decision.platform)}:",
            f"  {describe_request(decision.request)}",
            *lines(decision.trace),
            ADVICE,
        ]
    )


def describe_decode(decision: DecodeDecision) -> str:
    """The whole decision: the request, each backend in the order tried with its reasons, and what runs."""
    runs = decision.plan.forward_backend if decision.plan else "no backend"
    head = f"{describe_request(decision.request)}  on {describe_platform(decision.platform)}"
    return "\n".join([head, *lines(decision.trace), f"=> {'decode: ' if decision.plan else ''}{runs}"])


def _verdict(
    name: str,
    answer: Accepted | Refused | None,
    left_out: tuple[str, ...],
    backend: str | None,
) -> TraceEntry:
    if answer is None:
        return TraceEntry(name, False, "environment", ("excluded by MLA_PLUGIN_BLOCK",))
    if isinstance(answer, Refused):
        return TraceEntry(name, False, "backend", answer.reasons)
    if backend is not None and name != backend:
        return TraceEntry(name, False, "host", (f"backend {backend!r} was requested by name",))
    if left_out:
        return TraceEntry(name, False, "environment", left_out)
    return TraceEntry(name, True, "backend", answer.notes)


def survey_decode(
    request: DecodeRequest,
    *,
    backend: str | None = None,
    platform: Platform | None = None,
    environ: Mapping[str, str] | None = None,
) -> DecodeDecision:
    """Make a decision, uncached, and return it with everything that led to it; arguments and errors as ``survey``."""
    check_hypothetical(platform, environ)
    environ = dict(environment.gates()) if environ is None else environ
    if environment.parse("MLA_PLUGIN_BATCH_INVARIANT", environ):
        request = request.replace(batch_invariant=True)
    asked = ask_all(request, backend, platform, environ)
    environment.check_selection(environ)
    platform, backend = asked.platform, asked.backend
    off: dict[str, tuple[str, ...]] = {}
    if backend is not None:
        tried = [backend]
    else:
        tried = decode_preference.order(request, platform, asked.priorities, asked.builtin)
        off = {name: switched_off(name, request, asked.environ) for name in asked.builtin}
    trace = []
    for name in (*tried, *(name for name in asked.names if name not in tried)):
        left_out = off.get(name) or (() if name in tried else (_NOT_TRIED,))
        trace.append(_verdict(name, asked.answers.get(name), left_out, backend))
    chosen = next((entry.backend for entry in trace if entry.accepted), None)
    plan = DecodePlan(request, platform, chosen, tuple(trace)) if chosen else None
    return DecodeDecision(request, platform, tuple(trace), plan)


_NOT_TRIED = "off CUDA it runs only when requested by name"


@functools.lru_cache(maxsize=_CACHE_SIZE)
def _plan(request: DecodeRequest, gates: environment.Gates, backend: str | None, generation: int) -> DecodePlan:
    """The cached decision. ``gates`` and ``generation`` (of the set of plugins) make stale entries unreachable."""
    decision = survey_decode(request, backend=backend, environ=dict(gates))
    log_decision(functools.partial(describe_decode, decision), dict(gates))
    return _plan_or_raise(decision)


def _plan_or_raise(decision: DecodeDecision) -> DecodePlan:
    if decision.plan is None:
        raise NoBackendError(no_backend_message(decision), decision.trace)
    return decision.plan


def resolve_decode(
    request: DecodeRequest,
    *,
    backend: str | None = None,
    platform: Platform | None = None,
    environ: Mapping[str, str] | None = None,
) -> DecodePlan:
    """The plan for a decode request; arguments, caching and errors as ``resolve``."""
    if backend is not None:  # before the cache, whose key must be hashable
        check_backend_name(backend)
    if platform is None and environ is None:
        return _plan(request, environment.gates(), backend, get_manager().generation)
    return _plan_or_raise(survey_decode(request, backend=backend, platform=platform, environ=environ))
