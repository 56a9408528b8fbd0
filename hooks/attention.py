"""Attention over expanded keys and values: the request that backends answer, the plan and the results.

All classes are frozen. A request describes a call without its tensors, so it is hashable and a decision about it can
be cached. Names and mask spellings are TransformerEngine's.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, fields, replace
from typing import Any, get_type_hints

import torch

from mla_plugin.arguments import attention as checks
from mla_plugin.arguments.attention import BIAS_TYPES, AttentionTensors
from mla_plugin.arguments.checks import check_choice, check_device_type, check_number, check_softmax_scale
from mla_plugin.arguments.layout import LAYOUTS, Layout
from mla_plugin.arguments.mask import Band, canonical_mask
from mla_plugin.arguments.options import HOSTS, CallOptions
from mla_plugin.hooks.types import Platform, TraceEntry

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
CP_COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")

_LEAST = {"batch_size": 0, "max_seqlen_q": 0, "max_seqlen_kv": 0} | dict.fromkeys(
    ("num_heads", "num_kv_heads", "head_dim_qk", "head_dim_v"), 1
)
"""The smallest number that an attribute of a request may have; below it backends would divide by zero."""

_CHOICES = {
    "qkv_format": tuple(LAYOUTS),
    "bias_type": BIAS_TYPES,
    "softmax_type": SOFTMAX_TYPES,
    "cp_comm_type": CP_COMM_TYPES,
    "host": HOSTS,
}
_MAX_REQUESTS = 4096


@dataclass(frozen=True)
class AttentionRequest:
    """One attention call over expanded K and V, without its tensors: checked and in canonical form.

    ``AttentionRequest.of`` builds it from tensors; one built by hand is checked and normalised in the same way. A
    causal mask closes the right side of the window and fixes the diagonal, a window (-1, 0) without a causal mask
    becomes a causal mask, and with ``thd`` masks become their padding forms.

    Attributes:
        qkv_format: memory layout of q, k, v and out: ``bshd``, ``sbhd``, ``bhsd`` or ``thd`` (packed, [T, H, D]).
        dtype: dtype of q, k and v.
        device_type: ``"cpu"`` or ``"cuda"``.
        device_index: CUDA device ordinal; None for the current device or for the CPU.
        batch_size: number of sequences; for ``thd`` it is ``len(cu_seqlens_q) - 1``.
        num_heads, num_kv_heads: query heads and key/value heads; the first is a multiple of the second.
        max_seqlen_q, max_seqlen_kv: longest sequence of the batch, in tokens.
        head_dim_qk, head_dim_v: head dimensions that a kernel sees (DeepSeek-V3: 192 and 128).
        attn_mask_type: one of ``ATTN_MASK_TYPES``. ``causal`` is aligned top-left.
        window_size: (left, right) tokens around the diagonal that a query sees; -1 means unlimited.
        bottom_right_diagonal: True when the diagonal of a causal mask or a window ends at the last query and last key.
            None, the default: as the mask says, and True for masks that do not say.
        pad_between_seqs: ``thd`` only: padded offsets differ from the true lengths.
        lengths_may_differ: a sequence may have different numbers of queries and keys; False when one tensor of offsets
            is used for both. Needed for kernels that support only one alignment of the diagonal.
        bias_type, bias_shape, bias_requires_grad: additive bias; the shape broadcasts to [B, H, S_q, S_kv].
        dropout_p: dropout probability applied in this call (0.0 in evaluation).
        is_training: a backward will follow.
        deterministic: two runs of the backward must agree bit for bit.
        return_lse: the caller wants the log-sum-exp.
        batch_invariant: as in ``mla_plugin.attention``; a backend that does not guarantee it refuses.
        host: the calling framework; some rules differ between hosts.
        partial: the keys are only some of those that the queries see, as in context parallelism: outputs are merged by
            their lse, and the backward gets the out and lse over all keys and must use both. A backend whose backward
            recomputes the softmax refuses. ``return_lse`` still says whether lse may have a gradient.

    The remaining attributes let a host describe every call that TransformerEngine's selection distinguishes.

    Raises:
        ValueError, TypeError: an attribute is invalid; the message says what was given and what is expected.
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
    bottom_right_diagonal: bool | None = None
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
    partial: bool = False
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        self._check()
        mask, window, bottom_right = canonical_mask(
            self.attn_mask_type, self.window_size, self.bottom_right_diagonal, is_packed=self.layout.is_packed
        )
        object.__setattr__(self, "attn_mask_type", mask)
        object.__setattr__(self, "window_size", window)
        object.__setattr__(self, "bottom_right_diagonal", bottom_right)

    def _check(self) -> None:
        for name, accepted in _CHOICES.items():
            check_choice(name, getattr(self, name), accepted)
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"dtype={self.dtype!r}; expected a torch.dtype")
        check_device_type(self.device_type)
        for name, least in _LEAST.items():
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, (int, torch.SymInt)):
                raise TypeError(f"{name}={given!r}; expected an int")
            if given < least:
                raise ValueError(f"{name}={given}; expected at least {least}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}; the first must be a multiple of the "
                "second"
            )
        _check_flags(self)
        check_number("dropout_p", self.dropout_p)
        if not 0.0 <= self.dropout_p < 1.0:
            raise ValueError(f"dropout_p={self.dropout_p}; expected 0 <= dropout_p < 1")

    @classmethod
    def of(cls, tensors: AttentionTensors, **options: Any) -> AttentionRequest:
        """Build the request of a call; all checks are done here, once, for every host.

        Args:
            tensors: of the call; they give shapes, dtype and device.
            **options: those of ``CallOptions``; ``torch.use_deterministic_algorithms`` makes the request deterministic
                too.

        Returns:
            a request; the same object for calls of the same kind.

        Raises:
            ValueError, TypeError: an argument is invalid; the message says what was given and what is expected.
        """
        unknown = ", ".join(sorted(options.keys() - set(CallOptions._fields)))
        if unknown:
            raise TypeError(f"{unknown}: not an option of a request; expected one of {', '.join(CallOptions._fields)}")
        return request_of(tensors, CallOptions(**options).completed(tensors))

    @functools.cached_property
    def band(self) -> Band:
        """Which keys a query sees, not counting lengths and ``arbitrary`` masks."""
        return Band(*self.window_size, bool(self.bottom_right_diagonal))

    @functools.cached_property
    def layout(self) -> Layout:
        """The axes of q, k, v and out."""
        return LAYOUTS[self.qkv_format]

    @functools.cached_property
    def is_causal(self) -> bool:
        """True when no query sees a key beyond the diagonal."""
        return self.band.is_causal

    @functools.cached_property
    def has_padding(self) -> bool:
        """True when sequence lengths differ from the tensors' extent."""
        return "padding" in self.attn_mask_type

    @property
    def has_sliding_window(self) -> bool:
        """True when the window removes more than a causal mask does."""
        return self.band.has_window

    @functools.cached_property
    def every_query_sees_a_key(self) -> bool:
        """True if shapes, or equal lengths of queries and keys, guarantee it; padded rows do not count as queries."""
        if self.has_padding:
            return not self.lengths_may_differ
        if self.attn_mask_type == "arbitrary":
            return False
        return self.band.shows_every_query_a_key(self.max_seqlen_q, self.max_seqlen_kv)

    def replace(self, **changes: Any) -> AttentionRequest:
        """A copy with some attributes changed; a new mask also resets the window's right side and the diagonal."""
        if "attn_mask_type" in changes:
            if "causal" in self.attn_mask_type:
                changes.setdefault("window_size", (self.window_size[0], -1))
            changes.setdefault("bottom_right_diagonal", None)
        return replace(self, **changes)

    def __hash__(self) -> int:
        """The hash of the attributes, computed once: a request is looked up at every call."""
        value: int | None = self.__dict__.get("_hash")
        if value is None:
            value = hash(_values(self))
            object.__setattr__(self, "_hash", value)
        return value

    def __getstate__(self) -> dict[str, Any]:
        """Only the attributes: the cached hash is invalid in another process, where strings hash differently."""
        return {name: getattr(self, name) for name in _FIELDS}


_FIELDS = tuple(field.name for field in fields(AttentionRequest))
_FLAGS = tuple(name for name, kind in get_type_hints(AttentionRequest).items() if kind is bool)
_values = operator.attrgetter(*_FIELDS)

_requests: dict[tuple[Any, ...], AttentionRequest] = {}


def request_of(tensors: AttentionTensors, options: CallOptions) -> AttentionRequest:
    """The request of tensors and completed options; looked up if calls of this kind were checked before."""
    try:
        key = (kind_of(tensors), options, tuple(map(type, options)), torch.are_deterministic_algorithms_enabled())
        request = _requests.get(key)
    except (TypeError, RuntimeError, AttributeError):  # no tensor, no shape, symbolic sizes, a list as an option
        return _checked_request(tensors, options)
    if request is None:
        request = _checked_request(tensors, options)
        if len(_requests) >= _MAX_REQUESTS:
            _requests.clear()
        _requests[key] = request
    return request


_optional = operator.attrgetter(*checks.LENGTHS, "attention_mask", "bias")


def kind_of(tensors: AttentionTensors) -> tuple[Any, ...]:
    """Everything that a request and its checks depend on: each tensor's class, shape, dtype, device and softmax_scale.

    Values, addresses and strides of tensors are not part of it.
    """
    q, k, v, scale = tensors.q, tensors.k, tensors.v, tensors.softmax_scale
    cu_q, cu_kv, padded_q, padded_kv, mask, bias = rest = _optional(tensors)
    others = None
    if not (cu_q is cu_kv is padded_q is padded_kv is mask is bias is None):
        others = tuple([None if x is None else (type(x), x.shape, x.dtype, x.device, x.layout) for x in rest])
    return (  # one by one: unpacking would make lists
        type(q),
        q.shape,
        q.dtype,
        q.device,
        q.layout,
        type(k),
        k.shape,
        k.dtype,
        k.device,
        k.layout,
        type(v),
        v.shape,
        v.dtype,
        v.device,
        v.layout,
        others,
        type(tensors.dropout_seed),
        type(scale),
        scale,
    )


def _checked_request(tensors: AttentionTensors, options: CallOptions) -> AttentionRequest:
    given = options
    checks.check_types(tensors)
    check_softmax_scale(tensors.softmax_scale)
    _check_flags(options)
    check_choice("qkv_format", given.qkv_format, LAYOUTS)
    layout = LAYOUTS[given.qkv_format]
    checks.check_shapes(tensors, layout)
    mask, window, bottom_right = canonical_mask(
        given.attn_mask_type, given.window_size, given.bottom_right_diagonal, is_packed=layout.is_packed
    )
    checks.check_lengths(tensors, layout, mask)
    checks.check_mask_and_bias(tensors, layout, mask, given.bias_type)
    if given.pad_between_seqs and tensors.cu_seqlens_q_padded is None:
        raise ValueError("pad_between_seqs=True needs cu_seqlens_q_padded and cu_seqlens_kv_padded; none was given")
    (batch, heads, seqlen_q), (_, kv_heads, seqlen_kv) = layout.pick(tensors.q.shape), layout.pick(tensors.k.shape)
    if layout.is_packed and tensors.cu_seqlens_q is not None:
        batch = tensors.cu_seqlens_q.shape[0] - 1
    return AttentionRequest(
        qkv_format=given.qkv_format,
        dtype=tensors.q.dtype,
        device_type=tensors.q.device.type,
        device_index=tensors.q.device.index,
        batch_size=batch,
        num_heads=heads,
        num_kv_heads=kv_heads,
        max_seqlen_q=checks.longest_sequence("max_seqlen_q", given.max_seqlen_q, seqlen_q, layout, mask),
        max_seqlen_kv=checks.longest_sequence("max_seqlen_kv", given.max_seqlen_kv, seqlen_kv, layout, mask),
        head_dim_qk=tensors.q.shape[-1],
        head_dim_v=tensors.v.shape[-1],
        attn_mask_type=mask,
        window_size=window,
        bottom_right_diagonal=bottom_right,
        pad_between_seqs=bool(given.pad_between_seqs),
        bias_type=given.bias_type,
        bias_shape=checks.bias_shape(tensors.bias),
        bias_requires_grad=bool(given.bias_requires_grad),
        dropout_p=given.dropout_p,
        is_training=bool(given.is_training),
        deterministic=given.deterministic or torch.are_deterministic_algorithms_enabled(),
        return_lse=given.return_lse,
        host=given.host,
        lengths_may_differ=bool(given.lengths_may_differ),
        partial=given.partial,
        batch_invariant=given.batch_invariant,
    )


def _check_flags(given: AttentionRequest | CallOptions) -> None:
    for name in _FLAGS:
        value = getattr(given, name, False)
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r}; expected True or False")


@dataclass(frozen=True)
class Plan:
    """The decision for one request: which backend runs the forward, and which the backward."""

    request: AttentionRequest
    platform: Platform
    forward_backend: str
    backward_backend: str
    trace: tuple[TraceEntry, ...] = ()


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
    """Inputs of a backward: the forward's inputs and outputs, whichever backend computed them."""

    tensors: AttentionTensors
    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class Gradients:
    """Gradients of q, k, v (same shapes and dtypes), and of the bias if the request asks for it.

    Each of q, k and v gets its gradient, also if it does not require one.
    """

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dbias: torch.Tensor | None = None
