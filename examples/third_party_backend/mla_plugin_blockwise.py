"""Attention by blocks of queries in plain PyTorch: a whole backend for mla-plugin, from a package of its own."""

import torch

import mla_plugin
from mla_plugin import Accepted, AttentionOutput, AttentionTensors, Gradients, Plan, Refused, Residuals, hookimpl

BLOCK = 128
COMPUTES = {
    "qkv_format": ("bshd",),
    "attn_mask_type": ("no_mask", "causal"),
    "has_sliding_window": (False,),
    "bias_type": ("no_bias",),
    "dropout_p": (0.0,),
    "softmax_type": ("vanilla",),
    "fp8": (False,),
    "has_kv_cache": (False,),
    "has_score_mod": (False,),
    "return_max_logit": (False,),
    "context_parallel": (False,),
}


@hookimpl
def select_backend(request: mla_plugin.AttentionRequest, platform: mla_plugin.Platform) -> Accepted | Refused:
    asked = {name: getattr(request, name) for name in COMPUTES}
    reasons = [
        f"{name}={asked[name]!r} is not in {COMPUTES[name]}" for name in asked if asked[name] not in COMPUTES[name]
    ]
    if request.attn_mask_type == "no_mask" and request.is_causal:
        reasons.append(f"window_size={request.window_size} without a causal mask")
    return Refused(tuple(reasons)) if reasons else Accepted(priority=1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, is_causal: bool) -> list[torch.Tensor]:
    """Return out [B, S_q, H, head_dim_v] and lse [B, H, S_q], with the scores of BLOCK queries at a time."""
    exact = torch.promote_types(q.dtype, torch.float32)
    q, keys = q.unflatten(2, (k.shape[2], -1)), torch.arange(k.shape[1], device=k.device)
    blocks = []
    for start in range(0, max(q.shape[1], 1), BLOCK):
        scores = torch.einsum("bqhgd,bkhd->bhgqk", q[:, start : start + BLOCK].to(exact), k.to(exact)) * scale
        if is_causal:
            queries = torch.arange(start, start + scores.shape[-2], device=q.device)
            scores = scores.masked_fill(keys > queries[:, None], -torch.inf)
        out = torch.einsum("bhgqk,bkhd->bqhgd", scores.softmax(-1), v.to(exact)).to(v.dtype)
        blocks.append((out.flatten(2, 3), scores.logsumexp(-1).flatten(1, 2)))
    return [torch.cat(parts, dim) for parts, dim in zip(zip(*blocks, strict=True), (1, 2), strict=True)]


@hookimpl
def forward(plan: Plan, tensors: AttentionTensors) -> AttentionOutput:
    t = tensors
    return AttentionOutput(*attend(t.q, t.k, t.v, t.softmax_scale, plan.request.is_causal))


@hookimpl
def backward(plan: Plan, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
    t = residuals.tensors
    inputs = [x.detach().requires_grad_() for x in (t.q, t.k, t.v)]
    with torch.enable_grad():
        out, lse = attend(*inputs, t.softmax_scale, plan.request.is_causal)
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    return Gradients(*torch.autograd.grad((out, lse), inputs, (dout, dlse)))
