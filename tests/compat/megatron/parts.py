"""What the tests share: configurations, random tensors, and attention as its definition in float64."""

from __future__ import annotations

import itertools

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import MLATransformerConfig

from mla_plugin.compat.megatron import MLACoreAttention

H, D_QK, D_V = 4, 24, 16
SCALE = 0.37


def config(**changes) -> MLATransformerConfig:
    """A small MLA model in float64; head dimensions 24 (16 without and 8 with rotary embedding) and 16."""
    options = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": H,
        "q_lora_rank": 20,
        "kv_lora_rank": 12,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": D_V,
        "rope_type": "rope",
        "rotary_base": 10000,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "add_bias_linear": False,
        "init_method_std": 0.3,
        "use_cpu_initialization": True,
        "params_dtype": torch.float64,
    }
    return MLATransformerConfig(**{**options, **changes})


def core(mask: AttnMaskType = AttnMaskType.causal, *, layer_number=1, v_channels=D_V, **changes) -> MLACoreAttention:
    """As an MLA layer builds it."""
    return MLACoreAttention(
        config=config(**changes),
        layer_number=layer_number,
        attn_mask_type=mask,
        attention_type="self",
        softmax_scale=SCALE,
        k_channels=D_QK,
        v_channels=v_channels,
        cp_comm_type=None,
    )


def tensors(s_q, s_kv=None, batch=(2,), kv_heads=H, head_dim_v=D_V, dtype=torch.float64) -> list[torch.Tensor]:
    """q, k, v that require gradients: [S, B, H, D], or packed [T, H, D] with an empty ``batch``."""
    s_kv = s_q if s_kv is None else s_kv
    shapes = (s_q, *batch, H, D_QK), (s_kv, *batch, kv_heads, D_QK), (s_kv, *batch, kv_heads, head_dim_v)
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def scores(q, k, visible, scale=SCALE) -> torch.Tensor:
    """[B, H, S_q, S_kv] in float64, -inf where not visible; q and k are [S, B, H, D]."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    return (torch.einsum("qbhd,kbhd->bhqk", q.double(), k.double()) * scale).masked_fill(~visible, -torch.inf)


def reference(q, k, v, visible, scale=SCALE) -> torch.Tensor:
    """[S_q, B, H * head_dim_v]; every query sees a key."""
    v = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    return torch.einsum("bhqk,kbhd->qbhd", scores(q, k, visible, scale).softmax(-1), v.double()).flatten(2)


def causal(s_q: int, s_kv: int | None = None, diagonal: int = 0) -> torch.Tensor:
    return torch.ones(s_q, s_q if s_kv is None else s_kv, dtype=torch.bool).tril(diagonal)


def packed_reference(q, k, v, spans, scale=SCALE, visible=causal) -> torch.Tensor:
    """[T, H * head_dim_v] for packed tensors; ``spans`` are ((first, last), (first, last)) of q and of k and v."""
    out = torch.zeros(q.shape[0], q.shape[1] * v.shape[-1], dtype=torch.float64)
    for (q0, q1), (k0, k1) in spans:
        if q1 > q0:
            parts = (x.unsqueeze(1) for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
            out[q0:q1] = reference(*parts, visible(q1 - q0, k1 - k0), scale).squeeze(1)
    return out


def cumulative(lengths) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def packing(lengths, slots=None) -> tuple[PackedSeqParams, list]:
    """Megatron's description of sequences of these lengths, each in its slot, and the same as spans."""
    padded = None if slots is None else cumulative(slots)
    starts = (cumulative(lengths) if padded is None else padded).tolist()
    lengths_of = cumulative(lengths)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=lengths_of,
        cu_seqlens_kv=lengths_of,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    spans = [(start, start + length) for start, length in zip(starts, lengths, strict=False)]
    return params, list(zip(spans, spans, strict=True))


def assert_equal(out, expected, leaves, *, dout=None) -> None:
    """Outputs, and gradients of the leaves under one random dout."""
    assert out.shape == expected.shape
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-11)
    dout = torch.randn_like(expected) if dout is None else dout
    found = torch.autograd.grad(out, leaves, dout)
    for name, x, wanted in zip("qkv", found, torch.autograd.grad(expected, leaves, dout), strict=True):
        torch.testing.assert_close(x, wanted, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"d{name}: {text}")
