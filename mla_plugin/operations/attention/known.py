"""What is known of calls that are alike: their request, the decision and what comes out, found by one lookup."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from mla_plugin import environment
from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.layout import lse_dtype
from mla_plugin.arguments.options import CallOptions
from mla_plugin.hooks.attention import AttentionRequest, Plan, kind_of, request_of
from mla_plugin.hooks.manager import get_manager
from mla_plugin.resolver.asking import check_backend_is_registered
from mla_plugin.resolver.attention import resolve

_MAX_KNOWN = 4096


class Known(NamedTuple):
    """What calls that are alike share.

    Attributes:
        request: what they ask.
        softmax_scale: of ``AttentionTensors``.
        backend: the backend asked for by name.
        plan: the decision; None for a call without queries or keys, which no backend sees.
        out_shape, lse_shape, lse_dtype: of the results.
        has_contiguous_rows: the last dimension of q, k and v is contiguous.
        is_forward_ours, is_backward_ours: the results come from a built-in backend alone, which the conformance suite
            holds to the contract, so that no call has to.
        generation: of the registered plugins, for which that was found; a wrapper may come before the backward.
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
    is_forward_ours: bool
    is_backward_ours: bool
    generation: int
    kept: dict[str, Any]


_known: dict[tuple[Any, ...], Known] = {}


def known_of(tensors: AttentionTensors, said: CallOptions | AttentionRequest, backend: str | None) -> Known:
    """What is known of a call; one that is like an earlier call is neither checked nor decided again.

    A variable of the environment that changes, or a backend that comes or goes, takes effect at the next call.

    Args:
        tensors: of the call.
        said: what the caller says beside them, or a request that was made of them.
        backend: use this backend and no other.

    Raises:
        ValueError, TypeError: an argument is invalid, or the request is not of these tensors; the message says what was
            given and what is accepted.
        NoBackendError: no backend takes the request; the message lists every backend with every reason.
    """
    try:
        key = _key(tensors, said, backend)
        known = _known.get(key)
    except (TypeError, RuntimeError, AttributeError):  # no tensor, no shape, symbolic sizes, a list as an option
        return _decide(tensors, said, backend)
    if known is None:
        known = _decide(tensors, said, backend)
        keep(key, known)
    return known


def keep(key: tuple[Any, ...], known: Known) -> None:
    """Remember what is known of the calls with this key."""
    if len(_known) >= _MAX_KNOWN:
        _known.clear()
    _known[key] = known


def plain_known_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: object, said: CallOptions, backend: str | None
) -> tuple[tuple[Any, ...] | None, Known | None]:
    """What is known of an eager call without other tensors, by its arguments as they are: faster than ``known_of``.

    Args:
        q, k, v: of the call, no subclass of a tensor.
        softmax_scale: as the caller gave it.
        said: what the caller says besides, without a window.
        backend: use this backend and no other.

    Returns:
        the key to ``keep`` it under, None where there is none; and what is known, None where ``known_of`` has to say.
    """
    try:
        key = (  # of the same facts as ``_key``
            said,
            tuple(map(type, said)),
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
            torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
            torch._C._get_deterministic_algorithms(),
            environment.gates(),
            get_manager().generation,
        )
        return key, _known.get(key)
    except (TypeError, RuntimeError):  # a sparse or nested tensor, a list as an option
        return None, None


def _key(tensors: AttentionTensors, said: CallOptions | AttentionRequest, backend: str | None) -> tuple[Any, ...]:
    """Everything that ``_decide`` depends on: True, 1 and 1.0 are equal as keys and not as options."""
    if isinstance(said, AttentionRequest):
        facts: tuple[Any, ...] = (said.has_padding and tensors.lengths_may_differ,)
    else:
        bias, window = tensors.bias, said.window_size
        facts = (
            tuple(map(type, said)),
            None if window is None else tuple(map(type, window)),
            tensors.needs_gradient,
            tensors.cu_seqlens_q is not None and (tensors.pads_between_sequences, tensors.lengths_may_differ),
            bias is not None and bias.requires_grad,
        )
    return (
        said,
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


def _decide(tensors: AttentionTensors, said: CallOptions | AttentionRequest, backend: str | None) -> Known:
    manager = get_manager()
    generation = manager.generation
    request = request_for(tensors, said)
    q = tensors.q
    if q.numel() == 0 or tensors.k.numel() == 0:
        check_backend_is_registered(backend)
        plan = None
    else:
        plan = resolve(request, backend=backend)
    return Known(
        request,
        tensors.softmax_scale,
        backend,
        plan,
        out_shape=(*q.shape[:-1], request.head_dim_v),
        lse_shape=request.layout.lse_shape(q.shape),
        lse_dtype=lse_dtype(q.dtype),
        has_contiguous_rows=q.stride(-1) == tensors.k.stride(-1) == tensors.v.stride(-1) == 1,
        is_forward_ours=plan is not None and manager.is_ours(plan.forward_backend),
        is_backward_ours=plan is not None and manager.is_ours(plan.backward_backend),
        generation=generation,
        kept={},
    )


def request_for(tensors: AttentionTensors, said: CallOptions | AttentionRequest) -> AttentionRequest:
    """The checked request of a call; arguments and errors as ``known_of``."""
    if isinstance(said, CallOptions):
        return request_of(tensors, said.completed(tensors))
    lengths_differ = said.has_padding and tensors.lengths_may_differ and not said.lengths_may_differ
    if lengths_differ or request_of(tensors, options_of(said)) != said:
        raise ValueError(
            f"{said} is not what AttentionRequest.of makes of these tensors; make the request of them, and leave what "
            "attention() has no argument for at its default"
        )
    return said


def options_of(request: AttentionRequest) -> CallOptions:
    """What a request says beside the tensors, as the operator takes it."""
    return CallOptions(**{name: getattr(request, name) for name in CallOptions._fields})
