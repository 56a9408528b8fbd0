"""The values that travel between hosts, the resolver and the backends.

Everything here is frozen. A request describes a call without its tensors, so it is hashable and a decision about it can
be cached. Names and mask spellings are TransformerEngine's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

QKV_FORMATS = ("bshd", "sbhd", "bhsd", "thd")
ATTN_MASK_TYPES = (
    "no_mask",
    "causal",
    "causal_bottom_right",
    "padding",
    "padding_causal",
    "padding_causal_bottom_right",
    "arbitrary",
)
BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
CP_COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")

_LEAST = {"batch_size": 0, "max_seqlen_q": 0, "max_seqlen_kv": 0} | dict.fromkeys(
    ("num_heads", "num_kv_heads", "head_dim_qk", "head_dim_v"), 1
)
"""The smallest number that an attribute of a request may have; below it backends would divide by zero."""

HOSTS = ("direct", "transformer_engine", "transformers", "vllm", "sglang", "megatron")


@dataclass(frozen=True)
class AttentionRequest:
    """One attention call over expanded K and V, without its tensors.

    Attributes:
        qkv_format: memory layout of q, k, v and out: ``bshd``, ``sbhd``, ``bhsd`` or ``thd`` (packed, [T, H, D]).
        dtype: dtype of q, k and v.
        device_type: ``"cpu"`` or ``"cuda"``.
        device_index: CUDA device ordinal; None for the current device or for the CPU.
        batch_size: number of sequences; for ``thd`` it is ``len(cu_seqlens_q) - 1``.
        num_heads, num_kv_heads: query heads and key/value heads; the first is a multiple of the second.
        max_seqlen_q, max_seqlen_kv: longest sequence of the batch, in tokens.
        head_dim_qk, head_dim_v: what a kernel sees (DeepSeek-V3: 192 and 128).
        attn_mask_type: one of ``ATTN_MASK_TYPES``. ``causal`` is aligned top-left.
        window_size: (left, right) tokens around the diagonal that a query sees; -1 means unlimited.
        bottom_right_diagonal: True when the diagonal of a causal mask or a window ends at the last query and last key.
        pad_between_seqs: ``thd`` only: padded offsets differ from the true lengths.
        lengths_may_differ: nothing says that each sequence has as many queries as keys; False when one tensor of
            offsets serves both. Kernels that know one alignment of the diagonal need it.
        bias_type, bias_shape, bias_requires_grad: additive bias; the shape broadcasts to [B, H, S_q, S_kv].
        dropout_p: dropout probability applied in this call (0.0 in evaluation).
        is_training: a backward will follow.
        deterministic: two runs of the backward must agree bit for bit.
        return_lse: the caller wants the log-sum-exp.
        host: who asks; some rules differ between hosts.

    The remaining attributes exist so that a host can describe every call that TransformerEngine's selection knows.
    """

    qkv_format: str
    dtype: torch.dtype
    device_type: str
    batch_size: int
    num_heads: int
    num_kv_heads: int
    max_seqlen_q: int
    max_seqlen_kv: int
    head_dim_qk: int
    head_dim_v: int
    attn_mask_type: str = "no_mask"
    window_size: tuple[int, int] = (-1, -1)
    bottom_right_diagonal: bool = True
    pad_between_seqs: bool = False
    bias_type: str = "no_bias"
    bias_shape: str | None = None
    bias_requires_grad: bool = False
    dropout_p: float = 0.0
    is_training: bool = False
    deterministic: bool = False
    return_lse: bool = False
    device_index: int | None = None
    host: str = "direct"
    qkv_layout: str | None = None
    softmax_type: str = "vanilla"
    return_max_logit: bool = False
    num_splits: int = 1
    cuda_graph: bool = False
    checkpoint_core_attention: bool = False
    has_score_mod: bool = False
    has_score_mod_bprop: bool = False
    fp8: bool = False
    has_kv_cache: bool = False
    page_size: int | None = None
    context_parallel: bool = False
    cp_comm_type: str = "p2p"
    cp_size: int = 1
    lengths_may_differ: bool = False

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}; at least {least} is needed")

    def __hash__(self) -> int:
        """The hash of the attributes, computed once: a request is looked up at every call."""
        value: int | None = self.__dict__.get("_hash")
        if value is None:
            value = hash(tuple(self.__dict__.values()))
            object.__setattr__(self, "_hash", value)
        return value

    @property
    def is_causal(self) -> bool:
        """True when no query sees a key beyond the diagonal."""
        return "causal" in self.attn_mask_type or self.window_size[1] == 0

    @property
    def has_padding(self) -> bool:
        """True when sequence lengths differ from the tensors' extent."""
        return "padding" in self.attn_mask_type

    @property
    def has_sliding_window(self) -> bool:
        """True when the window removes more than a causal mask does."""
        return self.window_size[0] != -1 or self.window_size[1] not in (-1, 0)

    def replace(self, **changes: object) -> AttentionRequest:
        """A copy with some attributes changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Platform:
    """What a decision depends on besides the request: one device and the installed packages.

    Attributes:
        device_type: ``"cpu"`` or ``"cuda"``.
        compute_capability: (major, minor); None on the CPU.
        packages: (distribution name, version) pairs of the installed packages that matter, sorted by name.
        cudnn_version: cuDNN that PyTorch loads, as (major, minor, patch); None without cuDNN.
        cuda_version: CUDA toolkit that PyTorch was built with, such as ``"13.0"``; None for a CPU build.
        shared_memory_per_block: largest opt-in shared memory of one thread block, in bytes; None on the CPU.
        multi_processor_count: number of SMs; None on the CPU.
        tools: build tools found on the PATH (``nvcc``, ``ninja``); ``triton-interpreter`` when Triton runs on the CPU.
    """

    device_type: str = "cpu"
    compute_capability: tuple[int, int] | None = None
    packages: tuple[tuple[str, str], ...] = ()
    cudnn_version: tuple[int, int, int] | None = None
    cuda_version: str | None = None
    shared_memory_per_block: int | None = None
    multi_processor_count: int | None = None
    tools: frozenset[str] = field(default_factory=frozenset)

    def version(self, distribution: str) -> str | None:
        """Version of an installed distribution, or None."""
        return dict(self.packages).get(distribution)


@dataclass(frozen=True)
class Accepted:
    """A backend takes the request.

    Attributes:
        priority: for backends of other packages. 0 (the default) places the backend after the built-in fused backends
            and before the unfused fallback; a positive number before every built-in, higher numbers first; a negative
            number after everything else. Built-in backends are ordered by the resolver, which ignores their priority.
        backward_by: name of the backend that runs the backward; None for the accepting backend itself.
        notes: facts worth showing in ``explain``, such as the kernel that will run.
    """

    priority: int = 0
    backward_by: str | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.priority, int):
            raise TypeError(f"priority={self.priority!r}; an integer is needed, 0 for the usual place")


@dataclass(frozen=True)
class Refused:
    """A backend does not take the request; every reason gives the value found and the limit."""

    reasons: tuple[str, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.reasons, tuple):
            raise TypeError(f"reasons={self.reasons!r}; a tuple of texts is needed: Refused((reason,))")
        if not self.reasons:
            raise ValueError("Refused needs at least one reason: say what was found and what is accepted")


@dataclass(frozen=True)
class TraceEntry:
    """One line of a decision: which backend, whether it can run, and why (not)."""

    backend: str
    accepted: bool
    layer: Literal["environment", "cascade", "backend", "host"]
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A decision: which backend runs the forward and which the backward of one request."""

    request: AttentionRequest
    platform: Platform
    forward_backend: str
    backward_backend: str
    trace: tuple[TraceEntry, ...] = ()


@dataclass(frozen=True)
class AttentionTensors:
    """The tensors of one call.

    Attributes:
        q: [..., H, head_dim_qk], leading dimensions by the request's ``qkv_format``.
        k: [..., H_kv, head_dim_qk].
        v: [..., H_kv, head_dim_v].
        softmax_scale: multiplies q @ k.T before the softmax.
        cu_seqlens_q, cu_seqlens_kv: int32 [B + 1], cumulative true lengths; padding masks and ``thd``.
        cu_seqlens_q_padded, cu_seqlens_kv_padded: int32 [B + 1], where each sequence starts in memory; ``thd`` only.
        attention_mask: bool, broadcastable to [B, H, S_q, S_kv], True = masked out; mask type ``arbitrary`` only.
        bias: additive, broadcastable to [B, H, S_q, S_kv].
        dropout_seed: int64 [1] on the CPU; two passes with the same seed drop the same weights.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    softmax_scale: float
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    cu_seqlens_q_padded: torch.Tensor | None = None
    cu_seqlens_kv_padded: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    dropout_seed: torch.Tensor | None = None


@dataclass(frozen=True)
class AttentionOutput:
    """What a forward returns.

    Attributes:
        out: (*q.shape[:-1], head_dim_v), dtype of q; a row that sees no key is 0.
        lse: natural-log log-sum-exp of the scaled, masked scores, [B, H, S_q] or [H, T] for ``thd``; float32
            (float64 for float64 inputs); -inf for a row that sees no key.
    """

    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class Residuals:
    """What a backward gets: the forward's inputs and outputs, whichever backend computed them."""

    tensors: AttentionTensors
    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class Gradients:
    """Gradients of q, k, v (their shapes and dtypes) and of the bias when the request asks for it."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dbias: torch.Tensor | None = None


class NoBackendError(RuntimeError):
    """No backend takes the request. ``trace`` holds every backend with every reason."""

    def __init__(self, message: str, trace: tuple[TraceEntry, ...] = ()) -> None:
        super().__init__(message)
        self.trace = trace


class Registration:
    """What ``mla_plugin.register`` did to a host, and the way back.

    Attributes:
        host: the host's name.
    """

    def __init__(self, host: str, undo: Callable[[], None]) -> None:
        self.host = host
        self._undo: Callable[[], None] | None = undo

    def uninstall(self) -> None:
        """Give the host back what was its own; calling it again does nothing."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()
