"""One backend's answer to one request."""

from __future__ import annotations

import logging

from mla_plugin.decode_types import DecodeRequest
from mla_plugin.hooks.manager import BUILTIN_BACKENDS, get_manager
from mla_plugin.types import Accepted, AttentionRequest, Platform, Refused

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
