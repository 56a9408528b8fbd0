"""Which backend runs a request, and why: TransformerEngine's cascade first, then what each backend really can do."""

from __future__ import annotations

from collections.abc import Mapping

from mla_plugin.resolver.explanation import Decision, describe
from mla_plugin.resolver.resolve import resolve, survey
from mla_plugin.types import AttentionRequest, Platform

__all__ = ["Decision", "explain", "resolve", "survey"]


def explain(
    request: AttentionRequest,
    *,
    backend: str | None = None,
    platform: Platform | None = None,
    environ: Mapping[str, str] | None = None,
) -> str:
    """The decision in words: each backend in the order tried with its reasons, and what runs; arguments as survey."""
    return describe(survey(request, backend=backend, platform=platform, environ=environ))
