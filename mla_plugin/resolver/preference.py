"""TransformerEngine's order of the backends that its selection left, and what the orders of all hosts share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mla_plugin import environment
from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.hooks.types import Platform

CASCADE_NAMES: Mapping[str, str] = {
    "flash2": "fa2",
    "flash3": "fa3",
    "flash4": "fa4",
    "fused": "cudnn",
    "unfused": "sdpa",
}
"""TransformerEngine's backends and our corresponding ones."""

FALLBACK = "sdpa"


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
    """Names of third-party backends, highest priority first, equal ones sorted by name."""
    return sorted(priorities, key=lambda name: (-priorities[name], name))


def order(
    request: AttentionRequest,
    platform: Platform,
    environ: Mapping[str, str],
    survivors: Sequence[str] | None,
    priorities: Mapping[str, int],
    builtin: Sequence[str],
) -> list[str]:
    """Backends in TransformerEngine's order; those that are left out are not in the list.

    Args:
        request, platform, environ: what is decided on.
        survivors: our names of the backends that TransformerEngine's selection left, best first; None if it does not
            apply (not a CUDA device), which leaves every built-in backend in table order.
        priorities: the priority of each third-party backend.
        builtin: names of the built-in backends.
    """
    opt_in = environment.parse("NVTE_MLA_TRITON", environ)
    triton_first = opt_in == "1" and not triton_opt_in_obstacles(request, platform)
    left = builtin if survivors is None else survivors
    fallback = FALLBACK in left and environment.parse("NVTE_UNFUSED_ATTN", environ)
    others = by_priority(priorities)
    tried = [
        *(name for name in others if priorities[name] > 0),
        *(["triton"] if triton_first else []),
        *(name for name in left if name not in (FALLBACK, "triton")),
        *(name for name in others if priorities[name] == 0),
        *([FALLBACK] if fallback else []),
        *(name for name in others if priorities[name] < 0),
    ]
    return [name for name in tried if name in builtin or name in priorities]
