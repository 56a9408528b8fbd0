"""One MLA attention backend for every attention registry.

``attention`` runs Multi-head Latent Attention (or any attention with head_dim_qk != head_dim_v) on the best installed
backend, ``explain`` says which and why, ``register`` plugs into a host framework.
"""

from __future__ import annotations

import importlib.metadata

from mla_plugin import cache, preparation
from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.decode import DecodeLengths, DecodeTensors
from mla_plugin.environment import EnvironmentVariableError
from mla_plugin.hooks import hookimpl
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, Gradients, Plan, Residuals
from mla_plugin.hooks.decode import DecodeOutput, DecodePlan, DecodeRequest
from mla_plugin.hooks.refusals import plain_attention_refusals
from mla_plugin.hooks.types import Accepted, NoBackendError, Platform, Refused
from mla_plugin.operations.attention.api import attention
from mla_plugin.operations.decode.api import decode
from mla_plugin.operations.explain import explain
from mla_plugin.operations.latent.api import latent_attention
from mla_plugin.registration import Registration, register
from mla_plugin.resolver import resolve

try:
    __version__ = importlib.metadata.version("mla-plugin")
except importlib.metadata.PackageNotFoundError:  # a plain checkout on PYTHONPATH
    __version__ = "0+unknown"

preparation.when_cuda_starts()

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
    "latent_attention",
    "plain_attention_refusals",
    "register",
    "resolve",
]
