"""All-gather of K and V; each of a rank's two chunks of queries is one call over a prefix of the keys.

Causal masks are aligned to the last query and the last key of the prefix, so windows are supported, and nothing is
merged. Backward: K and V are gathered again, not saved; the gradients of every key are sent to its owner in the dtype
of K, and the owner sums them in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.context_parallel.call import Backward, Call, Forward, Saved
from mla_plugin.context_parallel.failure import Watch
from mla_plugin.context_parallel.order import by_rank, in_order, of_rank, order_of
from mla_plugin.context_parallel.p2p import differing_lengths
from mla_plugin.context_parallel.sections import Offsets, cumulative, half
from mla_plugin.context_parallel.transport import exchange, gather
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest

Queries = Literal["all", "front", "back"]


class Part(NamedTuple):
    """Queries that one call computes.

    Attributes:
        queries: the rank's queries that it has.
        keys: the keys of whole sequences that the call gets; lengths may exclude some of them.
        request: the call's request.
    """

    queries: Queries
    keys: slice
    request: AttentionRequest


def refusals(request: AttentionRequest, size: int) -> Iterator[str]:
    """Every reason why ``all_gather`` cannot compute the request."""
    if request.has_sliding_window and not request.is_causal:
        yield f"window_size={request.window_size} without a causal mask; cp_comm_type='a2a' takes it"
    yield from differing_lengths(request)


def requests(call: Call) -> tuple[AttentionRequest, ...]:
    """The requests of this rank."""
    return tuple(part.request for part in parts_of(call))


def forward(call: Call, watch: Watch, *, wants_lse: bool) -> Forward | None:
    """out and lse; only inputs and outputs are saved for the backward. None after a failure."""
    order = _order(call)
    watch.begin()
    k, v = (_whole(call, x, order) for x in (call.tensors.k, call.tensors.v))
    return watch.attempt(_compute, call, k, v)


def backward(call: Call, saved: Saved, dout: torch.Tensor, dlse: torch.Tensor | None, watch: Watch) -> Backward | None:
    """dq, dk and dv; None after a failure."""
    group, order = call.group, _order(call)
    watch.begin()
    k, v = (_whole(call, x, order) for x in (saved.k, saved.v))
    found = watch.attempt(_differentiate, call, saved, k, v, dout, dlse)
    inverse = None if order is None else order.argsort()
    wholes, owned = [k, v], []
    del k, v
    for number, own in enumerate((saved.k, saved.v)):
        # K or V is not read again, and its memory has the size of the message. A rank that ran out of memory can still
        # send it, as the owners expect.
        message = wholes.pop(0).view(group.size, *own.shape)
        if found is not None:
            watch.attempt(_fill, call, message, found[1][number], inverse)
        received = exchange(group, message)
        del message
        owned.append(None if found is None else watch.attempt(_owned, call, found[1][number], received, inverse))
        del received
    dk, dv = owned
    if found is None or dk is None or dv is None:
        return None
    return found[0], dk, dv


class _Gradient(NamedTuple):
    """What one part contributes to the gradient of K or of V.

    Attributes:
        keys: the keys of whole sequences that the part saw.
        values: their gradient, in new memory, as backends return it.
    """

    keys: slice
    values: torch.Tensor


def _fill(call: Call, message: torch.Tensor, parts: list[_Gradient], inverse: torch.Tensor | None) -> None:
    """Write what this rank contributes to the gradients of the other ranks' keys.

    There are at most two parts. A sum of two numbers in the dtype of K is rounded once, as if it were summed in float32
    and rounded for the message.

    Args:
        call: of this rank.
        message: [size, ...] in the dtype of K, contiguous, of any values; this rank's own part is not read.
        parts: of K or of V.
        inverse: of the order of packed sequences.
    """
    message.zero_()
    for part in parts:
        if inverse is not None:
            message += by_rank(part.values, call.layout, call.group.size, inverse)
            continue
        for rank, of_owner in enumerate(message):
            if rank != call.group.rank:
                _add_keys_of(call, of_owner, part, rank)


def _owned(call: Call, parts: list[_Gradient], received: torch.Tensor, inverse: torch.Tensor | None) -> torch.Tensor:
    """The gradient of this rank's tokens: the sum in float32 (float64 for float64) of its parts and of the messages.

    ``parts`` is emptied, so that each one's memory is free once it is added.
    """
    size, rank = call.group.size, call.group.rank
    own = torch.zeros_like(received[rank], dtype=call.wide)
    while parts:
        part = parts.pop(0)
        if inverse is not None:
            own += of_rank(part.values, size, rank, inverse)
        else:
            _add_keys_of(call, own, part, rank)
        del part
    for source in range(size):
        if source != rank:
            own += received[source]
    return own.to(call.request.dtype)


def _add_keys_of(call: Call, total: torch.Tensor, part: _Gradient, rank: int) -> None:
    """Add the gradient of the keys that ``rank`` owns and the part saw; ``total`` has the rank's two chunks."""
    axis, size = call.layout.tokens, call.group.size
    first = part.keys.start or 0
    which: Queries
    for which, number in (("front", rank), ("back", 2 * size - 1 - rank)):
        chunk = half(total, which, axis)
        start = number * chunk.shape[axis]
        low = max(start, first)
        high = min(start + chunk.shape[axis], first + part.values.shape[axis])
        if low < high:
            seen = part.values.narrow(axis, low - first, high - low)
            chunk.narrow(axis, low - start, high - low).add_(seen)


def _order(call: Call) -> torch.Tensor | None:
    tensors = call.tensors
    return order_of(tensors.k, call.layout, tensors.cu_seqlens_kv, tensors.cu_seqlens_kv_padded, call.group.size)


def _whole(call: Call, x: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    return in_order(gather(call.group, x.contiguous()), call.layout, order)


def parts_of(call: Call) -> tuple[Part, ...]:
    """The calls that this rank's queries make."""
    return _known_parts(call.request, call.group.size, call.group.rank)


@functools.lru_cache(maxsize=4096)
def _known_parts(request: AttentionRequest, size: int, rank: int) -> tuple[Part, ...]:
    longest_kv = request.max_seqlen_kv * size
    common = {"pad_between_seqs": request.layout.is_packed, "lengths_may_differ": request.has_padding}
    if not request.is_causal:
        return (Part("all", slice(None), request.replace(max_seqlen_kv=longest_kv, **common)),)
    mask = "padding_causal_bottom_right" if request.has_padding else "causal_bottom_right"
    chunk = request.max_seqlen_q // 2
    parts = []
    which: Queries
    for which, number in (("front", rank), ("back", 2 * size - 1 - rank)):
        keys, longest = slice(None), longest_kv
        if not request.has_padding:  # the shapes say which keys the chunk sees
            start, end = number * chunk, (number + 1) * chunk
            offset = request.band.offset(2 * chunk * size, longest_kv)
            first = 0 if request.band.left < 0 else max(0, start + offset - request.band.left)
            keys = slice(first, max(first, end + offset))
            longest = keys.stop - keys.start
        asked = request.replace(attn_mask_type=mask, max_seqlen_q=chunk, max_seqlen_kv=longest, **common)
        parts.append(Part(which, keys, asked))
    return tuple(parts)


def _queries(call: Call, x: torch.Tensor, which: Queries, axis: int) -> torch.Tensor:
    """The rows of a part; in packed sequences their offsets select them."""
    return x if call.layout.is_packed else half(x, which, axis)


def tensors_of(call: Call, part: Part, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> AttentionTensors:
    """The tensors of a part; q has its rows, k and v have all keys."""
    axis = call.layout.tokens
    if not call.request.has_padding:
        keys = slice(part.keys.start or 0, k.shape[axis] if part.keys.stop is None else part.keys.stop)
        k, v = (x.narrow(axis, keys.start, keys.stop - keys.start) for x in (k, v))
        return call.tensors_of(q, k, v)
    lengths_q, _ = call.lengths
    size, rank, tensors = call.group.size, call.group.rank, call.tensors
    assert tensors.cu_seqlens_q is not None  # masks with lengths have them
    assert tensors.cu_seqlens_kv is not None
    whole_kv, starts = tensors.cu_seqlens_kv.diff(), None
    if call.layout.is_packed:
        starts = tensors.cu_seqlens_kv if tensors.cu_seqlens_kv_padded is None else tensors.cu_seqlens_kv_padded
    seen = whole_kv
    if call.request.is_causal:
        number = rank if part.queries == "front" else 2 * size - 1 - rank
        own = (lengths_q.front if part.queries == "front" else lengths_q.back)[rank]
        ends = number * lengths_q.chunk + own
        if call.request.bottom_right_diagonal:
            ends = ends + whole_kv - tensors.cu_seqlens_q.diff()
        seen = torch.where(own > 0, ends, 0).clamp_(min=0)
    return call.tensors_of(q, k, v, lengths_q.of(rank, part.queries), Offsets(cumulative(seen), starts))


def _compute(call: Call, k: torch.Tensor, v: torch.Tensor) -> Forward:
    """out and lse of this rank's queries; k and v are those of all ranks."""
    q, axis = call.tensors.q, call.layout.tokens
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty(call.layout.lse_shape(q.shape), dtype=call.wide)
    for number, part in enumerate(parts_of(call)):
        found = call.forward(part.request, tensors_of(call, part, _queries(call, q, part.queries, axis), k, v))
        if call.layout.is_packed and number > 0:
            out.add_(found.out)  # rows of other parts are 0 and -inf
            torch.maximum(lse, found.lse, out=lse)
        else:
            _queries(call, out, part.queries, axis).copy_(found.out)
            _queries(call, lse, part.queries, -1).copy_(found.lse)
    return out, lse, []


def _differentiate(
    call: Call, saved: Saved, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None
) -> tuple[torch.Tensor, tuple[list[_Gradient], list[_Gradient]]]:
    """dq of this rank's queries, and what their parts contribute to dk and dv, the part with the most keys first."""
    axis = call.layout.tokens
    of_q: list[torch.Tensor] = []
    of_k: list[_Gradient] = []
    of_v: list[_Gradient] = []
    for part in parts_of(call):
        tensors = tensors_of(call, part, _queries(call, saved.q, part.queries, axis), k, v)
        rows = AttentionOutput(
            _queries(call, saved.output.out, part.queries, axis).contiguous(),
            _queries(call, saved.output.lse, part.queries, -1).contiguous(),
        )
        dlse_rows = None if dlse is None else _queries(call, dlse, part.queries, -1).contiguous()
        dout_rows = _queries(call, dout, part.queries, axis)
        dq, dk, dv = call.backward(part.request, tensors, rows, dout_rows, dlse_rows)
        of_q.append(dq)
        of_k.insert(0, _Gradient(slice(None) if call.layout.is_packed else part.keys, dk))
        of_v.insert(0, _Gradient(of_k[0].keys, dv))
    if len(of_q) == 1:
        return of_q[0], (of_k, of_v)
    # in packed sequences the rows of the other part are 0
    return of_q[0].add_(of_q[1]) if call.layout.is_packed else torch.cat(of_q, axis), (of_k, of_v)
