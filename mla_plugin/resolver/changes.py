"""What a user can change about a call that a backend refuses: packages, variables, the request, the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from mla_plugin import environment
from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.types import Platform
from mla_plugin.resolver.installing import PACKAGES

Kind: TypeAlias = Literal["package", "variable", "request", "device"]

GPUS: dict[tuple[int, int], str] = {
    (8, 0): "such as A100",
    (9, 0): "such as H100 or H200",
    (10, 0): "such as B200",
    (12, 0): "such as RTX 5090",
}
"""Compute capabilities that are tried, and a GPU of each."""

CUDA, CUDNN = "13.0", (9, 20, 0)
"""Versions that are assumed of a hypothetical GPU's machine, and of an upgrade."""


class Situation(NamedTuple):
    """The inputs of a decision; ``backend`` is the one requested by name."""

    request: AttentionRequest | DecodeRequest
    platform: Platform
    environ: Mapping[str, str]
    backend: str | None = None


class Change(NamedTuple):
    """Something to install or change: the text for the user, and the situation afterwards."""

    kind: Kind
    text: str
    apply: Callable[[Situation], Situation]


def _with_package(name: str, version: str) -> Callable[[Situation], Situation]:
    def apply(situation: Situation) -> Situation:
        packages = dict(situation.platform.packages) | {name: version}
        for companion in ("flashinfer-jit-cache", "flashinfer-cubin"):  # pip brings what agrees
            if name == "flashinfer-python" and companion in packages:
                packages[companion] = version
        platform = dataclasses.replace(situation.platform, packages=tuple(sorted(packages.items())))
        return situation._replace(platform=platform)

    return apply


def of_packages(name: str, situation: Situation) -> Iterator[Change]:
    """Install or upgrade what the backend needs."""
    for package in PACKAGES.get(name, ()):
        found = situation.platform.version(package.name)
        if found != package.version:
            command = package.upgrade if found else package.command
            yield Change("package", command, _with_package(package.name, package.version))
    if name == "cudnn":
        major = (situation.platform.cuda_version or CUDA).split(".")[0]
        yield Change(
            "package",
            f"pip install --upgrade nvidia-cudnn-cu{major}",
            lambda s: s._replace(
                platform=dataclasses.replace(s.platform, cudnn_version=max(s.platform.cudnn_version or CUDNN, CUDNN))
            ),
        )
        if situation.platform.device_type == "cuda" and situation.platform.cuda_version is None:
            yield Change(
                "package",
                "install a CUDA build of PyTorch: https://pytorch.org/get-started/locally",
                lambda s: s._replace(platform=dataclasses.replace(s.platform, cuda_version=CUDA)),
            )


def of_variables(name: str, situation: Situation) -> Iterator[Change]:
    """Unset variables, and remove the backend's name from MLA_PLUGIN_BLOCK."""
    for variable, value in situation.environ.items():
        if variable == "MLA_PLUGIN_BLOCK":
            blocked = environment.names(variable, situation.environ)
            if name in blocked:
                left = ",".join(sorted(blocked - {name}))
                yield Change("variable", f"remove {name} from {variable}={value}", _with_variable(variable, left))
        else:
            yield Change("variable", f"unset {variable} (it is {value!r})", _with_variable(variable, None))
    if name == "triton" and situation.environ.get("NVTE_MLA_TRITON") != "1":
        yield Change("variable", "set NVTE_MLA_TRITON=1", _with_variable("NVTE_MLA_TRITON", "1"))
    if situation.backend not in (None, name):
        backend = f"leave out backend={situation.backend!r}"
        yield Change("request", backend, lambda s: s._replace(backend=None))


def _with_variable(name: str, value: str | None) -> Callable[[Situation], Situation]:
    def apply(situation: Situation) -> Situation:
        environ = {key: text for key, text in situation.environ.items() if key != name}
        return situation._replace(environ=environ if value is None else environ | {name: value})

    return apply


_PLAIN: tuple[tuple[str, Any, str], ...] = (
    ("dropout_p", 0.0, "no dropout (dropout_p=0)"),
    ("is_training", False, "no backward (torch.no_grad(), --inference)"),
    ("deterministic", False, "a backward that need not be deterministic"),
    ("batch_invariant", False, "bits that may depend on the batch (batch_invariant=False)"),
    ("kv_cache_format", "plain", "a cache that is not quantised (kv_cache_format='plain')"),
    ("return_lse", False, "no log-sum-exp (return_lse=False)"),
    ("window_size", (-1, -1), "no sliding window"),
    ("pad_between_seqs", False, "no padding between the sequences"),
    ("lengths_may_differ", False, "one tensor as cu_seqlens_q and cu_seqlens_kv"),
    ("dtype", torch.bfloat16, "bfloat16"),
    ("softmax_type", "vanilla", "softmax_type='vanilla'"),
    ("fp8", False, "no FP8"),
    ("context_parallel", False, "no context parallelism"),
    ("has_kv_cache", False, "no KV cache in attention (mla_plugin.decode reads one)"),
    ("has_score_mod", False, "no score_mod"),
    ("has_score_mod_bprop", False, "no score_mod_bprop"),
    ("return_max_logit", False, "return_max_logit=False"),
    ("num_splits", 1, "num_splits=1"),
    ("has_leftpad_kv", False, "no left padding"),
    (
        "has_host_lengths",
        True,
        "lengths known to the host (DecodeLengths(host_lengths, ...), no --no-host-lengths)",
    ),
    ("has_aligned_rows", True, "cache rows that start on 16-byte boundaries"),
    ("has_joined_rows", True, "c_kv and k_rope as columns of one tensor"),
    ("page_size", 64, "a cache in pages of 64 (page_table=...)"),
    ("seqlen_q", 1, "one query token"),
)
"""An attribute of a request, the value that most backends accept, and its text."""


def _with_request(**changes: Any) -> Callable[[Situation], Situation]:
    def apply(situation: Situation) -> Situation:
        request = situation.request
        if "window_size" in changes and isinstance(request, AttentionRequest) and request.is_causal:
            return situation._replace(request=request.replace(**(changes | {"window_size": (-1, 0)})))
        return situation._replace(request=request.replace(**changes))

    return apply


def of_request(situation: Situation) -> Iterator[Change]:
    """Every change that makes the request plainer; head dims and sizes belong to the model and stay."""
    request = situation.request
    for name, plain, words in _PLAIN:
        if getattr(request, name, plain) == plain or (name == "page_size" and isinstance(request, AttentionRequest)):
            continue
        if name == "window_size" and not getattr(request, "has_sliding_window", False):
            continue
        yield Change("request", words, _with_request(**{name: plain}))
    if not isinstance(request, AttentionRequest):
        return
    if request.bias_type != "no_bias":
        without = {"bias_type": "no_bias", "bias_shape": None, "bias_requires_grad": False}
        yield Change("request", "no additive bias", _with_request(**without))
    if request.attn_mask_type == "arbitrary":
        words = "a mask given by causality, windows or lengths, such as attn_mask_type='causal'"
        yield Change("request", words, _with_request(attn_mask_type="causal"))
    if request.num_kv_heads != request.num_heads:
        words = "as many key-value heads as query heads"
        yield Change("request", words, _with_request(num_kv_heads=request.num_heads))
    if request.max_seqlen_kv != request.max_seqlen_q and request.max_seqlen_q > 1:
        words = "as many keys as queries"
        yield Change("request", words, _with_request(max_seqlen_kv=request.max_seqlen_q))


def of_layout(situation: Situation) -> Iterator[Change]:
    """Other layouts of the same tokens: packed, or dense without padding."""
    request = situation.request
    if not isinstance(request, AttentionRequest):
        return
    if not request.layout.is_packed and request.attn_mask_type != "arbitrary":
        words = "packed sequences (qkv_format='thd')"
        yield Change("request", words, _with_request(qkv_format="thd"))
    if request.has_padding:
        mask = request.attn_mask_type.removeprefix("padding").removeprefix("_") or "no_mask"
        layout = "bshd" if request.layout.is_packed else request.qkv_format
        words = f"a dense batch without padding (qkv_format={layout!r}, attn_mask_type={mask!r})"
        dense = {"qkv_format": layout, "attn_mask_type": mask, "pad_between_seqs": False, "lengths_may_differ": False}
        yield Change("request", words, _with_request(**dense))


def of_device(capability: tuple[int, int], situation: Situation) -> Change:
    """Another GPU."""
    major, minor = capability
    text = f"a GPU of compute capability {major}.{minor} ({GPUS[capability]})"
    kept = situation.platform

    def apply(s: Situation) -> Situation:
        platform = dataclasses.replace(
            s.platform,
            device_type="cuda",
            compute_capability=capability,
            cuda_version=kept.cuda_version or CUDA,
            cudnn_version=s.platform.cudnn_version or CUDNN,
            shared_memory_per_block=None,
            multi_processor_count=None,
            device_name=None,
            tools=s.platform.tools - {"triton-interpreter"},
        )
        return s._replace(request=s.request.replace(device_type="cuda", device_index=None), platform=platform)

    return Change("device", text, apply)
