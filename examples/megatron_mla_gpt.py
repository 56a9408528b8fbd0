"""Train a tiny GPT with Multi-head Latent Attention in Megatron-Core, without TransformerEngine. Needs no download.

    pip install "mla-plugin[megatron]" && python examples/megatron_mla_gpt.py

Megatron-Core cannot build MLA without TransformerEngine by itself: its own core attention does not know head dimensions
that differ. Here every layer attends through mla_plugin. The same model is trained a second time through an attention
written out in plain PyTorch; the losses must be equal.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig

from mla_plugin.compat.megatron import MLACoreAttention, mla_gpt_layer_spec

STEPS, BATCH_SIZE, LENGTH = 8, 4, 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class PlainCoreAttention(MLACoreAttention):
    """The same constructor, and causal attention with its whole score matrix."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *mask: Any, **rest: Any) -> Any:
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * self.softmax_scale
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        return torch.einsum("bhqk,kbhd->qbhd", weights, value).flatten(2)


def start_megatron() -> None:
    """One process is the whole world. Megatron asks CUDA for its device; without a GPU the answer is the CPU."""
    if DEVICE == "cpu":
        torch.cuda.current_device = lambda: "cpu"
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    if DEVICE == "cuda":
        model_parallel_cuda_manual_seed(0)


def build(core_attention: type) -> GPTModel:
    """Two layers, four heads, weights from a fixed seed; DeepSeek-V3's head dimensions, 192 for q and k, 128 for v."""
    config = MLATransformerConfig(
        num_layers=2,
        hidden_size=128,
        ffn_hidden_size=256,
        num_attention_heads=4,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_head_dim=128,
        qk_pos_emb_head_dim=64,
        v_head_dim=128,
        rope_type="rope",
        rotary_base=10000,
        normalization="RMSNorm",
        qk_layernorm=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
    )
    spec = mla_gpt_layer_spec(normalization="RMSNorm", qk_layernorm=True)
    spec.submodules.self_attention.submodules.core_attention = ModuleSpec(module=core_attention)
    torch.manual_seed(0)
    return GPTModel(config, spec, vocab_size=256, max_sequence_length=LENGTH, position_embedding_type="rope").to(DEVICE)


def train(model: GPTModel) -> list[float]:
    """Losses of a few steps of predicting the next byte of this file."""
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long().to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    positions = torch.arange(LENGTH, device=DEVICE).expand(BATCH_SIZE, -1)
    losses = []
    for _ in range(STEPS):
        starts = torch.randint(len(text) - LENGTH, (BATCH_SIZE,), generator=generator)
        rows = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        loss = model(rows[:, :-1], positions, None, labels=rows[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> int:
    """Print both rows of losses; 1 where they differ."""
    start_megatron()
    ours, plain = (train(build(core)) for core in (MLACoreAttention, PlainCoreAttention))
    for step, losses in enumerate(zip(ours, plain, strict=True)):
        print(f"step {step}  mla_plugin {losses[0]:.5f}  plain {losses[1]:.5f}")
    is_equal = torch.allclose(torch.tensor(ours), torch.tensor(plain), rtol=1e-4)
    print("the losses are equal" if is_equal else "the losses differ")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
