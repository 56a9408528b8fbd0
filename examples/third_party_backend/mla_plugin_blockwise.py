"""Attention by blocks of queries in plain PyTorch: a whole backend for mla-plugin, from a separate package."""

from collections.abc import Iterator

import torch

import mla_plugin as mla

BLOCK = 128
COMPUTES = {
    "qkv_format": ("bshd",),
    "attn_mask_type": ("no_mask", "causal"),
    "window_size": ((-1, -1), (-1, 0)),
}


def refusals(request: mla.AttentionRequest) -> Iterator[str]:
    for name, accepted in COMPUTES.items():
        if (value := getattr(request, name)) not in accepted:
            yield f"{name}={value!r} is not one of {accepted}"
    if request.num_heads != request.num_kv_heads:
        yield f"num_heads={request.num_heads} != num_kv_heads={request.num_kv_heads}"
    yield from mla.plain_attention_refusals(request)  # dropout, bias, fp8 and what else plain attention is not


@mla.hookimpl
def select_backend(
    request: mla.AttentionRequest | mla.DecodeRequest, platform: mla.Platform
) -> mla.Accepted | mla.Refused:
    if not isinstance(request, mla.AttentionRequest):
        return mla.Refused((f"{type(request).__name__}, expected AttentionRequest",))
    reasons = tuple(refusals(request))
    return mla.Refused(reasons) if reasons else mla.Accepted(priority=1)


def score_blocks(plan: mla.Plan, t: mla.AttentionTensors) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield the rows of each block and its masked scores, [B, H, BLOCK, S_kv] in float32 or better."""
    exact = torch.promote_types(t.q.dtype, torch.float32)
    queries, keys = (torch.arange(x.shape[1], device=x.device) for x in (t.q, t.k))
    for start in range(0, t.q.shape[1], BLOCK):
        rows = slice(start, start + BLOCK)
        scores = torch.einsum("bqhd,bkhd->bhqk", t.q[:, rows].to(exact), t.k.to(exact)) * t.softmax_scale
        if plan.request.is_causal:
            scores.masked_fill_(keys > queries[rows, None], -torch.inf)
        yield rows, scores


@mla.hookimpl
def forward(plan: mla.Plan, tensors: mla.AttentionTensors) -> mla.AttentionOutput:
    q, v = tensors.q, tensors.v
    exact = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=exact)
    for rows, scores in score_blocks(plan, tensors):
        out[:, rows] = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.to(exact)).to(out.dtype)
        lse[:, :, rows] = scores.logsumexp(-1)
    return mla.AttentionOutput(out, lse)


@mla.hookimpl
def backward(plan: mla.Plan, residuals: mla.Residuals, dout: torch.Tensor, dlse: torch.Tensor | None) -> mla.Gradients:
    t, exact = residuals.tensors, residuals.lse.dtype
    q, k, v, out, dout = (x.to(exact) for x in (t.q, t.k, t.v, residuals.out, dout))
    dq, dk, dv = q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    delta = (dout * out).sum(-1).transpose(1, 2) - (0 if dlse is None else dlse)
    for rows, scores in score_blocks(plan, t):
        p = (scores - residuals.lse[:, :, rows, None]).exp()  # of the lse that is given: it may be of more keys
        dp = torch.einsum("bqhd,bkhd->bhqk", dout[:, rows], v)
        ds = p * (dp - delta[:, :, rows, None]) * t.softmax_scale
        dq[:, rows] = torch.einsum("bhqk,bkhd->bqhd", ds, k)
        dk += torch.einsum("bhqk,bqhd->bkhd", ds, q[:, rows])
        dv += torch.einsum("bhqk,bqhd->bkhd", p, dout[:, rows])
    return mla.Gradients(dq.to(t.q.dtype), dk.to(t.k.dtype), dv.to(t.v.dtype))
