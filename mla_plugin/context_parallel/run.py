"""One pass of a context-parallel call: checks, agreement with the other ranks, the way, and what failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.options import CallOptions
from mla_plugin.context_parallel.agreement import agree, is_agreed
from mla_plugin.context_parallel.call import Backward, Call, Forward, Saved
from mla_plugin.context_parallel.checks import WAYS, check_values, checked_request
from mla_plugin.context_parallel.failure import Watch
from mla_plugin.context_parallel.group import Group
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
    """out and lse of this rank's tokens, and what the way keeps for the backward beside inputs and outputs.

    Args:
        tensors: this rank's tokens; offsets are those of whole sequences.
        options: of the call, completed.
        backend: use this backend and no other.
        group, cp_comm_type: the ranks and the way.

    Raises:
        ValueError, TypeError: an argument is off; nothing was sent.
        NoBackendError: no backend takes a section.
        ContextParallelError: the ranks call with different arguments, or one of them failed.
    """
    request = checked_request(tensors, options, group.size, cp_comm_type)
    if reads_lengths(request):
        check_values(tensors, request, group.size)
    call, way = Call(group, tensors, request, backend), WAYS[cp_comm_type]
    if _is_empty(tensors):
        q = tensors.q
        lse = q.new_full(call.layout.lse_shape(q.shape), -torch.inf, dtype=call.wide)
        return q.new_zeros((*q.shape[:-1], tensors.v.shape[-1])), lse, []
    watch = Watch(group, "forward", tensors.q.device)
    watch.attempt(call.prepare, way.requests(call))
    watch.begin()
    agree_on(call, cp_comm_type, watch)
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
        tensors: of the forward; of q, k and v only shape, dtype and device count.
        options, backend, group, cp_comm_type: of the forward.
        saved: what the forward kept, or q, k, v, out and lse where it kept nothing.
        dout, dlse: of out's and lse's shape.

    Raises:
        ContextParallelError: a rank failed.
    """
    request = checked_request(tensors, options, group.size, cp_comm_type)
    call, way = Call(group, tensors, request, backend), WAYS[cp_comm_type]
    if _is_empty(tensors):
        dq, dk, dv = (x.new_zeros(x.shape) for x in (tensors.q, tensors.k, tensors.v))
        return dq, dk, dv
    watch = Watch(group, "backward", dout.device)
    watch.attempt(call.prepare, way.requests(call))
    watch.begin()
    found: Backward | None = way.backward(call, Saved.of(saved), dout, dlse, watch)
    watch.close()
    assert found is not None  # or the watch has an error, and has raised
    return found


def _is_empty(tensors: AttentionTensors) -> bool:
    """No query or no key on any rank, for all have tensors of one shape: there is nothing to send."""
    return tensors.q.numel() == 0 or tensors.k.numel() == 0


def agree_on(call: Call, cp_comm_type: str, watch: Watch, more: Mapping[str, Any] | None = None) -> None:
    """Compare a call with those of the other ranks, where calls of its kind have not been compared before.

    Args:
        call: what this rank is about to run.
        cp_comm_type: the way.
        watch: of the call, with what this rank cannot do.
        more: what must be equal besides, by its name; hashable values.

    Raises:
        ContextParallelError: settings differ, or another rank has an error.
    """
    tensors, more = call.tensors, more or {}
    shapes = (tuple(tensors.q.shape), tuple(tensors.k.shape), tuple(tensors.v.shape))
    kind = (call.request, shapes, tensors.softmax_scale, call.backend, cp_comm_type, *more.values())
    if not is_agreed(call.group, kind):
        device = tensors.q.device
        settings = {**_settings(shapes, call, cp_comm_type), **more}
        agree(call.group, kind, settings, watch.error, device)


def _settings(shapes: tuple[Any, ...], call: Call, cp_comm_type: str) -> dict[str, Any]:
    """What must be equal on all ranks, by the name that a caller knows."""
    names = CallOptions._fields + _OF_TENSORS
    settings = {name: getattr(call.request, name) for name in names}
    settings |= dict(zip(("q.shape", "k.shape", "v.shape"), shapes, strict=True))
    return settings | {
        "cp_comm_type": cp_comm_type,
        "backend": call.backend,
        "softmax_scale": call.tensors.softmax_scale,
    }
