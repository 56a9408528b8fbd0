"""One pass of latent attention over a group: checks, agreement with the other ranks, communication, failures."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from mla_plugin.arguments.layout import LAYOUTS
from mla_plugin.context_parallel.agreement import Fingerprint, Values
from mla_plugin.context_parallel.call import Call as KVCall
from mla_plugin.context_parallel.checks import checked_request
from mla_plugin.context_parallel.failure import Watch
from mla_plugin.context_parallel.group import Group
from mla_plugin.context_parallel.latent import a2a, all_gather
from mla_plugin.context_parallel.latent.latents import Latents
from mla_plugin.context_parallel.run import fingerprint_of_call, lengths_read, values_of_backward
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest
from mla_plugin.operations.latent.call import Call, Forward, Gradients
from mla_plugin.operations.latent.compute import Decision, Wants

WAYS: dict[str, ModuleType] = {"all_gather": all_gather, "a2a": a2a}
"""The module of each ``cp_comm_type``."""
_NOTHING = Decision((), {})


def check(call: Call) -> None:
    """As ``Passes.check``."""
    _kv_call(call)


def requests(call: Call, group: Group | None = None) -> tuple[AttentionRequest, ...]:
    """The requests of this rank, for the call's group or another one; errors as ``check``."""
    kv = _kv_call(call, group)
    return _way(call).requests(call, kv)  # type: ignore[no-any-return]


def forward(call: Call) -> Forward:
    """As ``Passes.forward``; ContextParallelError if ranks disagree or one of them fails."""
    kv = _kv_call(call)
    values = lengths_read(kv.tensors, kv.request, kv.group.size)
    q, sizes = call.tensors.q, call.sizes
    way, is_empty = _way(call), _is_empty(call)
    watch = Watch(kv.group, q.device, _fingerprint(call, kv, "forward", values))
    decision = None if is_empty else watch.prepare(way.decide, call, kv)
    watch.begin()
    if is_empty:
        lse = q.new_full(sizes.layout.lse_shape(q.shape), -torch.inf, dtype=kv.wide)
        return Forward(AttentionOutput(q.new_zeros((*q.shape[:-1], sizes.head_dim_v)), lse), [], _NOTHING)
    latents = Latents(kv.group, call.tensors, sizes)
    output, kept = way.forward(call, kv, latents, decision, watch)
    watch.close()
    return Forward(output, kept, decision)  # type: ignore[arg-type]  # closing raises where there is none


def backward(
    call: Call,
    decision: Decision | None,
    saved: Sequence[torch.Tensor],
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    wants: Wants,
) -> Gradients:
    """As ``Passes.backward``; always computes the gradients of the latents, because other ranks own parts of them."""
    kv, tensors = _kv_call(call), call.tensors
    way, is_empty = _way(call), _is_empty(call)
    watch = Watch(kv.group, dout.device, _fingerprint(call, kv, "backward", values_of_backward(call.more[1], dlse)))
    if not is_empty:
        decision = decision or watch.prepare(way.decide, call, kv)
    watch.begin()
    if is_empty:
        return Gradients(*(x.new_zeros(x.shape) for x in tensors.differentiable))
    wants = wants._replace(latents=True)
    latents = Latents(kv.group, tensors, call.sizes)
    found = way.backward(call, kv, latents, decision, saved, dout, dlse, wants, watch)
    watch.close()
    return found  # type: ignore[no-any-return]  # closing raises where there is none


def kept_shapes(call: Call) -> list[tuple[int, ...]]:
    """As ``Passes.kept_shapes``."""
    group, way = call.more
    if way != "a2a" or _is_empty(call):
        return []
    sizes, size = call.sizes, Group.named(group).size
    layout = sizes.layout
    shape = list(call.tensors.q.shape)
    shape[layout.heads] //= size
    shape[layout.tokens] *= size
    return [tuple(shape), (*shape[:-1], sizes.head_dim_v), layout.lse_shape(shape)]


def _fingerprint(call: Call, kv: KVCall, what: str, values: Values) -> Fingerprint:
    widths = {"kv_lora_rank": call.sizes.kv_lora_rank, "qk_rope_head_dim": call.sizes.qk_rope_head_dim}
    return fingerprint_of_call(kv, f"latent {call.more[1]}", what, values, widths)


def _way(call: Call) -> ModuleType:
    return WAYS[call.more[1]]


def _is_empty(call: Call) -> bool:
    """There is no query or no key on any rank, as all have tensors of the same shape: nothing to send."""
    return call.tensors.q.numel() == 0 or call.tensors.c_kv.numel() == 0


def check_way(way: object) -> None:
    """Check the communication type.

    Raises:
        ValueError: it is not one of ``WAYS``.
    """
    if not isinstance(way, str) or way not in WAYS:
        ring = " (the latents are so small that they are gathered, and go around no ring)" if way == "p2p" else ""
        raise ValueError(f"cp_comm_type={way!r}; latent_attention accepts: {', '.join(WAYS)}{ring}")


def _kv_call(call: Call, group: Group | None = None) -> KVCall:
    """The equivalent call with K and V, checked; K and V are stand-ins that take no memory.

    Raises:
        ValueError, TypeError: an argument is invalid; the message says what was given and what is expected.
    """
    name, way = call.more
    check_way(way)
    group, tensors = group or Group.named(name), call.check()
    heads = tensors.q.shape[LAYOUTS[call.options.qkv_format].heads]
    if way == "a2a" and heads % group.size:
        raise ValueError(
            f"cp_comm_type='a2a' with {heads} heads over {group.size} ranks, expected a multiple of {group.size}; "
            "'all_gather' takes any number"
        )
    return KVCall(group, tensors, checked_request(tensors, call.options, group.size, way), call.backend)
