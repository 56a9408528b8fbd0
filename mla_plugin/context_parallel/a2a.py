"""All-to-all: every rank gets all tokens of some heads, computes one plain call, and sends the results back.

Two all-to-alls forward (of q, k, v; of out) and two backward (of dout; of dq, dk, dv), in the tensors' dtype. There
are no sections and no merging, so any mask is supported; the number of key-value heads must be a multiple of the ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.layout import LAYOUTS, Layout
from mla_plugin.context_parallel.call import Backward, Call, Forward, Saved
from mla_plugin.context_parallel.failure import Watch
from mla_plugin.context_parallel.group import Group
from mla_plugin.context_parallel.order import by_rank, in_order, order_of
from mla_plugin.context_parallel.transport import exchange
from mla_plugin.hooks.attention import AttentionRequest


def refusals(request: AttentionRequest, size: int) -> Iterator[str]:
    """Every reason why ``a2a`` cannot compute the request."""
    if request.num_kv_heads % size:
        yield (
            f"num_kv_heads={request.num_kv_heads} over {size} ranks, expected a multiple of {size}; "
            "cp_comm_type='p2p' or 'all_gather' takes any number"
        )


def requests(call: Call) -> tuple[AttentionRequest, ...]:
    """The request of every rank: whole sequences, with its share of the heads."""
    return (_whole(call.request, call.group.size),)


@functools.lru_cache(maxsize=4096)
def _whole(request: AttentionRequest, size: int) -> AttentionRequest:
    return request.replace(
        num_heads=request.num_heads // size,
        num_kv_heads=request.num_kv_heads // size,
        max_seqlen_q=request.max_seqlen_q * size,
        max_seqlen_kv=request.max_seqlen_kv * size,
    )


def forward(call: Call, watch: Watch, *, wants_lse: bool) -> Forward:
    """out and lse of this rank's tokens; q, k, v, out and lse of its heads are kept for the backward.

    Without ``wants_lse`` lse is not exchanged, and uninitialised memory of its shape is returned.
    """
    tensors, heads = call.tensors, Heads(call.group, call.layout)
    order_q, order_kv = orders(call)
    watch.begin()
    q = heads.gather(tensors.q, order_q)
    k, v = (heads.gather(x, order_kv) for x in (tensors.k, tensors.v))
    (request,) = requests(call)
    output = watch.attempt(call.forward, request, _tensors(call, q, k, v))
    shape, lse_shape = (*q.shape[:-1], v.shape[-1]), call.layout.lse_shape(q.shape)
    out = q.new_empty(shape) if output is None else output.out
    lse = q.new_empty(lse_shape, dtype=call.wide) if output is None else output.lse
    kept = [q, k, v, out, lse] if call.request.is_training else []
    inverse = None if order_q is None else order_q.argsort()
    own = tensors.q.new_empty(call.layout.lse_shape(tensors.q.shape), dtype=call.wide)
    if wants_lse:
        own = heads.scatter_rows(lse, inverse)
    return heads.scatter(out, inverse), own, kept


def backward(call: Call, saved: Saved, dout: torch.Tensor, dlse: torch.Tensor | None, watch: Watch) -> Backward:
    """dq, dk and dv of this rank's tokens; ``saved`` is what the forward kept."""
    heads = Heads(call.group, call.layout)
    order_q, order_kv = orders(call)
    watch.begin()
    dout = heads.gather(dout, order_q)
    dlse = None if dlse is None else heads.gather_rows(dlse, order_q)
    (request,) = requests(call)
    q, k, v = saved.q, saved.k, saved.v
    found = watch.attempt(call.backward, request, _tensors(call, q, k, v), saved.output, dout, dlse)
    dq, dk, dv = found or (torch.empty_like(x) for x in (q, k, v))
    inverse_q, inverse_kv = (None if order is None else order.argsort() for order in (order_q, order_kv))
    return heads.scatter(dq, inverse_q), heads.scatter(dk, inverse_kv), heads.scatter(dv, inverse_kv)


def _tensors(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> AttentionTensors:
    return replace(call.tensors, q=q, k=k, v=v, cu_seqlens_kv=call.cu_seqlens_kv)


def orders(call: Call) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``packed_order`` of the queries and of the keys; None in dense layouts."""
    tensors, layout, size = call.tensors, call.layout, call.group.size
    of_q = order_of(tensors.q, layout, tensors.cu_seqlens_q, tensors.cu_seqlens_q_padded, size)
    is_shared = tensors.cu_seqlens_q is tensors.cu_seqlens_kv and (
        tensors.cu_seqlens_q_padded is tensors.cu_seqlens_kv_padded
    )
    if is_shared and tensors.k.shape[0] == tensors.q.shape[0]:
        return of_q, of_q
    return of_q, order_of(tensors.k, layout, tensors.cu_seqlens_kv, tensors.cu_seqlens_kv_padded, size)


class Heads:
    """Exchanges between a rank's tokens of all heads and all tokens of its heads.

    Args:
        group: the ranks; rank r gets the r-th share of the heads.
        layout: of q, k, v and out.
    """

    def __init__(self, group: Group, layout: Layout) -> None:
        self._group, self._layout = group, layout

    def gather(self, x: torch.Tensor, order: torch.Tensor | None, layout: Layout | None = None) -> torch.Tensor:
        """[tokens / size, heads] to [tokens, heads / size], tokens in order; ``order`` as for ``in_order``."""
        layout = layout or self._layout
        shares = x.unflatten(layout.heads, (self._group.size, -1)).movedim(layout.heads, 0)
        return in_order(exchange(self._group, shares.contiguous()), layout, order)

    def scatter(self, x: torch.Tensor, inverse: torch.Tensor | None, layout: Layout | None = None) -> torch.Tensor:
        """The inverse of ``gather``; ``inverse`` as for ``by_rank``."""
        layout = layout or self._layout
        shares = exchange(self._group, by_rank(x, layout, self._group.size, inverse))
        return shares.movedim(0, layout.heads).flatten(layout.heads, layout.heads + 1)

    @functools.cached_property
    def _of_rows(self) -> Layout:
        """lse with one number as its head dimension: [B, H, S, 1], packed [T, H, 1]."""
        return self._layout if self._layout.is_packed else LAYOUTS["bhsd"]

    def gather_rows(self, x: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
        """``gather`` of lse's shape."""
        rows = x.t() if self._layout.is_packed else x
        whole = self.gather(rows.unsqueeze(-1), order, self._of_rows).squeeze(-1)
        return whole.t().contiguous() if self._layout.is_packed else whole

    def scatter_rows(self, x: torch.Tensor, inverse: torch.Tensor | None) -> torch.Tensor:
        """``scatter`` of lse's shape."""
        rows = (x.t() if self._layout.is_packed else x).unsqueeze(-1).contiguous()
        own = self.scatter(rows, inverse, self._of_rows).squeeze(-1)
        return own.t().contiguous() if self._layout.is_packed else own
