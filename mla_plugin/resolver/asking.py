"""What the backends answer to one request."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from mla_plugin import device, environment
from mla_plugin.hooks.attention import (
    AttentionRequest,
)
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.manager import BUILTIN_BACKENDS, get_manager
from mla_plugin.hooks.types import (
    Accepted,
    Platform,
    Refused,
)

logger = logging.getLogger("mla_plugin")


def ask(name: str, request: AttentionRequest | DecodeRequest, platform: Platform) -> Accepted | Refused:
    """One backend's answer. A backend of another package that raises is reported and left out."""
    try:
        answers = get_manager().caller("select_backend", name)(request=request, platform=platform)
    except Exception as error:
        if name in BUILTIN_BACKENDS:
            raise
        logger.warning("the backend %r is left out: its select_backend raised %r", name, error)
        return Refused((f"its select_backend raised {type(error).__name__}: {error}",))
    answer = answers[-1] if answers else None
    if isinstance(answer, (Accepted, Refused)):
        return answer
    return Refused((f"its select_backend returned {answer!r}; it must return Accepted or Refused",))


def check_backend_name(backend: str | None) -> None:
    """A backend that is asked for by name is registered; None is no wish."""
    names = get_manager().backends()
    if backend is not None and backend not in names:
        raise ValueError(f"no backend named {backend!r} is registered; registered: {', '.join(names)}")


@dataclass(frozen=True)
class Inquiry:
    """Every backend's answer to one request, and under which circumstances it was asked.

    Attributes:
        platform: the device and the packages.
        environ: the variables that a selection reads.
        backend: the only one that may run; None for any.
        names: of all backends.
        blocked: of those that were not asked.
        answers: of the others.
    """

    platform: Platform
    environ: Mapping[str, str]
    backend: str | None
    names: tuple[str, ...]
    blocked: frozenset[str]
    answers: Mapping[str, Accepted | Refused]

    @property
    def builtin(self) -> list[str]:
        """Built-in backends that were asked."""
        return [name for name in BUILTIN_BACKENDS if name in self.answers]

    @property
    def priorities(self) -> dict[str, int]:
        """The priority that each backend of another package asked for."""
        return {
            name: answer.priority if isinstance(answer, Accepted) else 0
            for name, answer in self.answers.items()
            if name not in BUILTIN_BACKENDS
        }


def ask_all(
    request: AttentionRequest | DecodeRequest,
    backend: str | None,
    platform: Platform | None,
    environ: Mapping[str, str] | None,
) -> Inquiry:
    """Ask every backend; arguments and errors as ``survey``."""
    environ = dict(environment.gates()) if environ is None else environ
    platform = platform or device.platform(request.device_type, request.device_index)
    names = tuple(get_manager().backends())
    backend = backend or environment.text("MLA_PLUGIN_BACKEND", environ)
    check_backend_name(backend)
    blocked = environment.names("MLA_PLUGIN_BLOCK", environ)
    answers = {name: ask(name, request, platform) for name in names if name not in blocked}
    environment.check_selection(environ)
    return Inquiry(platform, environ, backend, names, blocked, answers)
