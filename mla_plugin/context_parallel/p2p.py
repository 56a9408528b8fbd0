"""K and V travel around a ring; every rank computes one section at each step and merges it.

Forward: size - 1 hops of K and V, two buffers for any size. Backward: the same hops, and the gradients of K and V
that a rank computes are sent directly to the keys' owner, one step later, in the dtype of K. The owner sums them in
float32: sums that travel around the ring would be rounded at every hop.

The section of a rank's own keys needs no message, so it is queued before ``Watch.begin``: the host may wait there for
the previous call, and the device would be idle meanwhile (0.3 to 0.9 ms on two H200s).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.context_parallel.call import Backward, Call, Forward, Saved
from mla_plugin.context_parallel.failure import Watch
from mla_plugin.context_parallel.merge import merge
from mla_plugin.context_parallel.sections import Section, half, section, sections_of
from mla_plugin.context_parallel.transport import Hop, Mark, Pending, hop, is_batched, ring_hop
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest


def refusals(request: AttentionRequest, size: int) -> Iterator[str]:
    """Every reason why ``p2p`` cannot compute the request."""
    if request.has_sliding_window:
        other = "'all_gather'" if request.is_causal else "'a2a'"
        yield f"window_size={request.window_size}; cp_comm_type={other} takes it"
    if request.is_causal and request.bottom_right_diagonal:
        yield f"attn_mask_type={request.attn_mask_type!r}; cp_comm_type='all_gather' or 'a2a' takes it"
    yield from differing_lengths(request)


def differing_lengths(request: AttentionRequest) -> Iterator[str]:
    """A reason if a top-left causal mask has chunks of queries and of keys of different lengths."""
    if not request.is_causal or request.bottom_right_diagonal:
        return
    if request.has_padding and request.lengths_may_differ:
        yield (
            f"attn_mask_type={request.attn_mask_type!r} with two tensors of lengths; pass one as cu_seqlens_q and "
            "cu_seqlens_kv if queries and keys have the same lengths, cp_comm_type='a2a' takes others"
        )
    if not request.layout.is_packed and request.max_seqlen_q != request.max_seqlen_kv:
        yield (
            f"attn_mask_type={request.attn_mask_type!r} with {request.max_seqlen_q} queries and "
            f"{request.max_seqlen_kv} keys on a rank; cp_comm_type='a2a' takes it"
        )


def requests(call: Call) -> tuple[AttentionRequest, ...]:
    """The requests of this rank."""
    sections = sections_of(call.group.size, call.group.rank, is_causal=call.request.is_causal)
    return tuple(_request(call.request, each) for each in sections)


def forward(call: Call, watch: Watch, *, wants_lse: bool) -> Forward | None:
    """out and lse; only inputs and outputs are saved for the backward. None after a failure."""
    group, tensors = call.group, call.tensors
    here: Sequence[torch.Tensor] = (tensors.k.contiguous(), tensors.v.contiguous())
    buffers, sums = _Buffers(here, group.size), _Sums(call)
    batched = is_batched(group, tensors.q.device)
    mark = Mark(tensors.q.device)
    watch.attempt(sums.add, group.rank, *here)
    watch.begin()
    for step in range(group.size):
        there, pending = here, Pending()
        if step + 1 < group.size:
            there = buffers.next()
            with nullcontext() if step else mark:
                pending = hop(group, [ring_hop(group, here, there)], batched=batched)
        if step:
            watch.attempt(sums.add, (group.rank - step) % group.size, *here)
        pending.wait()
        here = there
    return watch.attempt(sums.result)


def backward(call: Call, saved: Saved, dout: torch.Tensor, dlse: torch.Tensor | None, watch: Watch) -> Backward | None:
    """dq, dk and dv; None after a failure."""
    group = call.group
    here: Sequence[torch.Tensor] = (saved.k.contiguous(), saved.v.contiguous())
    buffers, sums = _Buffers(here, group.size), _GradientSums(call, saved, dout, dlse, here)
    batched = is_batched(group, dout.device)
    mark = Mark(dout.device)
    watch.attempt(sums.add, 0, *here)
    watch.begin()
    for step in range(group.size + 1):
        there, hops = here, []
        if step + 1 < group.size:
            there = buffers.next()
            hops.append(ring_hop(group, here, there))
        if step >= 2:  # the gradients of the previous step; those of step 0 are of this rank's keys
            hops.append(sums.homeward(step - 1))
        with nullcontext() if step else mark:
            pending = hop(group, hops, batched=batched)
        if 0 < step < group.size:
            watch.attempt(sums.add, step, *here)
        pending.wait()
        if step >= 2:
            watch.attempt(sums.add_received)
        here = there
    return watch.attempt(sums.result)


class _Buffers:
    """Two alternating sets of receive buffers: one is used and sent while the other is filled."""

    def __init__(self, like: Sequence[torch.Tensor], size: int) -> None:
        # allocated before the first message, when a rank without enough memory can still raise
        self._made = [tuple(torch.empty_like(x) for x in like) for _ in range(min(2, size - 1))]

    def next(self) -> tuple[torch.Tensor, ...]:
        self._made.reverse()
        return self._made[0]


@functools.lru_cache(maxsize=4096)
def _request(request: AttentionRequest, which: Section) -> AttentionRequest:
    """The request of a section."""
    if request.has_padding:
        mask = "padding_causal" if which.is_causal else "padding"
    else:
        mask = "causal" if which.is_causal else "no_mask"
    has_half = (which.queries, which.keys) != ("all", "all")
    return request.replace(
        attn_mask_type=mask,
        max_seqlen_q=request.max_seqlen_q // (1 if which.queries == "all" else 2),
        max_seqlen_kv=request.max_seqlen_kv // (1 if which.keys == "all" else 2),
        pad_between_seqs=request.layout.is_packed and (request.pad_between_seqs or has_half),
        lengths_may_differ=request.has_padding and (request.lengths_may_differ or not which.is_causal),
        partial=True,
    )


def _queries(call: Call, x: torch.Tensor, which: Section) -> torch.Tensor:
    """The rows of a section; in packed sequences their offsets select them."""
    return x if call.layout.is_packed else half(x, which.queries, call.layout.tokens)


def _rows(call: Call, lse: torch.Tensor, which: Section) -> torch.Tensor:
    return lse if call.layout.is_packed else half(lse, which.queries, -1)


def _keys(call: Call, x: torch.Tensor, which: Section) -> torch.Tensor:
    return x if call.layout.is_packed else half(x, which.keys, call.layout.tokens)


def _tensors(
    call: Call, which: Section, owner: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, request: AttentionRequest
) -> AttentionTensors:
    """The tensors of a section; q are its rows, k and v all keys of the owner."""
    k, v = _keys(call, k, which), _keys(call, v, which)
    if not request.has_padding:
        return call.tensors_of(q, k, v)
    lengths_q, lengths_kv = call.lengths
    of_q = lengths_q.of(call.group.rank, which.queries)
    of_kv = None if which.is_causal else lengths_kv.of(owner, which.keys)
    if not request.pad_between_seqs:
        of_q, of_kv = of_q.without_starts(), None if of_kv is None else of_kv.without_starts()
    return call.tensors_of(q, k, v, of_q, of_kv)


class _Sums:
    """out and lse over the sections so far."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None

    def add(self, owner: int, k: torch.Tensor, v: torch.Tensor) -> None:
        call = self._call
        which = section(call.group.rank, owner, is_causal=call.request.is_causal)
        request = _request(call.request, which)
        q = _queries(call, call.tensors.q, which)
        part = call.forward(request, _tensors(call, which, owner, q, k, v, request))
        if self._out is None or self._lse is None:  # the rank's own keys, which all of its queries see
            self._out, self._lse = part.out.to(call.wide), part.lse
            return
        out, lse = _queries(call, self._out, which), _rows(call, self._lse, which)
        merge(out, lse, part.out, part.lse, call.layout)

    def result(self) -> Forward:
        assert self._out is not None  # every section was added
        assert self._lse is not None
        return self._out.to(self._call.request.dtype), self._lse, []


class _GradientSums:
    """dq, dk and dv so far, in float32, and the parts of dk and dv that are being sent to other ranks."""

    def __init__(
        self,
        call: Call,
        saved: Saved,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        own_keys: Sequence[torch.Tensor],
    ) -> None:
        self._own_keys = own_keys
        self._call, self._saved, self._dlse = call, saved, dlse
        self._dout = dout
        self._of_queries: dict[str, tuple[torch.Tensor, AttentionOutput, torch.Tensor, torch.Tensor | None]] = {}
        self._sums: tuple[torch.Tensor, ...] = ()
        self._leaving: Sequence[torch.Tensor] | None = None
        self._arriving: Sequence[torch.Tensor] = ()
        self._arriving_of = section(call.group.rank, call.group.rank, is_causal=call.request.is_causal)
        self._buffers = tuple(x.new_empty(x.numel()) for x in (saved.k, saved.v))

    def _of(self, which: Section) -> tuple[torch.Tensor, AttentionOutput, torch.Tensor, torch.Tensor | None]:
        """q, out and lse, dout, dlse of a section's rows. Halves of the last four are copied, once for all steps."""
        found = self._of_queries.get(which.queries)
        if found is None:
            call, saved, dlse = self._call, self._saved, self._dlse
            rows = AttentionOutput(
                _queries(call, saved.output.out, which).contiguous(), _rows(call, saved.output.lse, which).contiguous()
            )
            dlse = None if dlse is None else _rows(call, dlse, which).contiguous()
            found = (_queries(call, saved.q, which), rows, _queries(call, self._dout, which), dlse)
            self._of_queries[which.queries] = found
        return found

    def add(self, step: int, k: torch.Tensor, v: torch.Tensor) -> None:
        call, owner = self._call, (self._call.group.rank - step) % self._call.group.size
        which = section(call.group.rank, owner, is_causal=call.request.is_causal)
        request = _request(call.request, which)
        q, output, dout, dlse = self._of(which)
        tensors = _tensors(call, which, owner, q, k, v, request)
        dq, dk, dv = call.backward(request, tensors, output, dout, dlse)
        if not self._sums:
            # with two ranks an element is a sum of two parts, rounded once in either dtype
            dtype = dq.dtype if call.group.size == 2 else call.wide
            self._sums = tuple(x.to(dtype) for x in (dq, dk, dv))
            return
        _queries(call, self._sums[0], which).add_(dq)
        self._leaving = (dk, dv)

    def homeward(self, step: int) -> Hop:
        """Send the gradients of a step to their owner, and receive those of this rank's keys."""
        call, group = self._call, self._call.group
        owner, source = (group.rank - step) % group.size, (group.rank + step) % group.size
        leaving = self._leaving
        if leaving is None:  # this rank failed, perhaps out of memory: the owner still expects a message of this size
            leaving = self._like(section(group.rank, owner, is_causal=call.request.is_causal), self._own_keys)
        self._leaving = None
        self._arriving_of = section(source, group.rank, is_causal=call.request.is_causal)
        self._arriving = self._like(self._arriving_of, self._buffers)
        return Hop(owner, leaving, source, self._arriving)

    def _like(self, which: Section, memory: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of a section's keys, as views of contiguous memory that holds those of all keys."""
        shapes = [_keys(self._call, x, which).shape for x in (self._saved.k, self._saved.v)]
        return [x.view(-1)[: shape.numel()].view(shape) for x, shape in zip(memory, shapes, strict=True)]

    def add_received(self) -> None:
        for total, part in zip(self._sums[1:], self._arriving, strict=True):
            _keys(self._call, total, self._arriving_of).add_(part)

    def result(self) -> Backward:
        dq, dk, dv = (x.to(self._call.request.dtype) for x in self._sums)
        return dq, dk, dv
