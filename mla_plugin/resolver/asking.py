"""Asks every backend about a request."""

from __future__ import annotations

import dataclasses
import logging
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from mla_plugin import device, environment
from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.manager import BUILTIN_BACKENDS, BackendManager, describe_error, get_manager
from mla_plugin.hooks.refusals import if_it_reads_the_cache
from mla_plugin.hooks.types import Accepted, Platform, Refused

logger = logging.getLogger("mla_plugin")


def check_backend_name(backend: object) -> None:
    """Check that a ``backend`` argument is None or a name.

    Raises:
        TypeError: it is neither a string nor None.
        ValueError: it is empty.
    """
    if backend is None or (isinstance(backend, str) and backend.strip()):
        return
    error = ValueError if isinstance(backend, str) else TypeError
    registered = ", ".join(get_manager().backends())
    raise error(f"backend={backend!r}; the name of a backend, or None for the best one; registered: {registered}")


def check_hypothetical(platform: object, environ: object) -> None:
    """Check the arguments that describe a machine.

    Raises:
        TypeError: ``platform`` is neither a Platform nor None, or ``environ`` is neither a mapping of strings nor None.
    """
    if not (platform is None or isinstance(platform, Platform)):
        raise TypeError(f"platform={platform!r}; expected a mla_plugin.Platform, or None for the current device")
    if environ is None:
        return
    if not (isinstance(environ, Mapping) and all(isinstance(x, str) for pair in environ.items() for x in pair)):
        raise TypeError(
            f"environ={environ!r}; expected names and values as in os.environ, all strings, such as "
            "{'NVTE_FLASH_ATTN': '0'}, or None for the process's"
        )


def ask(
    name: str,
    select_backend: Callable[..., Any],
    request: AttentionRequest | DecodeRequest,
    platform: Platform,
    names: frozenset[str],
) -> Accepted | Refused:
    """One backend's answer. A third-party backend that raises is reported and left out.

    Args:
        name: of the backend.
        select_backend: its hook.
        request, platform: the hook's arguments.
        names: of all backends, for checking ``backward_by``.
    """
    try:
        return if_it_reads_the_cache(_plain_answer(select_backend(request=request, platform=platform), names), request)
    except (Exception, SystemExit) as error:  # a broken third-party package must not break the host
        if name in BUILTIN_BACKENDS:
            raise
        logger.warning("the backend %r is left out: its select_backend raised %s", name, describe_error(error))
        return Refused((f"its select_backend raised {describe_error(error)}",))


def _plain_answer(answers: object, names: frozenset[str]) -> Accepted | Refused:
    """The answer with its types checked, or a refusal that says what is wrong with it.

    Args:
        answers: the hook's result: a list of one answer, unless a wrapper changed it.
        names: of all backends.
    """
    if not isinstance(answers, list) or len(answers) > 1:
        return _wrong(f"{reprlib.repr(answers)} together with its hook wrappers", "a list of one answer")
    answer = answers[0] if answers else None
    if isinstance(answer, Refused):
        refused = _without_subclass(answer, Refused)
        if _are_texts(refused.reasons):
            return refused
        return _wrong(f"Refused(reasons={reprlib.repr(refused.reasons)})", "a tuple of strings")
    if not isinstance(answer, Accepted):
        return _wrong(reprlib.repr(answer), "an instance of Accepted or Refused")
    accepted = _without_subclass(answer, Accepted)
    backward_by = accepted.backward_by
    if backward_by is not None and not (isinstance(backward_by, str) and backward_by in names):
        known = ", ".join(sorted(names))
        return _wrong(f"Accepted(backward_by={reprlib.repr(backward_by)})", f"None or a backend's name: {known}")
    if not _are_texts(accepted.notes):
        return _wrong(f"Accepted(notes={reprlib.repr(accepted.notes)})", "a tuple of strings")
    if not _are_texts(accepted.kv_cache_formats):
        return _wrong(f"Accepted(kv_cache_formats={reprlib.repr(accepted.kv_cache_formats)})", "a tuple of strings")
    if accepted.drops_nan not in (True, False):
        return _wrong(f"Accepted(drops_nan={reprlib.repr(accepted.drops_nan)})", "True or False")
    return accepted


Answer = TypeVar("Answer", Accepted, Refused)


def _without_subclass(answer: Answer, plain: type[Answer]) -> Answer:
    """A copy as the plain class. A subclass may compute its attributes; an error there is reported as the plugin's."""
    return plain(**{attribute.name: getattr(answer, attribute.name) for attribute in dataclasses.fields(plain)})


def _are_texts(values: object) -> bool:
    return isinstance(values, tuple) and all(isinstance(value, str) for value in values)


def _wrong(given: str, accepted: str) -> Refused:
    return Refused((f"its select_backend returned {given}; it must return {accepted}",))


def check_backend_is_registered(backend: str | None) -> None:
    """Check the name in calls without queries or keys, about which no backend is asked.

    Raises:
        TypeError, ValueError: as ``ask_all``.
    """
    check_backend_name(backend)
    manager = get_manager()
    manager.load(environment.names("MLA_PLUGIN_BLOCK", dict(environment.gates())))
    if backend is not None and backend not in manager.backends():
        raise ValueError(manager.why_not_registered(backend))


@dataclass(frozen=True)
class Inquiry:
    """Every backend's answer to one request, and the platform and environment of the question.

    Attributes:
        platform: the device and the packages.
        environ: the variables that a selection reads.
        backend: the only one that may run; None for any.
        names: of all backends; those not imported because of MLA_PLUGIN_BLOCK come last.
        blocked: names excluded by MLA_PLUGIN_BLOCK, which were not asked.
        answers: of the other backends.
        forward_answers: of the built-in ones, to the same request without a backward.
    """

    platform: Platform
    environ: Mapping[str, str]
    backend: str | None
    names: tuple[str, ...]
    blocked: frozenset[str]
    answers: Mapping[str, Accepted | Refused]
    forward_answers: Mapping[str, Accepted | Refused]

    @property
    def builtin(self) -> list[str]:
        """Built-in backends that were asked."""
        return [name for name in BUILTIN_BACKENDS if name in self.answers]

    @property
    def priorities(self) -> dict[str, int]:
        """The priority of each third-party backend."""
        return {
            name: answer.priority if isinstance(answer, Accepted) else 0
            for name, answer in self.answers.items()
            if name not in BUILTIN_BACKENDS
        }


_warned: set[str] = set()
"""Values of MLA_PLUGIN_BLOCK that have been warned about."""


def _warn_of_unknown_names(blocked: frozenset[str], environ: Mapping[str, str], manager: BackendManager) -> None:
    """Warn once about a misspelt name in MLA_PLUGIN_BLOCK, which blocks nothing."""
    value = environ.get("MLA_PLUGIN_BLOCK", "")
    unknown = sorted(blocked - manager.known_names())
    if not unknown or value in _warned:
        return
    _warned.add(value)
    logger.warning(
        "MLA_PLUGIN_BLOCK=%r names %s, which is not registered; registered: %s",
        value,
        ", ".join(map(repr, unknown)),
        ", ".join((*manager.backends(), *manager.waiting())),
    )


def ask_all(
    request: AttentionRequest | DecodeRequest,
    backend: str | None,
    platform: Platform | None,
    environ: Mapping[str, str] | None,
) -> Inquiry:
    """Ask every backend; arguments and errors as ``survey``."""
    check_backend_name(backend)
    environ = dict(environment.gates()) if environ is None else environ
    platform = platform or device.platform(request.device_type, request.device_index)
    blocked = environment.names("MLA_PLUGIN_BLOCK", environ)
    manager = get_manager()
    manager.load(blocked)
    waiting, callers = manager.waiting(), manager.callers("select_backend")
    names = (*callers, *(name for name in waiting if name in blocked and name not in callers))
    backend = backend or environment.text("MLA_PLUGIN_BACKEND", environ)
    if backend is not None and backend not in names:
        raise ValueError(manager.why_not_registered(backend))
    _warn_of_unknown_names(blocked, environ, manager)
    asked = {name: caller for name, caller in callers.items() if name not in blocked}
    answers = {name: ask(name, caller, request, platform, frozenset(names)) for name, caller in asked.items()}
    forward_answers = {name: answers[name] for name in BUILTIN_BACKENDS if name in asked}
    if isinstance(request, AttentionRequest) and request.is_training:
        alone = request.replace(is_training=False)
        forward_answers = {name: ask(name, asked[name], alone, platform, frozenset(names)) for name in forward_answers}
    return Inquiry(platform, environ, backend, names, blocked, answers, forward_answers)
