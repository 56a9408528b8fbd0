"""From a request to a plan: ask every backend, take the fastest, or the first in TransformerEngine's order.

``survey`` makes the decision and keeps its inputs; ``resolve`` caches it; ``explain`` turns it into text.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mla_plugin import environment
from mla_plugin.hooks.attention import AttentionRequest, Plan
from mla_plugin.hooks.manager import get_manager
from mla_plugin.hooks.types import FORWARD_ONLY, Accepted, NoBackendError, Platform, Refused, TraceEntry
from mla_plugin.resolver import choice, preference
from mla_plugin.resolver.asking import Inquiry, ask_all, check_backend_name, check_hypothetical
from mla_plugin.resolver.explanation import Decision, describe, log_decision, no_backend_message
from mla_plugin.resolver.switches import switched_off

if TYPE_CHECKING:
    from mla_plugin.resolver.transformer_engine.cascade import CascadeDecision

_CACHE_SIZE = 4096
"""Number of cached plans, about 1 kB each; a generation loop over a growing cache adds one per step."""


def _cascade_reasons(cascade: CascadeDecision, name: str) -> tuple[str, ...]:
    return tuple(
        f"TransformerEngine rule {removal.rule}: {removal.reason}"
        for removal in cascade.removals
        if preference.CASCADE_NAMES[removal.backend] == name
    )


def _computes_backward(answer: Accepted | Refused) -> bool:
    return isinstance(answer, Accepted) and answer.backward_by is None


@dataclass(frozen=True)
class _Survey:
    """Everything known about one request before a backend is chosen."""

    request: AttentionRequest
    asked: Inquiry
    cascade: CascadeDecision | None

    @property
    def is_free(self) -> bool:
        """True if the fastest backends run; otherwise a requested name or TransformerEngine's order decides."""
        return self.asked.backend is None and not choice.is_as_strict_as_te(self.request, self.asked.environ)

    def order(self, direction: str) -> list[str]:
        """Names in the order in which they are tried for one pass."""
        asked = self.asked
        if asked.backend is not None:
            return [asked.backend]
        if self.is_free:
            given = (asked.platform, asked.environ, asked.priorities, asked.builtin)
            return choice.order(self.request, *given, direction)
        survivors = [preference.CASCADE_NAMES[name] for name in self.cascade.survivors] if self.cascade else None
        return preference.order(self.request, asked.platform, asked.environ, survivors, asked.priorities, asked.builtin)

    def verdict(self, name: str, tried: bool) -> tuple[TraceEntry, str | None]:
        """One backend's line of the trace, and the backend of its backward when it can run."""
        if name in self.asked.blocked:
            return TraceEntry(name, False, "environment", ("excluded by MLA_PLUGIN_BLOCK",)), None
        answer = self.asked.answers[name]
        forward = answer
        if isinstance(answer, Refused) and self._takes_passes_apart(name):
            forward = self.asked.forward_answers[name]
        if isinstance(forward, Refused):
            return TraceEntry(name, False, "backend", forward.reasons), None
        if not tried:
            return self._left_out(name), None
        backward = self._backward(name, answer)
        if backward is None and self.request.is_training:
            return TraceEntry(name, False, "backend", (self._why_no_backward(answer),)), None
        notes = forward.notes
        if isinstance(answer, Refused):
            notes += (FORWARD_ONLY + "; ".join(answer.reasons),)
        return TraceEntry(name, True, "backend", notes), backward or name

    def _takes_passes_apart(self, name: str) -> bool:
        """The two passes of our backends share only out and lse, and with dropout the random generator."""
        return self.is_free and name in self.asked.builtin and not self.request.dropout_p

    def _backward(self, name: str, answer: Accepted | Refused) -> str | None:
        """The backend of the backward that goes with this forward; None if there is none."""
        answers = self.asked.answers
        if self._takes_passes_apart(name) and self.request.is_training:
            return self._fastest_backward
        if isinstance(answer, Refused) or answer.backward_by is None:
            return name
        if not isinstance(answers.get(answer.backward_by), Accepted) or self._switched_off(answer.backward_by):
            return None
        return answer.backward_by

    def _switched_off(self, name: str) -> tuple[str, ...]:
        """The variable that switches a backend off; one requested by name runs whatever the variables say."""
        asked = self.asked
        return () if asked.backend is not None else switched_off(name, self.request, asked.environ)

    @functools.cached_property
    def _fastest_backward(self) -> str | None:
        able = [name for name in self.asked.builtin if _computes_backward(self.asked.answers[name])]
        return next((name for name in self.order("backward") if name in able), None)

    def _why_no_backward(self, answer: Accepted | Refused) -> str:
        if isinstance(answer, Refused):
            return f"forward only, and no backend can run the backward: {'; '.join(answer.reasons)}"
        if answer.backward_by is None:
            return "no backend can run the backward"
        why = "refuses the request"
        if off := self._switched_off(answer.backward_by):
            why = f"{off[0]} switches off"
        if answer.backward_by in self.asked.blocked:
            why = "MLA_PLUGIN_BLOCK excludes"
        return f"its backward runs on {answer.backward_by!r}, which {why}"

    def _left_out(self, name: str) -> TraceEntry:
        """Why a backend that could run is not tried."""
        asked = self.asked
        if asked.backend is not None:
            return TraceEntry(name, False, "host", (f"backend {asked.backend!r} was requested by name",))
        if self.is_free or name in ("triton", preference.FALLBACK):  # TransformerEngine reads the other variables
            off = choice.left_out(name, self.request, asked.platform, asked.environ)
            if off is not None:
                return off
        if name == "triton":
            reason = "TransformerEngine's own choice applies unless NVTE_MLA_TRITON=1 and its conditions hold"
            return TraceEntry(name, False, "host", (reason,))
        reasons = _cascade_reasons(self.cascade, name) if self.cascade else ()
        return TraceEntry(name, False, "cascade", reasons)


def _cascade(request: AttentionRequest, asked: Inquiry, te_release: str | None) -> CascadeDecision | None:
    """TransformerEngine's own selection; None off CUDA, or if it raises and its decision is not required.

    Its rules are imported here because they make ``import mla_plugin`` a fifth slower.
    """
    from mla_plugin.resolver.transformer_engine.cascade import te_decide
    from mla_plugin.resolver.transformer_engine.release import read_release
    from mla_plugin.resolver.transformer_engine.request import installed_release, te_params, te_platform

    release = installed_release(request.host, asked.platform) if te_release is None else read_release(te_release)[0]
    if asked.platform.device_type != "cuda":
        return None
    platform = te_platform(asked.platform, release)
    try:
        return te_decide(te_params(request), asked.environ, platform, release=release)
    except (AssertionError, TypeError, ValueError):
        if te_release is not None or choice.is_as_strict_as_te(request, asked.environ):
            raise
        return None


def survey(
    request: AttentionRequest,
    *,
    backend: str | None = None,
    platform: Platform | None = None,
    environ: Mapping[str, str] | None = None,
    te_release: str | None = None,
) -> Decision:
    """Make a decision, uncached, and return it with everything that led to it.

    Args:
        request: the call.
        backend: use only this backend.
        platform: a hypothetical platform; None probes the request's device.
        environ: a hypothetical environment; None reads the process's.
        te_release: the release of TransformerEngine whose rules apply, such as ``"2.14"``; None for the installed one
            if TransformerEngine is the host, otherwise for the newest.

    Raises:
        EnvironmentVariableError: a variable has a value that is not accepted.
        TypeError: ``backend`` is not a name, ``platform`` not a Platform or ``environ`` not a mapping of strings.
        ValueError: ``backend`` is not registered, or ``te_release`` is not known or cannot express the request.
        AssertionError: TransformerEngine's selection decides, and asserts that a window fits its mask.
    """
    check_hypothetical(platform, environ)
    environ = dict(environment.gates()) if environ is None else environ
    if not environment.parse("NVTE_ALLOW_NONDETERMINISTIC_ALGO", environ):
        request = request.replace(deterministic=True)
    if environment.parse("MLA_PLUGIN_BATCH_INVARIANT", environ):
        request = request.replace(batch_invariant=True)
    asked = ask_all(request, backend, platform, environ)
    platform = asked.platform
    cascade = _cascade(request, asked, te_release)
    if cascade is None or not choice.is_as_strict_as_te(request, environ):
        environment.check_selection(environ)  # otherwise its release has parsed what it reads

    known = _Survey(request, asked, cascade)
    tried = known.order("forward")
    trace, plan_backends = [], None
    for name in (*tried, *(name for name in asked.names if name not in tried)):
        entry, backward = known.verdict(name, name in tried)
        trace.append(entry)
        if backward is not None and plan_backends is None:
            plan_backends = (name, backward)
    plan = Plan(request, platform, *plan_backends, trace=tuple(trace)) if plan_backends else None
    return Decision(request, platform, tuple(trace), plan, cascade)


@functools.lru_cache(maxsize=_CACHE_SIZE)
def _plan(request: AttentionRequest, gates: environment.Gates, backend: str | None, generation: int) -> Plan:
    """The cached decision. ``gates`` and ``generation`` (of the set of plugins) make stale entries unreachable."""
    decision = survey(request, backend=backend, environ=dict(gates))
    log_decision(functools.partial(describe, decision), dict(gates))
    if decision.plan is None:
        raise NoBackendError(no_backend_message(decision), decision.trace)
    return decision.plan


def resolve(
    request: AttentionRequest,
    *,
    backend: str | None = None,
    platform: Platform | None = None,
    environ: Mapping[str, str] | None = None,
) -> Plan:
    """The plan for a request; arguments as ``survey``.

    The decision is cached by the request and the environment variables that a selection reads, so a changed variable
    takes effect at the next call. Decisions for hypothetical platforms and environments are not cached.

    Raises:
        NoBackendError: no backend takes the request; the message lists every backend with every reason.
        EnvironmentVariableError: a variable has a value that is not accepted.
        TypeError: ``backend`` is neither a name nor None.
        ValueError: ``backend`` is not registered.
    """
    if backend is not None:  # before the cache, whose key must be hashable
        check_backend_name(backend)
    if platform is None and environ is None:
        return _plan(request, environment.gates(), backend, get_manager().generation)
    decision = survey(request, backend=backend, platform=platform, environ=environ)
    if decision.plan is None:
        raise NoBackendError(no_backend_message(decision), decision.trace)
    return decision.plan
