"""One MLA attention backend for every attention registry.

``attention`` runs Multi-head Latent Attention (or any attention with head_dim_qk != head_dim_v) on the best installed
backend, ``explain`` says which and why, ``register`` plugs into a host framework.
"""

from __future__ import annotations

import importlib
import importlib.metadata

from mla_plugin import cache
from mla_plugin.environment import EnvironmentVariableError
from mla_plugin.hooks import hookimpl
from mla_plugin.hooks.decode import DecodeLengths, DecodeOutput, DecodePlan, DecodeRequest, DecodeTensors
from mla_plugin.hooks.types import (
    Accepted,
    AttentionOutput,
    AttentionRequest,
    AttentionTensors,
    Gradients,
    NoBackendError,
    Plan,
    Platform,
    Refused,
    Registration,
    Residuals,
)
from mla_plugin.operations.attention.api import attention
from mla_plugin.operations.decode.api import decode
from mla_plugin.resolver import explain, resolve

try:
    __version__ = importlib.metadata.version("mla-plugin")
except importlib.metadata.PackageNotFoundError:  # a plain checkout on PYTHONPATH
    __version__ = "0+unknown"

_HOSTS = ("megatron", "transformer_engine", "transformers")

__all__ = [
    "Accepted",
    "AttentionOutput",
    "AttentionRequest",
    "AttentionTensors",
    "DecodeLengths",
    "DecodeOutput",
    "DecodePlan",
    "DecodeRequest",
    "DecodeTensors",
    "EnvironmentVariableError",
    "Gradients",
    "NoBackendError",
    "Plan",
    "Platform",
    "Refused",
    "Registration",
    "Residuals",
    "attention",
    "cache",
    "decode",
    "explain",
    "hookimpl",
    "register",
    "resolve",
]


def register(host: str) -> Registration | None:
    """Plug into a host framework's attention registry; a second call changes nothing.

    Args:
        host: ``"transformers"``: the name ``mla_plugin`` becomes an ``attn_implementation``. ``"megatron"``: every MLA
            layer of Megatron-Core that is built afterwards attends through the plugin. ``"transformer_engine"``: its
            DotProductAttention follows ``NVTE_MLA_TRITON`` and ``MLA_PLUGIN_TE``.

    Returns:
        for ``"transformer_engine"`` the registration, whose ``uninstall()`` takes it back; None for the other hosts.

    Raises:
        ValueError: there is no adapter for the host.
        ImportError: the host is not installed.
    """
    if host not in _HOSTS:
        raise ValueError(f"no adapter for the host {host!r}; available: {', '.join(_HOSTS)}")
    registration: Registration | None = importlib.import_module(f"mla_plugin.compat.{host}").register()
    return registration
