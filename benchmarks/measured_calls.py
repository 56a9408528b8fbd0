"""Rows of the kept results as requests, and what the resolver of this checkout runs for them.

The choice that a row holds is that of the run, which may have been made before the table that it led to.
"""

from __future__ import annotations

from typing import Any

import torch

from mla_plugin import AttentionRequest, DecodeRequest, Platform
from mla_plugin.arguments.decode import Profile
from mla_plugin.resolver import attention_speed, decode_preference

HOPPER = (9, 0)
TRITON = (("triton", "3.6.0"),)
"""That of the kept runs. Without a Triton that compiles the Hopper kernels the resolver counts with the plain ones."""


def attention_request(row: dict[str, Any], is_training: bool) -> AttentionRequest:
    """Of a row of ``prefill_backends``."""
    window = (row["mask"], 0) if isinstance(row["mask"], int) else (-1, -1)
    return AttentionRequest(
        qkv_format="thd" if row["packed"] else "bshd",
        dtype=torch.bfloat16,
        device_type="cuda",
        batch_size=row["batch"],
        num_heads=row["heads"],
        num_kv_heads=row["kv_heads"],
        max_seqlen_q=row["longest"],
        max_seqlen_kv=row["longest"],
        head_dim_qk=row["dims"][0],
        head_dim_v=row["dims"][1],
        attn_mask_type="no_mask" if row["mask"] == "full" else "causal_bottom_right",
        window_size=window,
        is_training=is_training,
        deterministic=row["deterministic"],
    )


def attention_choice(row: dict[str, Any], gpu: str, direction: str) -> str:
    """The backend that the resolver's table puts first for a pass, of those that were measured."""
    platform = Platform("cuda", HOPPER, TRITON, device_name=gpu)
    fused = [name for name in row[direction] if name != "sdpa"]
    return attention_speed.fastest_first(attention_request(row, True), platform, fused, direction)[0]


def decode_choice(row: dict[str, Any], gpu: str) -> str:
    """The backend that the resolver's table puts first, of those that were measured."""
    request = DecodeRequest(
        torch.bfloat16,
        "cuda",
        batch_size=row["B"],
        seqlen_q=row["S_q"],
        num_heads=row["H"],
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        max_seqlen_kv=row["longest"],
        page_size=row["page"],
        has_seqlens_kv=True,
        has_host_lengths=True,
        profile=Profile.rounded(row["mean"], row["longest"] / row["mean"]),
    )
    order = decode_preference.measured_order(request, Platform("cuda", HOPPER, TRITON, device_name=gpu))
    return next(name for name in order if name in row["ms"])
