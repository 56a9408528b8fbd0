"""One pass of a context-parallel call: checks, agreement with the other ranks, the communication, and failures."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mla_plugin.arguments.attention import LENGTHS, AttentionTensors
from mla_plugin.arguments.options import CallOptions
from mla_plugin.context_parallel.agreement import NO_VALUES, Fingerprint, Values, fingerprint_of
from mla_plugin.context_parallel.call import Backward, Call, Forward, Saved
from mla_plugin.context_parallel.checks import WAYS, check_values, checked_request
from mla_plugin.context_parallel.failure import Watch
from mla_plugin.context_parallel.group import Group
from mla_plugin.context_parallel.transport import is_batched
from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.operations.attention.compute import reads_lengths

_OF_TENSORS: tuple[str, ...] = (
    "dtype",
    "device_type",
    "num_heads",
    "num_kv_heads",
    "head_dim_qk",
    "head_dim_v",
    "batch_size",
)


def forward(
    tensors: AttentionTensors, options: CallOptions, backend: str | None, group: Group, cp_comm_type: str
) -> Forward:
    """out and lse of this rank's tokens, and what is saved for the backward besides inputs and outputs.

    Args:
        tensors: this rank's tokens; offsets are those of whole sequences.
        options: of the call, completed.
        backend: use this backend and no other.
        group, cp_comm_type: the ranks and the communication type.

    Raises:
        ValueError, TypeError: an argument is invalid; nothing was sent.
        NoBackendError: no backend takes a section.
        ContextParallelError: the ranks call with different arguments, or one of them failed.
    """
    request = checked_request(tensors, options, group.size, cp_comm_type)
    values = lengths_read(tensors, request, group.size)
    call, way = Call(group, tensors, request, backend), WAYS[cp_comm_type]
    watch = Watch(group, tensors.q.device, fingerprint_of_call(call, cp_comm_type, "forward", values))
    if _is_empty(tensors):
        watch.begin()
        q = tensors.q
        lse = q.new_full(call.layout.lse_shape(q.shape), -torch.inf, dtype=call.wide)
        return q.new_zeros((*q.shape[:-1], tensors.v.shape[-1])), lse, []
    watch.prepare(call.prepare, way.requests(call))
    found: Forward | None = way.forward(call, watch, wants_lse=options.return_lse)
    watch.close()
    assert found is not None  # or the watch has an error, and has raised
    return found


def backward(
    tensors: AttentionTensors,
    options: CallOptions,
    backend: str | None,
    group: Group,
    cp_comm_type: str,
    saved: Sequence[torch.Tensor],
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> Backward:
    """dq, dk and dv of this rank's tokens, contiguous.

    Args:
        tensors: of the forward; of q, k and v only shape, dtype and device are used.
        options, backend, group, cp_comm_type: of the forward.
        saved: what the forward kept, or q, k, v, out and lse where it kept nothing.
        dout, dlse: of out's and lse's shape.

    Raises:
        ContextParallelError: a rank failed.
    """
    request = checked_request(tensors, options, group.size, cp_comm_type)
    call, way = Call(group, tensors, request, backend), WAYS[cp_comm_type]
    values = values_of_backward(cp_comm_type, dlse)
    watch = Watch(group, dout.device, fingerprint_of_call(call, cp_comm_type, "backward", values))
    if _is_empty(tensors):
        watch.begin()
        dq, dk, dv = (x.new_zeros(x.shape) for x in (tensors.q, tensors.k, tensors.v))
        return dq, dk, dv
    watch.prepare(call.prepare, way.requests(call))
    found: Backward | None = way.backward(call, Saved.of(saved), dout, dlse, watch)
    watch.close()
    assert found is not None  # or the watch has an error, and has raised
    return found


def _is_empty(tensors: AttentionTensors) -> bool:
    """There is no query or no key on any rank, as all have tensors of the same shape: nothing to send."""
    return tensors.q.numel() == 0 or tensors.k.numel() == 0


def lengths_read(tensors: AttentionTensors, request: AttentionRequest, size: int) -> Values:
    """The offsets, checked, where values are read; they must be the same on all ranks.

    Raises:
        ValueError: they are wrong.
    """
    if not reads_lengths(request):
        return NO_VALUES
    check_values(tensors, request, size)
    given = ((name, getattr(tensors, name)) for name in LENGTHS)
    return Values.of({name: x.tolist() for name, x in given if x is not None})


def values_of_backward(cp_comm_type: str, dlse: torch.Tensor | None) -> Values:
    """Values for a backward's fingerprint beside its forward's: ``a2a`` also sends the gradient of lse."""
    return _dlse(dlse is not None) if cp_comm_type == "a2a" else NO_VALUES


@functools.cache
def _dlse(is_given: bool) -> Values:
    return Values.of({"gradient of lse": "given" if is_given else "none"})


def fingerprint_of_call(
    call: Call, cp_comm_type: str, what: str, values: Values, more: Mapping[str, Any] | None = None
) -> Fingerprint:
    """The ``Fingerprint`` of a call, which the other ranks must have too.

    Args:
        call: what this rank is about to run.
        cp_comm_type: the communication type.
        what: ``forward`` or ``backward``.
        values: of this call.
        more: what else must be equal, by its name; hashable values.
    """
    tensors, more = call.tensors, dict(more or {})
    if cp_comm_type == "p2p":
        more["NVTE_BATCH_MHA_P2P_COMM"] = int(is_batched(call.group, tensors.q.device))
    shapes = (tuple(tensors.q.shape), tuple(tensors.k.shape), tuple(tensors.v.shape))
    key = (call.request, shapes, tensors.softmax_scale, call.backend, cp_comm_type, *more.values())
    return fingerprint_of(call.group, what, key, lambda: {**_settings(shapes, call, cp_comm_type), **more}, values)


def _settings(shapes: tuple[Any, ...], call: Call, cp_comm_type: str) -> dict[str, Any]:
    """What must be equal on all ranks, by argument name."""
    names = CallOptions._fields + _OF_TENSORS
    settings = {name: getattr(call.request, name) for name in names}
    for name in ("max_seqlen_q", "max_seqlen_kv"):  # of whole sequences, as the caller gave them
        settings[name] *= call.group.size
    settings |= dict(zip(("q.shape", "k.shape", "v.shape"), shapes, strict=True))
    return settings | {
        "cp_comm_type": cp_comm_type,
        "backend": call.backend,
        "softmax_scale": float(call.tensors.softmax_scale),
    }
