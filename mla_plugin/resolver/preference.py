"""The order in which backends are tried, once TransformerEngine's cascade has spoken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mla_plugin import device, environment
from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.hooks.types import Platform
from mla_plugin.resolver.transformer_engine.flash import DISTRIBUTIONS, compared_version, why_not_installed
from mla_plugin.resolver.transformer_engine.inputs import SWITCHES
from mla_plugin.resolver.transformer_engine.release import NEWEST, read_release

CASCADE_NAMES: Mapping[str, str] = {
    "flash2": "fa2",
    "flash3": "fa3",
    "flash4": "fa4",
    "fused": "cudnn",
    "unfused": "sdpa",
}
"""TransformerEngine's backends and ours that stand for them."""

FALLBACK = "sdpa"

_FLASH: Mapping[str, str] = {"fa2": "flash2", "fa3": "flash3"}
"""TransformerEngine's names of the versions of FlashAttention that come in packages unknown to it too."""


def flash_switched_off(name: str, environ: Mapping[str, str], te_release: str = NEWEST) -> str | None:
    """The variable that switches a FlashAttention backend off, with its text; None when none does."""
    if name not in _FLASH:
        return None
    _, minor = read_release(te_release)
    own = [switch.name for switch in SWITCHES if switch.backend == _FLASH[name] and switch.holds_in(minor)]
    switches = ("NVTE_FLASH_ATTN", *own)
    return next((f"{switch}={environ[switch]}" for switch in switches if not environment.parse(switch, environ)), None)


def _is_outside_te(name: str, platform: Platform, environ: Mapping[str, str], te_release: str) -> bool:
    """The backend has a provider that TransformerEngine does not know, so its selection says nothing about it.

    That is FlashAttention 3 as vLLM and SGLang ship it, and PyTorch's own FlashAttention 2. The user's switches hold.
    """
    version = _FLASH[name]
    capability = platform.compute_capability or (0, 0)
    _, minor = read_release(te_release)
    found = compared_version(version, platform.version(DISTRIBUTIONS[version]), minor)
    is_unknown = why_not_installed(version, found, capability, release=minor) is not None
    others = name == "fa2" or any(platform.version(other) for other, _ in device.FLASH_ATTENTION_PROVIDERS[name])
    return is_unknown and others and flash_switched_off(name, environ, te_release) is None


def _is_without_transformer_engine(request: AttentionRequest, environ: Mapping[str, str]) -> bool:
    """Megatron-Core sets all three switches to 0 for ``attention_backend=local``, in the place of which we attend."""
    switches = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
    return request.host == "megatron" and not any(environment.parse(switch, environ) for switch in switches)


OUTSIDE_TE = ("fa3", "triton", "fa2")
"""Backends of which TransformerEngine's selection may know nothing, by measured speed.

B 1, H 128, S 4096, causal, forward on an H200: 631, 480 and, V padded, 234 TFLOP/s.
"""


def triton_opt_in_obstacles(request: AttentionRequest, platform: Platform) -> list[str]:
    """Why ``NVTE_MLA_TRITON=1`` does not put the Triton kernels first for this request; empty when it does.

    The conditions are those of NVIDIA/TransformerEngine pull request 2950.
    """
    capability = platform.compute_capability
    is_too_old = "triton-interpreter" not in platform.tools and (capability is None or capability < (8, 0))
    conditions = (
        (request.fp8, "FP8"),
        (request.dropout_p != 0.0, f"dropout_p={request.dropout_p} != 0"),
        (request.context_parallel, "context parallelism"),
        (request.bias_type != "no_bias" or request.bias_shape is not None, f"bias_type={request.bias_type}"),
        (request.has_padding or request.attn_mask_type == "arbitrary", f"attn_mask_type={request.attn_mask_type}"),
        (request.has_sliding_window, f"window_size={request.window_size}"),
        (request.has_kv_cache, "KV cache"),
        (request.qkv_format not in ("bshd", "sbhd"), f"qkv_format={request.qkv_format}, not bshd or sbhd"),
        (request.head_dim_qk == request.head_dim_v, f"head_dim_qk == head_dim_v == {request.head_dim_v}"),
        (is_too_old, f"compute capability {capability} < (8, 0)"),
    )
    return [reason for holds, reason in conditions if holds]


def by_priority(priorities: Mapping[str, int]) -> list[str]:
    """Names of backends of other packages, the highest priority first; equal ones by name, however they came in."""
    return sorted(priorities, key=lambda name: (-priorities[name], name))


def order(
    request: AttentionRequest,
    platform: Platform,
    environ: Mapping[str, str],
    survivors: Sequence[str] | None,
    priorities: Mapping[str, int],
    builtin: Sequence[str],
    te_release: str = NEWEST,
) -> list[str]:
    """Backends in the order in which they are tried; those that are left out are not in the list.

    Args:
        survivors: our names of what TransformerEngine's cascade left, best first; None where the cascade does not
            apply (not a CUDA device), which leaves every built-in backend in table order. Behind them, unless the host
            is as strict as TransformerEngine, come those of which its selection knows nothing (``OUTSIDE_TE``).
        priorities: the priority that each backend of another package asked for.
        builtin: names of the built-in backends.
        te_release: the release of TransformerEngine whose cascade it is.
    """
    strict = request.host == "transformer_engine" or bool(environment.parse("MLA_PLUGIN_STRICT_TE", environ))
    opt_in = environment.parse("NVTE_MLA_TRITON", environ)
    triton_first = opt_in == "1" and not triton_opt_in_obstacles(request, platform)
    beyond_te = not strict and platform.device_type == "cuda"  # Triton's interpreter is for tests
    outside = {name: beyond_te and _is_outside_te(name, platform, environ, te_release) for name in _FLASH}
    outside["triton"] = beyond_te and opt_in != "0" and not triton_first
    fallback = FALLBACK in survivors if survivors is not None and strict else True
    if not environment.parse("NVTE_UNFUSED_ATTN", environ):
        fallback = not strict and _is_without_transformer_engine(request, environ)
    fused = [name for name in (builtin if survivors is None else survivors) if name not in (FALLBACK, "triton")]
    others = by_priority(priorities)
    tried = [
        *(name for name in others if priorities[name] > 0),
        *(["triton"] if triton_first else []),
        *fused,
        *(name for name in others if priorities[name] == 0),
        *(name for name in OUTSIDE_TE if outside[name]),
        *([FALLBACK] if fallback else []),
        *(name for name in others if priorities[name] < 0),
    ]
    return [name for name in tried if name in builtin or name in priorities]
