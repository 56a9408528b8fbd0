"""The TransformerEngine adapter over TransformerEngine as it is installed, compiled extension and all."""

from __future__ import annotations

import pytest
import torch

import mla_plugin

pytestmark = [pytest.mark.gpu, pytest.mark.peer("TransformerEngine")]


@pytest.mark.parametrize("mask", ["causal", "no_mask"])
def test_it_computes_what_transformer_engine_does(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own attention, fused or not, and ours with NVTE_MLA_TRITON=1: output and gradients, in bfloat16."""
    from transformer_engine.pytorch import DotProductAttention

    mla_plugin.register("transformer_engine")
    module = DotProductAttention(8, (192, 128), qkv_format="bshd", attn_mask_type=mask, attention_dropout=0.0)
    results, q_k_v = [], [torch.randn(2, 200, 8, d, device="cuda", dtype=torch.bfloat16) for d in (192, 192, 128)]
    for text in ("0", "1"):
        monkeypatch.setenv("NVTE_MLA_TRITON", text)
        leaves = [x.detach().requires_grad_() for x in q_k_v]
        out = module(*leaves)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    for theirs, ours in zip(*results, strict=True):
        assert (theirs.double() - ours.double()).norm() <= 2**-6 * theirs.double().norm()
