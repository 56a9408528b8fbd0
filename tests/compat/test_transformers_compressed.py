"""DeepSeek-V4: its layers append keys, each made of several tokens, after the model has made the mask."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from tests.compat.test_transformers_models import VOCABULARY, flash_attention_kwargs, packed, tokens_of

if not hasattr(transformers, "DeepseekV4Config"):
    pytest.skip("not in older releases of transformers", allow_module_level=True)


@pytest.fixture(scope="module")
def models() -> tuple[torch.nn.Module, torch.nn.Module]:
    """The same weights with the plugin and with eager attention; a window of 6 tokens, a key for every 4."""
    torch.manual_seed(0)
    eager = transformers.DeepseekV4ForCausalLM(
        transformers.DeepseekV4Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            head_dim=8,
            qk_rope_head_dim=8,
            q_lora_rank=12,
            o_groups=2,
            o_lora_rank=8,
            n_routed_experts=4,
            num_local_experts=4,
            num_experts_per_tok=2,
            index_n_heads=2,
            index_head_dim=16,
            index_topk=4,
            sliding_window=6,
            layer_types=["compressed_sparse_attention", "sliding_attention"],
            mlp_layer_types=["moe", "moe"],
            max_position_embeddings=128,
            initializer_range=0.2,
            pad_token_id=0,
        )
    ).eval()
    for parameter in eager.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    eager.set_attn_implementation("eager")
    eager.set_experts_implementation("eager")
    plugin = copy.deepcopy(eager)
    plugin.set_attn_implementation("mla_plugin")
    return plugin, eager


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_padded_batches(models, padding):
    ids, mask = tokens_of(padding)
    with torch.no_grad():
        found, expected = (model(ids, attention_mask=mask).logits[mask.bool()] for model in models)
        tokens = [model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False) for model in models]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(*tokens)


def test_lengths_of_packed_sequences_are_refused(models):
    """The keys of several tokens are made across their borders, with every attention."""
    with pytest.raises(ValueError, match="packed sequences: DeepseekV4Attention compresses keys across their borders"):
        models[0](**packed(**flash_attention_kwargs()))


def test_a_bool_mask_is_refused(models):
    """The layer appends additive columns, 0 and minus infinity, in the dtype of the mask."""
    ids, _ = tokens_of("none")
    causal = torch.ones(9, 9, dtype=torch.bool).tril().expand(3, 1, 9, 9)
    with pytest.raises(ValueError, match="a bool 4-D attention mask: DeepseekV4Attention appends additive columns"):
        models[0](ids, attention_mask=causal)
    additive = torch.zeros(causal.shape).masked_fill(~causal, torch.finfo(torch.float32).min)
    with torch.no_grad():
        found, expected = (model(ids, attention_mask=additive).logits for model in models)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
