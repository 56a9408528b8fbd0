"""Every rank expands all heads, a group at a time, over the keys that its queries see.

Each of a rank's two chunks of queries is one call over a prefix of the keys, so nothing is merged. Rank r
expands 2 size - r of the 2 size chunks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mla_plugin.arguments.attention import LENGTHS
from mla_plugin.context_parallel import all_gather as of_kv
from mla_plugin.context_parallel.call import Call as KVCall
from mla_plugin.context_parallel.failure import Watch
from mla_plugin.context_parallel.latent.latents import Latents
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest
from mla_plugin.operations.latent import compute
from mla_plugin.operations.latent.call import Call, Gradients
from mla_plugin.operations.latent.compute import Decision, Part, Wants


def requests(call: Call, kv: KVCall) -> tuple[AttentionRequest, ...]:
    """The requests of this rank: groups of heads over the keys that each chunk sees."""
    return compute.of_groups(of_kv.requests(kv), call.sizes, math.prod(_leading(call, kv)), kv.request.dtype)


def decide(call: Call, kv: KVCall) -> Decision:
    """Which backends compute the chunks."""
    return compute.decide(_expanded(call, kv, call.tensors.q), call.backend)


def forward(
    call: Call, kv: KVCall, latents: Latents, decision: Decision | None, watch: Watch
) -> tuple[AttentionOutput | None, list[torch.Tensor]]:
    """out and lse of this rank's queries; nothing is kept besides them and q."""
    whole = latents.gather()
    output = watch.attempt(_forward, call, kv, decision, whole)
    return output, []


def _forward(call: Call, kv: KVCall, decision: Decision | None, whole: torch.Tensor) -> AttentionOutput:
    assert decision is not None  # None after a failure: then nothing more is attempted
    x = _seen(kv, whole, call).flatten(0, -2)
    return compute.forward(_expanded(call, kv, call.tensors.q), decision, x)


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
    """dq, dc_kv and dk_rope of this rank's tokens; of the weights this rank's share."""
    whole = latents.gather()
    dx = whole.new_zeros(whole.shape, dtype=kv.wide)
    found = watch.attempt(_backward, call, kv, decision, saved, dout, dlse, wants, whole, dx)
    dc_kv, dk_rope = latents.scatter(dx)
    return None if found is None else Gradients(found.dq, dc_kv, dk_rope, found.dw_uk, found.dw_uv)


def _backward(
    call: Call,
    kv: KVCall,
    decision: Decision | None,
    saved: Sequence[torch.Tensor],
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    wants: Wants,
    whole: torch.Tensor,
    dx: torch.Tensor,
) -> compute.RowGradients:
    assert decision is not None
    q, out, lse = saved
    seen = _seen(kv, whole, call)
    expanded = _expanded(call, kv, q)
    output = AttentionOutput(out, lse)
    found = compute.backward(expanded, decision, seen.flatten(0, -2), output, dout, dlse, wants)
    assert found.dx is not None  # every rank expects the gradients of its tokens
    _seen(kv, dx, call).copy_(found.dx.view(seen.shape))
    return found


def _expanded(call: Call, kv: KVCall, q: torch.Tensor) -> compute.Call:
    """This rank's queries over the keys that they see."""
    tensors, sizes = call.tensors, call.sizes
    keys = _keys(kv)
    parts = [_part(kv, part, keys, q) for part in of_kv.parts_of(kv)]
    if not sizes.layout.is_packed:
        parts.sort(key=lambda part: part.keys is not None)  # the one over all keys first: the others are added to it
    more = (tensors.softmax_scale, sizes, _leading(call, kv), tuple(parts))
    return compute.Call.of(q, tensors.w_uk, tensors.w_uv, *more)


def _part(kv: KVCall, part: of_kv.Part, keys: slice, q: torch.Tensor) -> Part:
    lengths = {}
    if kv.request.has_padding:
        given = of_kv.tensors_of(kv, part, q, q, q)  # the offsets do not depend on q
        lengths = {name: getattr(given, name) for name in LENGTHS}
    queries = seen = None
    if not kv.layout.is_packed and part.queries != "all":
        chunk = q.shape[kv.layout.tokens] // 2
        queries = slice(0, chunk) if part.queries == "front" else slice(chunk, 2 * chunk)
    if part.keys.stop is not None:
        within = slice(part.keys.start - keys.start, part.keys.stop - keys.start)
        seen = None if within == slice(0, keys.stop - keys.start) else within
    return Part(part.request, lengths, queries, seen)


def _leading(call: Call, kv: KVCall) -> tuple[int, ...]:
    """The leading dimensions of the latents that this rank expands."""
    leading, keys = list(call.tensors.c_kv.shape[:-1]), _keys(kv)
    leading[call.sizes.tokens_axis] = keys.stop - keys.start
    return tuple(leading)


def _keys(kv: KVCall) -> slice:
    """The keys that any of this rank's queries sees, of whole sequences."""
    seen = [part.keys for part in of_kv.parts_of(kv)]
    if any(keys.stop is None for keys in seen):
        return slice(0, kv.tensors.k.shape[kv.layout.tokens] * kv.group.size)
    return slice(min(keys.start for keys in seen), max(keys.stop for keys in seen))


def _seen(kv: KVCall, whole: torch.Tensor, call: Call) -> torch.Tensor:
    """The visible part of the latents of all ranks."""
    keys = _keys(kv)
    return whole.narrow(call.sizes.tokens_axis, keys.start, keys.stop - keys.start)
