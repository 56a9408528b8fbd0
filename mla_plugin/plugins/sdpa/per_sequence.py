"""The CPU's road: every sequence is a slice of its own, so padding costs nothing and no mask describes it.

TransformerEngine's unfused attention unpacks ``thd`` to a padded batch and builds the whole mask; running the sequences
one by one is what its PR #3063 proposes.
"""

from __future__ import annotations

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.layout import empty_output
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, Gradients, Residuals
from mla_plugin.plugins.sdpa import blocked, flash
from mla_plugin.plugins.sdpa.ragged import sequences
from mla_plugin.plugins.sdpa.terms import Terms


def forward(request: AttentionRequest, tensors: AttentionTensors, *, use_kernel: bool) -> AttentionOutput:
    """Attention of every sequence, by the flash kernel or by blocked mathematics."""
    q, k, v = (request.layout.to_bhsd(x) for x in (tensors.q, tensors.k, tensors.v))
    out = empty_output(tensors.q, v.shape[-1]).zero_()
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    out_rows = request.layout.to_bhsd(out)
    terms = Terms.of(request, tensors, wants_dbias=False)
    route = flash.forward if use_kernel else blocked.forward
    for sequence in sequences(request, tensors):
        part = (sequence.query_part(q), sequence.key_part(k), sequence.key_part(v))
        part_out, part_lse = route(*part, terms.of_sequence(sequence))
        sequence.query_part(out_rows).copy_(part_out)
        sequence.query_part(lse).copy_(part_lse)
    return AttentionOutput(out, lse.squeeze(0) if request.qkv_format == "thd" else lse)


def backward(
    request: AttentionRequest, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None, *, use_kernel: bool
) -> Gradients:
    """Gradients of every sequence, by the flash kernel or by blocked mathematics."""
    tensors, is_thd = residuals.tensors, request.qkv_format == "thd"
    inputs = (tensors.q, tensors.k, tensors.v)
    gradients = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in inputs]
    q, k, v, out, dout = (request.layout.to_bhsd(x) for x in (*inputs, residuals.out, dout))
    dq, dk, dv = (request.layout.to_bhsd(x) for x in gradients)
    lse = residuals.lse.unsqueeze(0) if is_thd else residuals.lse
    dlse = dlse.unsqueeze(0) if is_thd and dlse is not None else dlse
    terms = Terms.of(request, tensors, wants_dbias=request.bias_requires_grad)
    route = flash.backward if use_kernel else blocked.backward
    for sequence in sequences(request, tensors):
        part = (sequence.query_part(q), sequence.key_part(k), sequence.key_part(v))
        out_part, lse_part, dout_part = (sequence.query_part(x) for x in (out, lse, dout))
        dlse_part = None if dlse is None else sequence.query_part(dlse)
        results = route(*part, out_part, lse_part, dout_part, dlse_part, terms.of_sequence(sequence))
        sequence.query_part(dq).copy_(results[0])
        sequence.key_part(dk).copy_(results[1])
        sequence.key_part(dv).copy_(results[2])
    return Gradients(gradients[0], gradients[1], gradients[2], dbias=terms.dbias_like(tensors.bias))
