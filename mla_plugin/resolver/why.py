"""Why a backend does not run a request, and what to install or change so that it does.

The remedy is not derived from the reasons but tried: the backends are asked again with a package installed, a variable
unset, a plainer request or another GPU. A backend therefore states only once what it accepts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mla_plugin import device, environment
from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.manager import get_manager
from mla_plugin.hooks.types import Platform, TraceEntry
from mla_plugin.resolver import changes, speed
from mla_plugin.resolver.asking import check_backend_name, check_hypothetical
from mla_plugin.resolver.attention import survey
from mla_plugin.resolver.changes import Change, Situation
from mla_plugin.resolver.decode import DecodeDecision, survey_decode
from mla_plugin.resolver.explanation import Decision, describe_platform

_ORDER = ("package", "variable", "request", "device")
"""Easiest for a user first."""


@dataclass(frozen=True)
class Why:
    """The answer.

    Attributes:
        backend: asked about.
        state: ``runs``; ``behind``: it can run but another backend is chosen; ``off``: switched off; ``refuses``: it
            can run with ``remedy``; ``impossible``: no remedy was found.
        chosen: the backend that runs each pass.
        reasons: why it does not run.
        remedy: everything to install or change together, the easiest first; empty if it can run or there is none.
        text: all of this as text.
    """

    backend: str
    state: Literal["runs", "behind", "off", "refuses", "impossible"]
    chosen: Mapping[str, str]
    reasons: tuple[str, ...]
    remedy: tuple[Change, ...]
    text: str

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        remedy = [{"kind": change.kind, "do": change.text} for change in self.remedy]
        return {name: getattr(self, name) for name in ("backend", "state", "chosen", "reasons", "text")} | {
            "remedy": remedy
        }


def why(
    name: str,
    request: AttentionRequest | DecodeRequest,
    *,
    backend: str | None = None,
    platform: Platform | None = None,
    environ: Mapping[str, str] | None = None,
    te_release: str | None = None,
) -> Why:
    """Why the backend ``name`` does not run the request and what would change that; other arguments as ``survey``.

    Raises:
        TypeError, ValueError: as ``survey``, for ``name`` as for ``backend``.
    """
    if name is None:
        raise TypeError("why=None; expected the name of a backend")
    check_backend_name(name)
    check_hypothetical(platform, environ)
    environ = dict(environment.gates()) if environ is None else environ
    platform = platform or device.platform(request.device_type, request.device_index)
    now = Situation(request, platform, environ, backend)
    decision = _decide(now, te_release)
    entry = _entry(decision, name)
    chosen = speed.passes(decision)
    if name in chosen.values():
        return Why(name, "runs", chosen, (), (), _runs(name, decision))
    if entry.accepted:
        text, reasons = _behind(name, now, decision, te_release)
        return Why(name, "behind", chosen, reasons, (), text)
    reasons = entry.reasons
    if _can_run(now._replace(backend=name), name, te_release):
        return _off(name, now, decision, reasons, te_release)
    remedy = _remedy(name, now, te_release)
    lines = [f"{name} does not take this request on {describe_platform(platform)}: {'; '.join(reasons)}"]
    if remedy is None:
        last = _applied(now, _candidates(name, now))._replace(backend=name)
        rest = _tried(last, name, te_release)
        kept = tuple(reason for reason in reasons if rest is not None and reason in rest.reasons) or reasons
        lines.append(f"=> {name} cannot compute this: {'; '.join(kept)}")
        return Why(name, "impossible", chosen, reasons, (), "\n".join(lines))
    lines += [f"=> {_in_words(remedy)}", *_afterwards(name, now, remedy, te_release)]
    return Why(name, "refuses", chosen, reasons, remedy, "\n".join(lines))


def _decide(situation: Situation, te_release: str | None) -> Decision | DecodeDecision:
    request, platform, environ, backend = situation
    if isinstance(request, DecodeRequest):
        return survey_decode(request, backend=backend, platform=platform, environ=environ)
    return survey(request, backend=backend, platform=platform, environ=environ, te_release=te_release)


def _entry(decision: Decision | DecodeDecision, name: str) -> TraceEntry:
    found = next((entry for entry in decision.trace if entry.backend == name), None)
    if found is None:
        raise ValueError(get_manager().why_not_registered(name))
    return found


def _tried(situation: Situation, name: str, te_release: str | None) -> TraceEntry | None:
    """A backend's line in a changed situation; None where that has no decision.

    On a GPU TransformerEngine's selection raises for some requests that it never sees on the CPU, and a variable that
    is unset may have kept another one, with a value that is not accepted, from being read.
    """
    try:
        return _entry(_decide(situation, te_release), name)
    except (AssertionError, TypeError, ValueError):
        return None


def _can_run(situation: Situation, name: str, te_release: str | None) -> bool:
    entry = _tried(situation, name, te_release)
    return entry is not None and entry.accepted


def _applied(situation: Situation, wanted: Sequence[Change]) -> Situation:
    for change in wanted:
        situation = change.apply(situation)
    return situation


def _candidates(name: str, now: Situation) -> list[Change]:
    """Every change except those of the layout and the device, hardest for a user first."""
    return [*changes.of_request(now), *changes.of_variables(name, now), *changes.of_packages(name, now)]


def _remedy(name: str, now: Situation, te_release: str | None) -> tuple[Change, ...] | None:
    """The smallest set of changes found that lets the backend run when requested by name; None if there is none.

    All changes are applied at once and then dropped one by one while the backend still accepts, hardest first.
    """

    def accepts(wanted: Sequence[Change]) -> bool:
        return _can_run(_applied(now, wanted)._replace(backend=name), name, te_release)

    plain = _candidates(name, now)
    devices: list[list[Change]] = [[], *([changes.of_device(capability, now)] for capability in changes.GPUS)]
    layouts: list[list[Change]] = [[], *([layout] for layout in changes.of_layout(now))]
    for other_device in devices:
        found = []
        for layout in layouts:
            wanted = [*other_device, *layout, *plain]
            if accepts(wanted):
                for change in tuple(wanted):
                    fewer = [kept for kept in wanted if kept is not change]
                    wanted = fewer if accepts(fewer) else wanted
                found.append(wanted)
        if found:
            best = min(found, key=lambda wanted: (sum(change.kind == "request" for change in wanted), len(wanted)))
            return tuple(sorted(best, key=lambda change: _ORDER.index(change.kind)))
    return None


def _off(
    name: str, now: Situation, decision: Decision | DecodeDecision, reasons: tuple[str, ...], te_release: str | None
) -> Why:
    """The answer for a backend that could run but is switched off or left out by TransformerEngine's rules."""
    wanted = [*changes.of_variables(name, now)]
    chosen = speed.passes(decision)
    text = [f"{name} could run this request but is off: {'; '.join(reasons)}"]
    if not _can_run(_applied(now, wanted), name, te_release):
        text.append(f"=> {_by_name(name)}")
        return Why(name, "off", chosen, reasons, (), "\n".join(text))
    for change in tuple(wanted):
        fewer = [kept for kept in wanted if kept is not change]
        wanted = fewer if _can_run(_applied(now, fewer), name, te_release) else wanted
    text.append(f"=> {_in_words(wanted)}")
    text += _afterwards(name, now, wanted, te_release)
    return Why(name, "off", chosen, reasons, tuple(wanted), "\n".join(text))


def _in_words(wanted: Sequence[Change]) -> str:
    """What to do, easiest first; another GPU is named first, because the rest does not help without it."""
    gpus = [change.text for change in wanted if change.kind == "device"]
    requests = [change.text for change in wanted if change.kind == "request" and not change.text.startswith("leave")]
    others = [c.text for c in wanted if c.kind != "device" and c.text not in requests]
    parts = [f"needs another GPU: {gpus[0]}"] if gpus else []
    parts += others
    parts += [f"change the request: {', '.join(requests)}"] if requests else []
    return "; and ".join(parts)


def _afterwards(name: str, now: Situation, wanted: Sequence[Change], te_release: str | None) -> list[str]:
    """Whether the backend is then also chosen."""
    then = _applied(now, wanted)
    decision = _decide(then, te_release)
    if name in speed.passes(decision).values():
        return [f"   Then {_runs(name, decision)}"]
    entry = _entry(decision, name)
    if entry.accepted:
        behind = _behind(name, then, decision, te_release)[0]
        return [f"   Then {behind.replace('=> ', '   ')}"]
    return [f"   Then it runs when requested by name, backend={name!r}: {'; '.join(entry.reasons)}"]


def _runs(name: str, decision: Decision | DecodeDecision) -> str:
    chosen = speed.passes(decision)
    mine = [direction for direction, backend in chosen.items() if backend == name]
    text = f"{name} runs this request's {' and '.join(mine)}"
    for direction, backend in chosen.items():
        if backend != name:
            text += f"; {backend} runs the {direction}"
    return text + "."


def _behind(
    name: str, now: Situation, decision: Decision | DecodeDecision, te_release: str | None
) -> tuple[str, tuple[str, ...]]:
    """Text that names what is chosen instead of a backend that can run, and the reason for each pass."""
    found, reasons = [], []
    for direction, first in speed.passes(decision).items():
        reason = speed.why_not_chosen(_entry(decision, name), decision, first, direction, now.environ)
        found.append(f"{first} is chosen for the {direction} ({reason})")
        reasons.append(reason)
    text = f"{name} can run this request; {'; '.join(found)}."
    named = _entry(_decide(now._replace(backend=name), te_release), name)
    if named.accepted:
        return f"{text}\n=> {_by_name(name)}", tuple(reasons)
    return f"{text}\n   It cannot run both passes: {'; '.join(named.reasons)}.", tuple(reasons)


def _by_name(name: str) -> str:
    return f"to run it anyway, request it by name: backend={name!r}, or MLA_PLUGIN_BACKEND={name}"
