"""Validates the three dicts that describe a selection (params, environment, platform) and builds a ``Query``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

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
from mla_plugin.resolver.transformer_engine.release import Release, Span

_TAKEN_OVER: dict[str, str] = {
    "dtype": "qkv_dtype",
    "layout": "qkv_layout",
    "batch_size": "batch_size",
    "num_heads": "num_heads",
    "num_kv_heads": "num_gqa_groups",
    "sq": "max_seqlen_q",
    "skv": "max_seqlen_kv",
    "dq": "head_dim_qk",
    "dv": "head_dim_v",
    "mask": "attn_mask_type",
    "bias_type": "core_attention_bias_type",
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
"""Fields of ``AttentionParams`` that are copied unchanged, to the fields of ``Query``."""

_CONVERTED = (
    "window_size",
    "bottom_right_diagonal",
    "alibi_slopes_shape",
    "core_attention_bias_shape",
    "inference_params",
)
_TEXTS = (
    "qkv_dtype",
    "qkv_layout",
    "attn_mask_type",
    "core_attention_bias_type",
    "cp_comm_type",
    "softmax_type",
)
_SMALLEST = {
    "batch_size": 0,
    "num_heads": 1,
    "num_gqa_groups": 1,
    "max_seqlen_q": 0,
    "max_seqlen_kv": 0,
    "head_dim_qk": 1,
    "head_dim_v": 1,
}
_NUMBERS = ("attention_dropout", "softcap")
_PLATFORM = ("compute_capability", "cudnn_version", "flash_attn", "fused_supported")


@dataclass(frozen=True)
class Field(Span):
    """A field of ``AttentionParams`` that older releases do not have, with its neutral value."""

    name: str
    neutral: object


FIELDS: tuple[Field, ...] = (
    Field("has_score_mod", False, since="2.17"),
    Field("has_score_mod_bprop", False, since="2.17"),
    Field("softcap", 0.0, since="2.20"),
)


@dataclass(frozen=True)
class Switch(Span):
    """An environment variable that disables one version of FlashAttention."""

    name: str
    backend: str


SWITCHES: tuple[Switch, ...] = (
    Switch("NVTE_FLASH_ATTN_V2", "flash2", since="2.18"),
    Switch("NVTE_FLASH_ATTN_V3", "flash3", since="2.18"),
    Switch("NVTE_FLASH_ATTN_V4", "flash4", since="2.18"),
)


def read_query(
    params: Mapping[str, Any], env: Mapping[str, str], platform: Mapping[str, Any], release: Release
) -> Query:
    """Validate and convert the three dicts; ``cascade.te_decide`` describes them.

    The checks have TransformerEngine's order, so that of several errors the same one is reported.

    Raises:
        AssertionError: the window does not fit the mask.
        ValueError: a field is missing or has a value that is not accepted or that the release cannot express, the
            layout packs what a KV cache needs apart, or an environment variable has a value that is not accepted.
    """
    _require(params, (*_TAKEN_OVER.values(), *_CONVERTED), "params")
    _require(platform, _PLATFORM, "platform")
    _require(env, (), "env")
    _check_types(params)
    _check_platform(platform)
    _check_release(params, release)
    window = _window(params["attn_mask_type"], params["window_size"])
    deterministic = _deterministic(params, env)
    cache = params["inference_params"]
    q_format, kv_format = _formats(params["qkv_layout"], cache is not None)
    switched_off = _switched_off(env, release)
    if window is None:
        normalise_window(params["attn_mask_type"], None)
    cc = _compute_capability(platform["compute_capability"])
    return Query(
        **{field: params[name] for field, name in _TAKEN_OVER.items()},
        release=release,
        q_format=q_format,
        kv_format=kv_format,
        window=window,
        bottom_right_diagonal=_bottom_right(params["attn_mask_type"], params["bottom_right_diagonal"]),
        bias_shape=_bias_shape(params),
        softcap=params.get("softcap", 0.0),
        has_alibi_slopes=params["alibi_slopes_shape"] is not None,
        kv_cache=cache is not None,
        is_paged=cache is not None and cache["is_paged"],
        page_size=None if cache is None else cache["page_size"],
        deterministic=deterministic,
        cc=cc,
        cudnn=tuple(platform["cudnn_version"] or (0, 0, 0)),
        fused_supported=_fused_supported(platform["fused_supported"]),
        short_first=parse("NVTE_FUSED_ATTN_BACKEND", env) == 0,
        flash_versions={f"flash{n}": version for n, version in platform["flash_attn"].items() if version is not None},
        fa3_softcap=bool(platform.get("fa3_softcap", False)),
        absent=_absent(platform, cc, release),
        switched_off=switched_off,
    )


def _require(table: Mapping[str, Any], fields: Iterable[str], name: str) -> None:
    if not isinstance(table, Mapping):
        raise ValueError(f"{name}={table!r}: expected a dict")
    missing = [field for field in fields if field not in table]
    if missing:
        raise ValueError(f"{name} lacks {', '.join(missing)}; all of these fields are required")


def _check_types(params: Mapping[str, Any]) -> None:
    """Report the field for which a rule would otherwise raise a TypeError or a ZeroDivisionError."""
    for name in _TEXTS:
        if not isinstance(params[name], str):
            raise ValueError(f"{name}={params[name]!r}: expected a text")
    for name, smallest in _SMALLEST.items():
        if not isinstance(params[name], int) or params[name] < smallest:
            raise ValueError(f"{name}={params[name]!r}: expected an integer >= {smallest}")
    for name in _NUMBERS:
        if not isinstance(params.get(name, 0.0), (int, float)):
            raise ValueError(f"{name}={params[name]!r}: expected a number")
    window = params["window_size"]
    if window is not None and not _are_integers(window, 2):
        raise ValueError(f"window_size={window!r}: expected None or (left, right)")
    shape = params["core_attention_bias_shape"]
    if shape is not None and not isinstance(shape, (str, Sequence)):
        raise ValueError(f"core_attention_bias_shape={shape!r}: expected None, letters or (b, h, sq, skv)")
    cache = params["inference_params"]
    if cache is not None:
        _require(cache, ("is_paged", "page_size"), "params['inference_params']")
        if not isinstance(cache["page_size"], (int, type(None))):
            raise ValueError(f"params['inference_params']['page_size']={cache['page_size']!r}: expected an integer")


def _check_platform(platform: Mapping[str, Any]) -> None:
    capability, cudnn = platform["compute_capability"], platform["cudnn_version"]
    if capability is not None and not _are_integers(capability, 2):
        raise ValueError(f"platform['compute_capability']={capability!r}: expected (major, minor)")
    if cudnn is not None and not _are_integers(cudnn, 3):
        raise ValueError(f"platform['cudnn_version']={cudnn!r}: expected None or (major, minor, patch)")
    versions = platform["flash_attn"]
    if not isinstance(versions, Mapping) or not all(_is_version(version) for version in versions.values()):
        raise ValueError(f"platform['flash_attn']={versions!r}: expected a version or None by '2', '3' and '4'")
    if not _is_version(cutlass_dsl := platform.get("nvidia_cutlass_dsl")):
        raise ValueError(f"platform['nvidia_cutlass_dsl']={cutlass_dsl!r}: expected a version or None")


def _is_version(given: Any) -> bool:
    try:
        Version("0" if given is None else given)
    except (InvalidVersion, TypeError):
        return False
    return True


def _are_integers(given: object, count: int) -> bool:
    return isinstance(given, Sequence) and len(given) == count and all(isinstance(x, int) for x in given)


def _check_release(params: Mapping[str, Any], release: Release) -> None:
    for field in FIELDS:
        value = params.get(field.name, field.neutral)
        if value != field.neutral and not field.holds_in(release):
            raise ValueError(
                f"{field.name}={value!r}: TransformerEngine {release[0]}.{release[1]} does not know it; "
                f"expected {field.neutral!r}, or a release from {field.since} on"
            )


def _bias_shape(params: Mapping[str, Any]) -> str | None:
    """The shape in letters. From 2.20 on AttentionParams has numbers, (b, h, sq, skv); both are accepted."""
    given: str | Sequence[int] | None = params["core_attention_bias_shape"]
    if given is None or isinstance(given, str):
        return given
    if len(given) == 4:
        batch, heads, queries, _ = given
        letters = (
            ((params["batch_size"], params["num_heads"]), "bhss"),
            ((1, params["num_heads"]), "1hss"),
            ((params["batch_size"], 1), "b1ss"),
            ((1, 1), "111s" if queries == 1 and params["max_seqlen_q"] != 1 else "11ss"),
        )
        for sizes, name in letters:
            if (batch, heads) == sizes:
                return name
    raise ValueError(
        f"core_attention_bias_shape={given!r}: expected 1hss, b1ss, bhss, 11ss, 111s, and (b, h, sq, skv) for them"
    )


def _window(mask: str, window: Iterable[int] | None) -> Window | None:
    """The window as given: the selection checks it but does not change it. cuDNN's query checks an unknown mask."""
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
    """Formats of Q and of K and V. TransformerEngine's Python code reads the second only with a KV cache."""
    q_format, kv_format = layout_formats(layout)
    if not kv_cache:
        return q_format, q_format
    if "_" not in layout.removeprefix("paged_kv_"):
        raise ValueError(
            f"qkv_layout={layout!r} with inference_params: Q, K and V are packed in one tensor; "
            "with a KV cache Q must be a separate tensor; expected a layout such as 'bshd_bshd_bshd'"
        )
    return q_format, kv_format


def _switched_off(env: Mapping[str, str], release: Release) -> dict[str, str]:
    """Which backends the environment disables, and by which setting.

    The variables of the versions are read only if NVTE_FLASH_ATTN is on, as in TransformerEngine.
    """
    others = {"fused": "NVTE_FUSED_ATTN", "unfused": "NVTE_UNFUSED_ATTN"}
    if parse("NVTE_FLASH_ATTN", env):
        read = {switch.backend: switch.name for switch in SWITCHES if switch.holds_in(release)} | others
    else:
        read = dict.fromkeys(("flash", *FLASH_VERSIONS), "NVTE_FLASH_ATTN") | others
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
    raise ValueError(f"platform['fused_supported']={given!r}: expected True, False and 'cudnn'")


def _absent(platform: Mapping[str, Any], cc: ComputeCapability, release: Release) -> dict[str, str]:
    """Rule 0.1: which versions of FlashAttention count as not installed, and why."""
    cutlass_dsl = platform.get("nvidia_cutlass_dsl")
    absent = {}
    for backend in FLASH_VERSIONS:
        version = platform["flash_attn"].get(backend[-1])
        reason = why_not_installed(backend, version, cc, cutlass_dsl, release=release)
        if reason is not None:
            absent[backend] = reason
    return absent
