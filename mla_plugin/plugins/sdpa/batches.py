"""The CPU's road: sequences of equal lengths run as one batch, so padding costs nothing and no mask describes it.

TransformerEngine's unfused attention unpacks ``thd`` to a padded batch and builds the whole mask.

A batch is computed in parts, because a route holds copies of its part in float32, of one head dim for Q, K and V. The
parts are small against the call, so that memory stays near what PyTorch's own attention takes, and near a cache's size,
but not so small that the host's time for a part counts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.layout import empty_output
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, Gradients, Residuals
from mla_plugin.plugins.sdpa import blocked, flash
from mla_plugin.plugins.sdpa.groups import Group, groups
from mla_plugin.plugins.sdpa.ragged import is_ragged
from mla_plugin.plugins.sdpa.terms import Terms

PARTS = 16
"""Parts that a large call aims at."""
LEAST_ELEMENTS, MOST_ELEMENTS = 1 << 16, 1 << 18
"""Bounds of a part's largest tensor, unless a single sequence or head has more."""
ROWS_PER_THREAD = 256
"""The flash kernel's forward shares out its heads and blocks of at most this many queries, its backward heads alone."""


def _parts(
    request: AttentionRequest, tensors: AttentionTensors, *, use_kernel: bool, is_backward: bool
) -> Iterator[Group]:
    """The call's sequences in parts; those of the blocks are the same in both passes, whose dropout is drawn by part."""
    threads = torch.get_num_threads()
    num_heads, num_kv_heads = request.num_heads, request.num_kv_heads
    whole = max(tensors.q.numel(), tensors.k.numel(), tensors.v.numel())
    limit = min(max(whole // PARTS, LEAST_ELEMENTS), MOST_ELEMENTS)
    head_dim = max(request.head_dim_qk, request.head_dim_v)
    for group in groups(request, tensors):
        len_q, len_kv = group.q.length, group.kv.length
        elements = max(len_q * num_heads, len_kv * num_kv_heads) * head_dim
        if not use_kernel or elements <= limit:
            yield from group.by_sequences(max(1, limit // elements))
            continue
        busy = num_heads // num_kv_heads * (1 if is_backward else -(-len_q // ROWS_PER_THREAD))
        heads = max(limit * num_kv_heads // elements, -(-threads // busy))
        for sequence in group.by_sequences(max(1, heads // num_kv_heads)):
            if len(sequence.q.firsts) > 1:
                yield sequence
            else:
                yield from sequence.by_heads(heads, num_heads, num_kv_heads)


def _is_whole(request: AttentionRequest, parts: list[Group]) -> bool:
    """One part has every row of the call."""
    return len(parts) == 1 and not is_ragged(request)


def forward(request: AttentionRequest, tensors: AttentionTensors, *, use_kernel: bool) -> AttentionOutput:
    """Attention of every sequence, by the flash kernel or by blocked mathematics."""
    layout = request.layout
    q, k, v = layout.to_bhsd(tensors.q), layout.to_bhsd(tensors.k), layout.to_bhsd(tensors.v)
    terms = Terms.of(request, tensors, wants_dbias=False)
    route = flash.forward if use_kernel else blocked.forward
    parts = list(_parts(request, tensors, use_kernel=use_kernel, is_backward=False))
    if _is_whole(request, parts):
        rows, lse = route(q, k, v, terms)
        return AttentionOutput(layout.from_bhsd(rows).to(q.dtype).contiguous(), lse.contiguous())
    out = empty_output(tensors.q, v.shape[-1]).zero_()
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    out_rows = layout.to_bhsd(out)
    for part in parts:
        part_out, part_lse = route(part.queries(q), part.keys(k), part.keys(v), terms.of_part(part))
        part.write_queries(out_rows, part_out)
        part.write_queries(lse, part_lse)
    return AttentionOutput(out, lse.squeeze(0) if layout.is_packed else lse)


def backward(
    request: AttentionRequest, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None, *, use_kernel: bool
) -> Gradients:
    """Gradients of every sequence, by the flash kernel or by blocked mathematics."""
    tensors, layout = residuals.tensors, request.layout
    inputs = (tensors.q, tensors.k, tensors.v)
    q, k, v, out, dout = (layout.to_bhsd(x) for x in (*inputs, residuals.out, dout))
    lse = residuals.lse.unsqueeze(0) if layout.is_packed else residuals.lse
    dlse = dlse.unsqueeze(0) if layout.is_packed and dlse is not None else dlse
    terms = Terms.of(request, tensors, wants_dbias=request.bias_requires_grad)
    route = flash.backward if use_kernel else blocked.backward
    parts = list(_parts(request, tensors, use_kernel=use_kernel, is_backward=True))
    if _is_whole(request, parts):
        results = route(q, k, v, out, lse, dout, dlse, terms)
        dq, dk, dv = (layout.from_bhsd(x).to(q.dtype).contiguous() for x in results)
        return Gradients(dq, dk, dv, dbias=terms.dbias_like(tensors.bias))
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in inputs)
    dq_rows, dk_rows, dv_rows = layout.to_bhsd(dq), layout.to_bhsd(dk), layout.to_bhsd(dv)
    for part in parts:
        results = route(
            part.queries(q),
            part.keys(k),
            part.keys(v),
            part.queries(out),
            part.queries(lse),
            part.queries(dout),
            None if dlse is None else part.queries(dlse),
            terms.of_part(part),
        )
        part.write_queries(dq_rows, results[0])
        part.write_keys(dk_rows, results[1])
        part.write_keys(dv_rows, results[2])
    return Gradients(dq, dk, dv, dbias=terms.dbias_like(tensors.bias))
