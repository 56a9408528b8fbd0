"""The model that ``vllm_engine`` runs: DeepSeek-V2-Lite's shape, in vLLM's terms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "vocab_size": 102400,
    "tie_word_embeddings": False,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
TINY = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
TINY |= {"num_hidden_layers": 2, "vocab_size": 512, "bos_token_id": 500, "eos_token_id": 501}


def config(layers: int | None, is_dense: bool, is_tiny: bool) -> dict[str, Any]:
    """Of the model. Dense: each layer's MLP is that of the first, about as wide as 6 + 2 experts."""
    model = DEEPSEEK_V2_LITE | (TINY if is_tiny else {})
    model |= {} if layers is None else {"num_hidden_layers": layers}
    return model | ({"first_k_dense_replace": model["num_hidden_layers"]} if is_dense else {})


def make_model(folder: Path, layers: int | None, is_dense: bool, is_tiny: bool) -> None:
    """A configuration without weights."""
    (folder / "config.json").write_text(json.dumps(config(layers, is_dense, is_tiny)))


def step_bytes(model: dict[str, Any], batch: int, context: int) -> int:
    """What a decode step of a dense model reads at least: its weights in bfloat16, and the latent cache."""
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    latent = model["kv_lora_rank"] + model["qk_rope_head_dim"]
    nope, width = model["qk_nope_head_dim"], model["v_head_dim"]
    attention = hidden * (heads * (nope + model["qk_rope_head_dim"]) + latent + heads * width)
    attention += model["kv_lora_rank"] * heads * (nope + width)
    layer = attention + 3 * hidden * model["intermediate_size"] + batch * context * latent
    return 2 * (model["num_hidden_layers"] * layer + hidden * model["vocab_size"])
