"""All-to-all of Q and out, heads for tokens; the latents are gathered, and each rank expands only its heads.

Each rank attends over whole sequences, so any mask is supported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mla_plugin.arguments.latent import LatentSizes
from mla_plugin.context_parallel import a2a as of_kv
from mla_plugin.context_parallel.call import Call as KVCall
from mla_plugin.context_parallel.failure import Watch
from mla_plugin.context_parallel.latent.latents import Latents
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest
from mla_plugin.operations.latent import compute
from mla_plugin.operations.latent.call import Call, Gradients
from mla_plugin.operations.latent.compute import Decision, Part, Wants


def requests(call: Call, kv: KVCall) -> tuple[AttentionRequest, ...]:
    """The requests of this rank: groups of its heads over whole sequences."""
    tokens = math.prod(Latents(kv.group, call.tensors, call.sizes).leading)
    return compute.of_groups(of_kv.requests(kv), _own_sizes(call, kv), tokens, kv.request.dtype)


def decide(call: Call, kv: KVCall) -> Decision:
    """Which backends compute this rank's heads."""
    layout = kv.layout
    shape = list(call.tensors.q.shape)
    shape[layout.heads] //= kv.group.size
    shape[layout.tokens] *= kv.group.size
    return compute.decide(_expanded(call, kv, call.tensors.q.new_empty(shape)), call.backend)


def forward(
    call: Call, kv: KVCall, latents: Latents, decision: Decision | None, watch: Watch
) -> tuple[AttentionOutput | None, list[torch.Tensor]]:
    """out and lse of this rank's tokens; q, out and lse of its heads are kept.

    The lse of its tokens is exchanged only if the call returns it.
    """
    heads, order = of_kv.Heads(kv.group, kv.layout), of_kv.orders(kv)[0]
    q, whole = heads.gather(call.tensors.q, order), latents.gather()
    output = watch.attempt(_forward, call, kv, decision, q, whole)
    if output is None:  # the other ranks still expect a tensor of this shape
        lse = q.new_empty(kv.layout.lse_shape(q.shape), dtype=kv.wide)
        output = AttentionOutput(q.new_empty((*q.shape[:-1], call.sizes.head_dim_v)), lse)
    inverse = None if order is None else order.argsort()
    out = heads.scatter(output.out, inverse)
    if kv.request.return_lse:
        lse = heads.scatter_rows(output.lse, inverse)
    else:
        lse = out.new_empty(kv.layout.lse_shape(out.shape), dtype=kv.wide)
    return AttentionOutput(out, lse), [q, output.out, output.lse] if kv.request.is_training else []


def _forward(
    call: Call, kv: KVCall, decision: Decision | None, q: torch.Tensor, whole: torch.Tensor
) -> AttentionOutput:
    assert decision is not None  # None after a failure: then nothing more is attempted
    return compute.forward(_expanded(call, kv, q), decision, whole.flatten(0, -2))


def backward(
    call: Call,
    kv: KVCall,
    latents: Latents,
    decision: Decision | None,
    saved: Sequence[torch.Tensor],
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    wants: Wants,
    watch: Watch,
) -> Gradients | None:
    """dq, dc_kv and dk_rope of this rank's tokens; of the weights those of this rank's heads, 0 of all others."""
    heads, order = of_kv.Heads(kv.group, kv.layout), of_kv.orders(kv)[0]
    dout = heads.gather(dout, order)
    dlse = None if dlse is None else heads.gather_rows(dlse, order)
    whole = latents.gather()
    found = watch.attempt(_backward, call, kv, decision, saved, dout, dlse, wants, whole)
    dq, dx = torch.empty_like(saved[0]), None
    if found is not None:
        dq, dx = found.dq, found.dx
    dq = heads.scatter(dq, None if order is None else order.argsort())
    dx = whole.new_empty(whole.shape, dtype=kv.wide) if dx is None else dx.view(whole.shape)
    dc_kv, dk_rope = latents.scatter(dx)
    if found is None:
        return None
    dw_uk, dw_uv = (
        _among_all(kv, share, w) for share, w in ((found.dw_uk, call.tensors.w_uk), (found.dw_uv, call.tensors.w_uv))
    )
    return Gradients(dq, dc_kv, dk_rope, dw_uk, dw_uv)


def _among_all(kv: KVCall, share: torch.Tensor | None, w: torch.Tensor) -> torch.Tensor | None:
    if share is None:
        return None
    whole = w.new_zeros(w.shape)
    _own(kv, whole).copy_(share)
    return whole


def _backward(
    call: Call,
    kv: KVCall,
    decision: Decision | None,
    saved: Sequence[torch.Tensor],
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    wants: Wants,
    whole: torch.Tensor,
) -> compute.RowGradients:
    assert decision is not None
    q, out, lse = saved
    output = AttentionOutput(out, lse)
    return compute.backward(_expanded(call, kv, q), decision, whole.flatten(0, -2), output, dout, dlse, wants)


def _expanded(call: Call, kv: KVCall, q: torch.Tensor) -> compute.Call:
    """This rank's heads over all tokens."""
    tensors = call.tensors
    sizes = _own_sizes(call, kv)
    leading = Latents(kv.group, tensors, sizes).leading
    (request,) = of_kv.requests(kv)
    parts = (Part(request, {**tensors.lengths, "cu_seqlens_kv": kv.cu_seqlens_kv}),)
    more = (tensors.softmax_scale, sizes, leading, parts)
    return compute.Call.of(q, _own(kv, tensors.w_uk), _own(kv, tensors.w_uv), *more)


def _own_sizes(call: Call, kv: KVCall) -> LatentSizes:
    return call.sizes._replace(num_heads=call.sizes.num_heads // kv.group.size)


def _own(kv: KVCall, w: torch.Tensor) -> torch.Tensor:
    """The weights of this rank's heads."""
    return w.chunk(kv.group.size)[kv.group.rank]
