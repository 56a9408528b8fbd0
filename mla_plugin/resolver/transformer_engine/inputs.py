"""Check the three tables that describe a selection (params, environment, platform) and make a ``Query`` of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mla_plugin.environment import parse
from mla_plugin.resolver.transformer_engine.flash import ComputeCapability, why_not_installed
from mla_plugin.resolver.transformer_engine.query import (
    FLASH_VERSIONS,
    UNCAUSAL_MASKS,
    Query,
    Window,
    layout_formats,
    normalise_window,
)

_TAKEN_OVER: dict[str, str] = {
    "dtype": "qkv_dtype",
    "layout": "qkv_layout",
    "num_heads": "num_heads",
    "num_kv_heads": "num_gqa_groups",
    "sq": "max_seqlen_q",
    "skv": "max_seqlen_kv",
    "dq": "head_dim_qk",
    "dv": "head_dim_v",
    "mask": "attn_mask_type",
    "bias_type": "core_attention_bias_type",
    "bias_shape": "core_attention_bias_shape",
    "bias_requires_grad": "core_attention_bias_requires_grad",
    "pad_between_seqs": "pad_between_seqs",
    "dropout": "attention_dropout",
    "context_parallel": "context_parallel",
    "cp_comm_type": "cp_comm_type",
    "is_training": "is_training",
    "softmax_type": "softmax_type",
    "return_max_logit": "return_max_logit",
    "cuda_graph": "cuda_graph",
    "num_splits": "num_splits",
    "checkpoint_core_attention": "checkpoint_core_attention",
    "has_score_mod": "has_score_mod",
    "has_score_mod_bprop": "has_score_mod_bprop",
}
"""Fields of ``Query`` by the fields of ``AttentionParams`` that they take over as they are."""

_CONVERTED = ("window_size", "bottom_right_diagonal", "alibi_slopes_shape", "inference_params")
_TEXTS = (
    "qkv_dtype",
    "qkv_layout",
    "attn_mask_type",
    "core_attention_bias_type",
    "cp_comm_type",
    "softmax_type",
)
_SMALLEST = {
    "num_heads": 1,
    "num_gqa_groups": 1,
    "max_seqlen_q": 0,
    "max_seqlen_kv": 0,
    "head_dim_qk": 1,
    "head_dim_v": 1,
}
_PLATFORM = ("compute_capability", "cudnn_version", "flash_attn", "fused_supported")


def read_query(params: Mapping[str, Any], env: Mapping[str, str], platform: Mapping[str, Any]) -> Query:
    """Check and type the three tables; ``cascade.decide`` describes them.

    The checks come in TransformerEngine's order, so that of several faults the same one is reported.

    Raises:
        AssertionError: the window does not fit the mask.
        ValueError: a field is missing or has a value that is not accepted, the layout packs what a KV cache needs
            apart, or an environment variable has a value that is not accepted.
    """
    _require(params, (*_TAKEN_OVER.values(), *_CONVERTED), "params")
    _require(platform, _PLATFORM, "platform")
    _check_types(params)
    window = _window(params["attn_mask_type"], params["window_size"])
    deterministic = _deterministic(params, env)
    cache = params["inference_params"]
    if cache is not None:
        _require(cache, ("is_paged", "page_size"), "params['inference_params']")
    q_format, kv_format = _formats(params["qkv_layout"], cache is not None)
    switched_off = _switched_off(env)
    if window is None:
        normalise_window(params["attn_mask_type"], None)
    cc = _compute_capability(platform["compute_capability"])
    return Query(
        **{field: params[name] for field, name in _TAKEN_OVER.items()},
        q_format=q_format,
        kv_format=kv_format,
        window=window,
        bottom_right_diagonal=_bottom_right(params["attn_mask_type"], params["bottom_right_diagonal"]),
        has_alibi_slopes=params["alibi_slopes_shape"] is not None,
        kv_cache=cache is not None,
        is_paged=cache is not None and cache["is_paged"],
        page_size=None if cache is None else cache["page_size"],
        deterministic=deterministic,
        cc=cc,
        cudnn=tuple(platform["cudnn_version"] or (0, 0, 0)),
        fused_supported=_fused_supported(platform["fused_supported"]),
        flash_versions={f"flash{n}": version for n, version in platform["flash_attn"].items() if version is not None},
        absent=_absent(platform, cc),
        switched_off=switched_off,
    )


def _require(table: Mapping[str, Any], fields: Iterable[str], name: str) -> None:
    missing = [field for field in fields if field not in table]
    if missing:
        raise ValueError(f"{name} lacks {', '.join(missing)}; every one of these fields is needed")


def _check_types(params: Mapping[str, Any]) -> None:
    """Name the field where a rule would stumble with a TypeError or a ZeroDivisionError."""
    for name in _TEXTS:
        if not isinstance(params[name], str):
            raise ValueError(f"{name}={params[name]!r}: accepted is a text")
    for name, smallest in _SMALLEST.items():
        if not isinstance(params[name], int) or params[name] < smallest:
            raise ValueError(f"{name}={params[name]!r}: accepted is an integer >= {smallest}")


def _window(mask: str, window: Iterable[int] | None) -> Window | None:
    """The window as given: selection checks it but does not rewrite it. An unknown mask is left to cuDNN's query."""
    if window is None:
        return None
    left, right = window
    if "causal" in mask or mask in UNCAUSAL_MASKS:
        normalise_window(mask, (left, right))
    return left, right


def _deterministic(params: Mapping[str, Any], env: Mapping[str, str]) -> bool:
    given = params.get("deterministic", "env")
    return not parse("NVTE_ALLOW_NONDETERMINISTIC_ALGO", env) if given == "env" else bool(given)


def _bottom_right(mask: str, given: bool | str) -> bool:
    return mask not in ("causal", "padding_causal") if given == "auto" else bool(given)


def _formats(layout: str, kv_cache: bool) -> tuple[str, str]:
    """Formats of Q and of K and V. Only with a KV cache does TransformerEngine's Python look at the second."""
    q_format, kv_format = layout_formats(layout)
    if not kv_cache:
        return q_format, q_format
    if "_" not in layout.removeprefix("paged_kv_"):
        raise ValueError(
            f"qkv_layout={layout!r} with inference_params: Q, K and V are packed in one tensor; "
            "with a KV cache accepted are layouts with Q in a tensor of its own, such as 'bshd_bshd_bshd'"
        )
    return q_format, kv_format


def _switched_off(env: Mapping[str, str]) -> dict[str, str]:
    """Which backends the environment switches off, and by which setting.

    The variables of the versions are read only while NVTE_FLASH_ATTN is on, so a bad value in them can go unnoticed.
    """
    versions = {"flash2": "NVTE_FLASH_ATTN_V2", "flash3": "NVTE_FLASH_ATTN_V3", "flash4": "NVTE_FLASH_ATTN_V4"}
    others = {"fused": "NVTE_FUSED_ATTN", "unfused": "NVTE_UNFUSED_ATTN"}
    if parse("NVTE_FLASH_ATTN", env):
        read = versions | others
    else:
        read = dict.fromkeys(("flash", *versions), "NVTE_FLASH_ATTN") | others
    return {backend: f"{name}={env[name]}" for backend, name in read.items() if not parse(name, env)}


def _compute_capability(given: Iterable[int] | None) -> ComputeCapability:
    if given is None:
        raise ValueError(
            "platform['compute_capability']=None: TransformerEngine selects for CUDA devices; give (major, minor)"
        )
    major, minor = given
    return major, minor


def _fused_supported(given: object) -> bool | None:
    if given == "cudnn":
        return None
    if isinstance(given, bool):
        return given
    raise ValueError(f"platform['fused_supported']={given!r}: accepted are True, False and 'cudnn'")


def _absent(platform: Mapping[str, Any], cc: ComputeCapability) -> dict[str, str]:
    """Rule 0.1: which versions of FlashAttention count as not installed, and why."""
    cutlass_dsl = platform.get("nvidia_cutlass_dsl")
    absent = {}
    for backend in FLASH_VERSIONS:
        reason = why_not_installed(backend, platform["flash_attn"].get(backend[-1]), cc, cutlass_dsl)
        if reason is not None:
            absent[backend] = reason
    return absent
