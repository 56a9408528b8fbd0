"""The unfused fallback, first version: plain PyTorch on dense layouts, whole score matrix."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mla_plugin.hooks import hookimpl
from mla_plugin.layout import from_bhsd, to_bhsd
from mla_plugin.types import (
    Accepted,
    AttentionOutput,
    AttentionRequest,
    AttentionTensors,
    Gradients,
    Plan,
    Platform,
    Refused,
    Residuals,
)


def _refusals(request: AttentionRequest) -> Iterator[str]:
    if request.dropout_p:
        yield f"dropout_p={request.dropout_p} > 0"


@hookimpl
def select_backend(request: AttentionRequest, platform: Platform) -> Accepted | Refused:
    """Accept everything that plain PyTorch computes."""
    reasons = tuple(_refusals(request))
    return Refused(reasons) if reasons else Accepted()


def _attend(request: AttentionRequest, t: AttentionTensors) -> tuple[torch.Tensor, torch.Tensor]:
    if request.qkv_format == "thd":
        return _attend_packed(request, t)
    q, k, v = (to_bhsd(x, request.qkv_format) for x in (t.q, t.k, t.v))
    k, v = (x.repeat_interleave(request.num_heads // request.num_kv_heads, 1) for x in (k, v))
    s = q.float() @ k.float().transpose(-1, -2) if q.dtype != torch.float64 else q @ k.transpose(-1, -2)
    s = s * t.softmax_scale
    if t.bias is not None:
        s = s + t.bias
    B, S_q, S_kv = q.shape[0], q.shape[2], k.shape[2]
    n_q, n_kv = torch.full((B,), S_q), torch.full((B,), S_kv)
    if request.has_padding:
        n_q = t.cu_seqlens_q.diff()
        n_kv = t.cu_seqlens_kv.diff()
    i, j = torch.arange(S_q).view(1, -1, 1), torch.arange(S_kv).view(1, 1, -1)
    d = j - i - ((n_kv - n_q).view(-1, 1, 1) if request.bottom_right_diagonal else 0)
    seen = (i < n_q.view(-1, 1, 1)) & (j < n_kv.view(-1, 1, 1))
    left, right = request.window_size
    if right >= 0:
        seen = seen & (d <= right)
    if left >= 0:
        seen = seen & (d >= -left)
    seen = seen.unsqueeze(1)
    if t.attention_mask is not None:
        seen = seen & ~t.attention_mask
    s = s.masked_fill(~seen, -torch.inf)
    lse = s.logsumexp(-1)
    p = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    return from_bhsd((p.to(v.dtype) @ v), request.qkv_format), lse


def _attend_packed(request: AttentionRequest, t: AttentionTensors) -> tuple[torch.Tensor, torch.Tensor]:
    out = t.q.new_zeros((*t.q.shape[:-1], request.head_dim_v))
    lse = torch.full((t.q.shape[1], t.q.shape[0]), -torch.inf)
    outs, lses = out, lse
    starts_q = (t.cu_seqlens_q if t.cu_seqlens_q_padded is None else t.cu_seqlens_q_padded).tolist()
    starts_kv = (t.cu_seqlens_kv if t.cu_seqlens_kv_padded is None else t.cu_seqlens_kv_padded).tolist()
    for a, b, n, m in zip(starts_q, starts_kv, t.cu_seqlens_q.diff().tolist(), t.cu_seqlens_kv.diff().tolist()):
        if not n or not m:
            continue
        one = AttentionTensors(t.q[None, a : a + n], t.k[None, b : b + m], t.v[None, b : b + m], t.softmax_scale)
        mask = request.attn_mask_type.replace("padding_", "").replace("padding", "no_mask")
        o, e = _attend(request.replace(qkv_format="bshd", attn_mask_type=mask), one)
        outs = outs.slice_scatter(o[0], 0, a, a + n)
        lses = lses.slice_scatter(e[0].to(lses.dtype), 1, a, a + n)
    return outs, lses


@hookimpl
def forward(plan: Plan, tensors: AttentionTensors) -> AttentionOutput:
    """Plain PyTorch."""
    return AttentionOutput(*_attend(plan.request, tensors))


@hookimpl
def backward(plan: Plan, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
    """Autograd of the forward."""
    t = residuals.tensors
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (t.q, t.k, t.v)]
        bias = None if t.bias is None else t.bias.detach().requires_grad_()
        from dataclasses import replace

        out, lse = _attend(plan.request, replace(t, q=leaves[0], k=leaves[1], v=leaves[2], bias=bias))
        outputs, grads = [out], [dout]
        if dlse is not None:
            outputs.append(lse)
            grads.append(dlse)
        wanted = leaves if bias is None else [*leaves, bias]
        g = torch.autograd.grad(outputs, wanted, grads, allow_unused=True)
    return Gradients(*(torch.zeros_like(x) if y is None else y for x, y in zip(wanted, g)))
