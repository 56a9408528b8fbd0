"""A correct attention backend in plain PyTorch, one step a line: ``broken_attention`` breaks it line by line.

``EXACT`` is the dtype that everything is computed in and ``WEIGHTS`` the one that softmax weights and their gradients
are rounded to; None for the call's own.
"""

from dataclasses import replace  # noqa: F401, a fault may use it

import torch

from mla_plugin import Accepted, AttentionOutput, DecodeRequest, Gradients, Refused, hookimpl

EXACT = None
WEIGHTS = None
BEFORE, CACHE = [], {}


def exact_of(dtype):
    return EXACT or (torch.float64 if dtype == torch.float64 else torch.float32)


def rounded(x, request):
    return x.to(WEIGHTS or request.dtype).to(x.dtype)


def refusals(request):
    if request.dropout_p:
        yield f"dropout_p={request.dropout_p}, expected 0"
    if request.softmax_type != "vanilla":
        yield f"softmax_type={request.softmax_type!r}, expected 'vanilla'"
    if request.bias_type == "alibi":
        yield f"bias_type={request.bias_type!r}, expected the biases that are given"
    for name in ("has_score_mod", "fp8", "return_max_logit", "has_kv_cache", "context_parallel", "batch_invariant"):
        if getattr(request, name):
            yield f"{name}=True, expected False"


@hookimpl
def select_backend(request, platform):
    if isinstance(request, DecodeRequest):
        return Refused(("DecodeRequest, expected AttentionRequest",))
    reasons = tuple(refusals(request))
    return Refused(reasons) if reasons else Accepted()


def spans(request, extent, cu, padded):
    if request.qkv_format != "thd" and not request.has_padding:
        return [(0, extent)] * request.batch_size
    lengths = cu.diff().tolist()
    if request.qkv_format != "thd":
        return [(0, length) for length in lengths]
    starts = (cu if padded is None else padded)[:-1].tolist()
    return list(zip(starts, lengths, strict=True))


def four(x):
    return x[(None,) * (4 - x.dim())]


def hidden(request, t, b, len_q, len_kv):
    left, right, bottom_right = request.band.left, request.band.right, request.band.bottom_right
    offset = len_kv - len_q if bottom_right else 0
    distance = torch.arange(len_kv)[None] - torch.arange(len_q)[:, None] - offset
    mask = torch.zeros(len_q, len_kv, dtype=torch.bool)
    if left >= 0:
        mask = mask | (distance < -left)
    if right >= 0:
        mask = mask | (distance > right)
    mask = mask.expand(request.num_heads, len_q, len_kv)
    if t.attention_mask is not None:
        full = four(t.attention_mask).expand(request.batch_size, request.num_heads, -1, -1)
        mask = mask | full[b][:, :len_q, :len_kv].expand(mask.shape)
    return mask


def sequences(request, t):
    """Each sequence: its place, q, k, v of every head in the exact dtype, its scores and the group's size."""
    layout, exact = request.layout, exact_of(request.dtype)
    q, k, v = (layout.to_bhsd(x) for x in (t.q, t.k, t.v))
    spans_q = spans(request, q.shape[2], t.cu_seqlens_q, t.cu_seqlens_q_padded)
    spans_kv = spans(request, k.shape[2], t.cu_seqlens_kv, t.cu_seqlens_kv_padded)
    group = request.num_heads // request.num_kv_heads
    for b, ((start_q, len_q), (start_kv, len_kv)) in enumerate(zip(spans_q, spans_kv, strict=True)):
        row = 0 if layout.is_packed else b
        rows, columns = slice(start_q, start_q + len_q), slice(start_kv, start_kv + len_kv)
        q_b, k_b, v_b = q[row, :, rows], k[row, :, columns], v[row, :, columns]
        q_b, k_b, v_b = q_b.to(exact), k_b.to(exact), v_b.to(exact)
        k_b, v_b = k_b.repeat_interleave(group, 0), v_b.repeat_interleave(group, 0)
        scores = q_b @ k_b.mT
        if t.bias is not None:
            bias = four(t.bias).expand(request.batch_size, request.num_heads, -1, -1)[b].to(exact)
            bias = bias.expand(-1, q.shape[2], k.shape[2])[:, :len_q, :len_kv]
        if request.bias_type == "pre_scale_bias":
            scores = scores + bias
        scores = scores * t.softmax_scale
        if request.bias_type == "post_scale_bias":
            scores = scores + bias
        scores = scores.masked_fill(hidden(request, t, b, len_q, len_kv), -torch.inf)
        yield (b, row, rows, columns), (q_b, k_b, v_b), scores, group


@hookimpl
def forward(plan, tensors):
    request, t = plan.request, tensors
    layout, exact = request.layout, exact_of(request.dtype)  # noqa: F841, a fault may use it
    out = t.q.new_zeros((*t.q.shape[:-1], t.v.shape[-1]))
    lse = t.q.new_full(layout.to_bhsd(t.q).shape[:-1], -torch.inf, dtype=torch.promote_types(t.q.dtype, torch.float32))
    for (_, row, rows, _), (_, _, v), scores, _ in sequences(request, t):
        if not scores.shape[-1]:
            continue
        top = scores.amax(-1, keepdim=True)
        top = top.masked_fill(top.isneginf(), 0.0)
        weights = (scores - top).exp()
        total = weights.sum(-1, keepdim=True)
        result = rounded(weights, request) @ v / total.masked_fill(total == 0, 1.0)
        layout.to_bhsd(out)[row, :, rows] = result.to(out.dtype)
        lse[row, :, rows] = (top + total.log()).squeeze(-1).to(lse.dtype)
    return AttentionOutput(out, lse.squeeze(0) if layout.is_packed else lse)


def add_bias_gradient(dbias, ds, request, t, b):
    factor = t.softmax_scale if request.bias_type == "pre_scale_bias" else 1.0
    dbias = four(dbias)
    target = dbias[b if dbias.shape[0] > 1 else 0]
    for axis in (0, 1, 2):
        ds = ds.sum(axis, keepdim=True) if target.shape[axis] == 1 else ds
    target[:, : ds.shape[1], : ds.shape[2]] += ds * factor


@hookimpl
def backward(plan, residuals, dout, dlse):
    request, t = plan.request, residuals.tensors
    layout, exact = request.layout, exact_of(request.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype) for x in (t.q, t.k, t.v))
    dbias = torch.zeros(t.bias.shape, dtype=exact) if request.bias_requires_grad else None
    out, dout = (layout.to_bhsd(x).to(exact) for x in (residuals.out, dout))
    lse = (residuals.lse[None] if layout.is_packed else residuals.lse).to(exact)
    if dlse is not None:
        dlse = (dlse[None] if layout.is_packed else dlse).to(exact)
    for (b, row, rows, columns), (q, k, v), scores, group in sequences(request, t):
        lse_b, do = lse[row, :, rows], dout[row, :, rows]
        weights = (scores - lse_b.masked_fill(lse_b.isneginf(), torch.inf)[..., None]).exp()
        delta = (do * out[row, :, rows]).sum(-1)
        if dlse is not None:
            delta = delta - dlse[row, :, rows]
        seen = weights != 0
        delta, do = (x.masked_fill(~seen.any(-1).view(*x.shape[:2], *[1] * (x.dim() - 2)), 0.0) for x in (delta, do))
        ds = weights * (do @ v.mT - delta[..., None])
        if dbias is not None:
            add_bias_gradient(dbias, ds, request, t, b)
        ds, weights = rounded(ds, request), rounded(weights, request)
        dq_b = ds @ k * t.softmax_scale
        dk_b = ds.mT @ q * t.softmax_scale
        dv_b = weights.mT @ do
        dk_b, dv_b = (x.unflatten(0, (-1, group)).sum(1) for x in (dk_b, dv_b))
        layout.to_bhsd(dq)[row, :, rows] = dq_b.to(dq.dtype)
        layout.to_bhsd(dk)[row, :, columns] = dk_b.to(dk.dtype)
        layout.to_bhsd(dv)[row, :, columns] = dv_b.to(dv.dtype)
    return Gradients(dq, dk, dv, None if dbias is None else dbias.to(t.q.dtype))
