"""Which backend runs a request, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, overload

from mla_plugin.hooks.attention import AttentionRequest, Plan
from mla_plugin.hooks.decode import DecodePlan, DecodeRequest
from mla_plugin.hooks.types import Platform
from mla_plugin.resolver.attention import resolve as resolve_attention
from mla_plugin.resolver.attention import survey
from mla_plugin.resolver.decode import DecodeDecision, describe_decode, resolve_decode, survey_decode
from mla_plugin.resolver.explanation import Decision, describe

if TYPE_CHECKING:
    from mla_plugin.resolver.transformer_engine.cascade import te_decide

__all__ = [
    "Decision",
    "DecodeDecision",
    "describe_decode",
    "explain",
    "resolve",
    "survey",
    "survey_decode",
    "te_decide",
]


def __getattr__(name: str) -> Any:
    if name != "te_decide":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # TransformerEngine's rules are imported on demand, to keep the import of the package short
    from mla_plugin.resolver.transformer_engine.cascade import te_decide

    return te_decide


@overload
def resolve(
    request: AttentionRequest,
    *,
    backend: str | None = None,
    platform: Platform | None = None,
    environ: Mapping[str, str] | None = None,
) -> Plan: ...
@overload
def resolve(
    request: DecodeRequest,
    *,
    backend: str | None = None,
    platform: Platform | None = None,
    environ: Mapping[str, str] | None = None,
) -> DecodePlan: ...
def resolve(
    request: AttentionRequest | DecodeRequest,
    *,
    backend: str | None = None,
    platform: Platform | None = None,
    environ: Mapping[str, str] | None = None,
) -> Plan | DecodePlan:
    """The plan for a request, of attention or of decode.

    The decision is cached by the request and the environment variables that a selection reads, so a changed variable
    takes effect at the next call. Decisions for hypothetical platforms and environments are not cached.

    Args:
        request: the call.
        backend: use only this backend.
        platform: a hypothetical platform; None probes the request's device.
        environ: a hypothetical environment; None reads the process's.

    Raises:
        NoBackendError: no backend takes the request; the message lists every backend with every reason.
        EnvironmentVariableError: a variable has a value that is not accepted.
        ValueError: ``backend`` is not registered.
        TypeError: ``request`` is not a request.
    """
    if isinstance(request, DecodeRequest):
        return resolve_decode(request, backend=backend, platform=platform, environ=environ)
    if not isinstance(request, AttentionRequest):
        raise TypeError(f"request is {type(request).__name__}; expected an AttentionRequest or a DecodeRequest")
    return resolve_attention(request, backend=backend, platform=platform, environ=environ)


def explain(
    request: AttentionRequest | DecodeRequest,
    *,
    backend: str | None = None,
    platform: Platform | None = None,
    environ: Mapping[str, str] | None = None,
    te_release: str | None = None,
    why: str | None = None,
) -> str:
    """The decision as text: each backend in the order tried with its reasons, and what runs; arguments as ``survey``.

    ``te_release`` is ignored for decode, which TransformerEngine does not have. With ``why``, the name of a backend,
    the text says instead why that backend does not run, and what to install or change.
    """
    if why is not None:
        from mla_plugin.resolver.why import why as ask_why  # here, so that importing the package stays fast

        given = {"backend": backend, "platform": platform, "environ": environ, "te_release": te_release}
        return ask_why(why, request, **given).text  # type: ignore[arg-type]
    if isinstance(request, DecodeRequest):
        return describe_decode(survey_decode(request, backend=backend, platform=platform, environ=environ))
    return describe(survey(request, backend=backend, platform=platform, environ=environ, te_release=te_release))
