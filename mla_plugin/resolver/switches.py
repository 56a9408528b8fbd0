"""The environment variables that switch a built-in backend off, in prefill and in decode."""

from __future__ import annotations

from collections.abc import Mapping

from mla_plugin import environment
from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.resolver.preference import FALLBACK

_SWITCHES: Mapping[str, tuple[str, ...]] = {
    "triton": ("NVTE_MLA_TRITON",),
    "fa2": ("NVTE_FLASH_ATTN", "NVTE_FLASH_ATTN_V2"),
    "fa3": ("NVTE_FLASH_ATTN", "NVTE_FLASH_ATTN_V3"),
    "fa4": ("NVTE_FLASH_ATTN", "NVTE_FLASH_ATTN_V4"),
    "cudnn": ("NVTE_FUSED_ATTN",),
    FALLBACK: ("NVTE_UNFUSED_ATTN",),
}
"""By backend; 0 switches it off."""


def switched_off(name: str, request: AttentionRequest | DecodeRequest, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The setting that switches a backend off; empty if none does. Variables after the first that does are not parsed.

    Raises:
        EnvironmentVariableError: a variable has a value that is not accepted.
    """
    if name == FALLBACK and _is_without_transformer_engine(request, environ):
        return ()
    for variable in _SWITCHES.get(name, ()):
        if environment.parse(variable, environ) in (False, "0"):
            return (f"{variable}={environ[variable]}",)
    return ()


def _is_without_transformer_engine(request: AttentionRequest | DecodeRequest, environ: Mapping[str, str]) -> bool:
    """Megatron-Core sets all three variables to 0 for ``attention_backend=local``, which mla-plugin replaces.

    TransformerEngine's own selection, which never decides decode, knows no such exception.
    """
    if isinstance(request, AttentionRequest) and environment.parse("MLA_PLUGIN_STRICT_TE", environ):
        return False
    switches = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
    return request.host == "megatron" and not any(environment.parse(switch, environ) for switch in switches)
