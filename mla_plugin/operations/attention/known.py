"""A cache of everything that equal calls share: their request, the decision, the shapes of the results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mla_plugin import environment
from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.checks import records_gradients
from mla_plugin.arguments.layout import lse_dtype
from mla_plugin.arguments.options import CallOptions
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, Plan, kind_of, request_of
from mla_plugin.hooks.manager import get_manager
from mla_plugin.resolver.asking import check_backend_is_registered
from mla_plugin.resolver.attention import resolve

_MAX_KNOWN = 4096


class Known(NamedTuple):
    """Everything that equal calls share, cached.

    Attributes:
        request: of the calls.
        softmax_scale: of ``AttentionTensors``.
        backend: the backend requested by name.
        plan: the decision; None for a call without queries, keys or sequences, which no backend sees.
        out_shape, lse_shape, lse_dtype: of the results.
        has_contiguous_rows: the last dimension of q, k and v is contiguous.
        forward: the hook of a built-in backend without wrappers, None for others; the conformance suite tests the
            built-in ones, so their results are not checked in every call.
        is_backward_ours: the gradients come from such a backend.
        generation: of the set of plugins for which that holds; a wrapper may be registered before the backward.
        kept: what backends keep for these calls, see ``AttentionTensors.kept``.
    """

    request: AttentionRequest
    softmax_scale: float
    backend: str | None
    plan: Plan | None
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    lse_dtype: torch.dtype
    has_contiguous_rows: bool
    forward: Callable[..., AttentionOutput] | None
    is_backward_ours: bool
    generation: int
    kept: dict[str, Any]


_known: dict[tuple[Any, ...], Known] = {}


def known_of(tensors: AttentionTensors, given: CallOptions | AttentionRequest, backend: str | None) -> Known:
    """The cached ``Known`` of a call; a call like an earlier one is neither checked nor decided again.

    A changed environment variable or set of backends takes effect at the next call.

    Args:
        tensors: of the call.
        given: the call's options, or a request that was made from these tensors.
        backend: use this backend and no other.

    Raises:
        ValueError, TypeError: an argument is invalid, or the request does not fit these tensors; the message says what
            was given and what is expected.
        NoBackendError: no backend takes the request; the message lists every backend with every reason.
    """
    try:
        key = _key(tensors, given, backend)
        known = _known.get(key)
    except (TypeError, RuntimeError, AttributeError):  # no tensor, no shape, symbolic sizes, a list as an option
        return _decide(tensors, given, backend)
    if known is None:
        known = _decide(tensors, given, backend)
        keep(key, known)
    return known


def keep(key: tuple[Any, ...], known: Known) -> None:
    """Cache ``known`` for the calls with this key."""
    if len(_known) >= _MAX_KNOWN:
        _known.clear()
    _known[key] = known


def plain_known_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: object, given: CallOptions, backend: str | None
) -> tuple[tuple[Any, ...] | None, Known | None]:
    """A faster ``known_of`` for eager calls with no other tensors, looked up by the unprocessed arguments.

    Args:
        q, k, v: of the call; no tensor subclasses.
        softmax_scale: as the caller gave it.
        given: the other options, without a window.
        backend: use this backend and no other.

    Returns:
        the key for ``keep``, None if the call has none; and the cached entry, None if ``known_of`` has to be called.
    """
    try:
        key = (  # of the same facts as ``_key``
            given,
            tuple(map(type, given)),
            softmax_scale,
            type(softmax_scale),
            backend,
            q.shape,
            q.stride(),
            q.dtype,
            q.device,
            q.layout,
            k.shape,
            k.stride(),
            k.dtype,
            k.device,
            k.layout,
            v.shape,
            v.stride(),
            v.dtype,
            v.device,
            v.layout,
            records_gradients() and (q.requires_grad or k.requires_grad or v.requires_grad),
            torch._C._get_deterministic_algorithms(),
            environment.gates(),
            get_manager().generation,
        )
        return key, _known.get(key)
    except (TypeError, RuntimeError):  # a sparse or nested tensor, a list as an option
        return None, None


def _key(tensors: AttentionTensors, given: CallOptions | AttentionRequest, backend: str | None) -> tuple[Any, ...]:
    """Everything that ``_decide`` depends on: True, 1 and 1.0 are equal as keys and not as options."""
    if isinstance(given, AttentionRequest):
        facts: tuple[Any, ...] = (given.has_padding and tensors.lengths_may_differ,)
    else:
        bias, window = tensors.bias, given.window_size
        facts = (
            tuple(map(type, given)),
            None if window is None else tuple(map(type, window)),
            tensors.needs_gradient,
            tensors.cu_seqlens_q is not None and (tensors.pads_between_sequences, tensors.lengths_may_differ),
            bias is not None and bias.requires_grad,
        )
    return (
        given,
        backend,
        facts,
        kind_of(tensors),
        tensors.q.stride(),
        tensors.k.stride(),
        tensors.v.stride(),
        torch._C._get_deterministic_algorithms(),
        environment.gates(),
        get_manager().generation,
    )


def _decide(tensors: AttentionTensors, given: CallOptions | AttentionRequest, backend: str | None) -> Known:
    manager = get_manager()
    generation = manager.generation
    request = request_for(tensors, given)
    q = tensors.q
    if not request.batch_size or q.numel() == 0 or tensors.k.numel() == 0:
        check_backend_is_registered(backend)
        plan = None
    else:
        plan = resolve(request, backend=backend)
    is_ours = plan is not None and manager.is_ours(plan.forward_backend)
    return Known(
        request,
        tensors.softmax_scale,
        backend,
        plan,
        out_shape=(*q.shape[:-1], request.head_dim_v),
        lse_shape=request.layout.lse_shape(q.shape),
        lse_dtype=lse_dtype(q.dtype),
        has_contiguous_rows=q.stride(-1) == tensors.k.stride(-1) == tensors.v.stride(-1) == 1,
        forward=manager.caller("forward", plan.forward_backend) if plan is not None and is_ours else None,
        is_backward_ours=plan is not None and manager.is_ours(plan.backward_backend),
        generation=generation,
        kept={},
    )


def request_for(tensors: AttentionTensors, given: CallOptions | AttentionRequest) -> AttentionRequest:
    """The checked request of a call; arguments and errors as ``known_of``."""
    if isinstance(given, CallOptions):
        return request_of(tensors, given.completed(tensors))
    lengths_differ = given.has_padding and tensors.lengths_may_differ and not given.lengths_may_differ
    if lengths_differ or request_of(tensors, options_of(given)) != given:
        raise ValueError(
            f"{given} is not what AttentionRequest.of returns for these tensors; make the request from them, and leave "
            "what attention() has no argument for at its default"
        )
    return given


def options_of(request: AttentionRequest) -> CallOptions:
    """The options of a request, as the operator takes them."""
    return CallOptions(**{name: getattr(request, name) for name in CallOptions._fields})
