"""Requests and platforms that the tests share."""

import torch

from mla_plugin import AttentionRequest, Platform

CPU = Platform()
A100 = Platform("cuda", (8, 0), packages=(("torch", "2.13.0"), ("triton", "3.7.1")), cudnn_version=(9, 13, 0))
H100 = Platform("cuda", (9, 0), packages=(("torch", "2.13.0"), ("triton", "3.7.1")), cudnn_version=(9, 13, 0))


def mla_request(**changes: object) -> AttentionRequest:
    """DeepSeek-V3 prefill: 192/128, causal, bf16, on a CUDA device."""
    base = AttentionRequest(
        qkv_format="bshd",
        dtype=torch.bfloat16,
        device_type="cuda",
        batch_size=2,
        num_heads=16,
        num_kv_heads=16,
        max_seqlen_q=2048,
        max_seqlen_kv=2048,
        head_dim_qk=192,
        head_dim_v=128,
        attn_mask_type="causal",
        window_size=(-1, 0),
        bottom_right_diagonal=False,
    )
    return base.replace(**changes)
