"""Generate with a DeepSeek-V3 of random weights, on the best backend of this machine. Needs no download.

    python examples/transformers_generate.py

The model is tiny except for its attention, which has DeepSeek-V3's head dimensions (192 for q and k, 128 for v).
"""

from __future__ import annotations

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import mla_plugin


def build(device: str) -> DeepseekV3ForCausalLM:
    """Two layers, eight heads, weights from a fixed seed."""
    config = DeepseekV3Config(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=64,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return DeepseekV3ForCausalLM(config).to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()


def explain_prefill(model: DeepseekV3ForCausalLM, prompts: torch.Tensor) -> str:
    """Which backend the prefill of a padded batch runs on, and why not on the others."""
    batch_size, length = prompts.shape
    return mla_plugin.explain(
        mla_plugin.AttentionRequest(
            qkv_format="bshd",
            dtype=model.dtype,
            device_type=model.device.type,
            batch_size=batch_size,
            num_heads=model.config.num_attention_heads,
            num_kv_heads=model.config.num_attention_heads,
            max_seqlen_q=length,
            max_seqlen_kv=length,
            head_dim_qk=model.config.qk_nope_head_dim + model.config.qk_rope_head_dim,
            head_dim_v=model.config.v_head_dim,
            attn_mask_type="padding_causal",
            window_size=(-1, 0),
            bottom_right_diagonal=False,
            host="transformers",
        )
    )


def main() -> None:
    """Generate from two prompts of different lengths with eager attention and with the plugin."""
    mla_plugin.register("transformers")
    model = build("cuda" if torch.cuda.is_available() else "cpu")
    prompts = torch.randint(3, 1000, (2, 12), device=model.device)
    tokens = torch.ones_like(prompts)
    tokens[0, :5] = 0  # the first prompt is shorter, so it is padded on the left
    print(explain_prefill(model, prompts))
    for attn_implementation in ("eager", "mla_plugin"):
        model.set_attn_implementation(attn_implementation)
        generated = model.generate(prompts, attention_mask=tokens, max_new_tokens=8, do_sample=False)
        print(f"\n{attn_implementation}:")
        for row in generated[:, prompts.shape[1] :].tolist():
            print("  ", *row)


if __name__ == "__main__":
    main()
