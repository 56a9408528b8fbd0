"""Small dense calls for the tests of the fallback."""

from __future__ import annotations

from typing import Any

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, Gradients, Plan, Residuals
from mla_plugin.hooks.types import Platform
from mla_plugin.plugins import sdpa


def request(**changes: Any) -> AttentionRequest:
    """A small MLA call on the CPU."""
    base = AttentionRequest(
        qkv_format="bshd",
        dtype=torch.float32,
        device_type="cpu",
        batch_size=1,
        num_heads=2,
        num_kv_heads=1,
        max_seqlen_q=64,
        max_seqlen_kv=64,
        head_dim_qk=24,
        head_dim_v=16,
        attn_mask_type="causal",
        bottom_right_diagonal=False,
        is_training=True,
    )
    return base.replace(**changes)


def tensors(call: AttentionRequest, device: str = "cpu", **changes: Any) -> AttentionTensors:
    """Random tensors of a dense bshd call."""
    shape = (call.batch_size, call.max_seqlen_q, call.num_heads, call.head_dim_qk)
    keys = (call.batch_size, call.max_seqlen_kv, call.num_kv_heads)
    q, k, v = (
        torch.randn(s, dtype=call.dtype, device=device)
        for s in (shape, (*keys, call.head_dim_qk), (*keys, call.head_dim_v))
    )
    return AttentionTensors(q, k, v, call.head_dim_qk**-0.5, **changes)


def both_passes(
    call: AttentionRequest, given: AttentionTensors, *, dlse: torch.Tensor | None = None
) -> tuple[AttentionOutput, Gradients]:
    plan = Plan(call, Platform(call.device_type), "sdpa", "sdpa")
    output = sdpa.forward(plan, given)
    residuals = Residuals(given, output.out, output.lse)
    return output, sdpa.backward(plan, residuals, torch.randn_like(output.out), dlse)
