"""Gemma 4: before the layers that share keys and values it leaves out queries, and cuts them out of the masks."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from tests.compat.test_transformers_models import VOCABULARY, tokens_of

if not hasattr(transformers, "Gemma4TextConfig"):
    pytest.skip("not in older releases of transformers", allow_module_level=True)


@pytest.fixture(scope="module")
def models() -> tuple[torch.nn.Module, torch.nn.Module]:
    """The same weights with the plugin and with eager attention; the last two of four layers share."""
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(
        vocab_size=VOCABULARY,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size=32,
        hidden_size_per_layer_input=8,
        intermediate_size=48,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=8,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=128,
        initializer_range=0.2,
        pad_token_id=0,
    )
    eager = transformers.Gemma4ForCausalLM(config).eval()
    eager.set_attn_implementation("eager")
    plugin = copy.deepcopy(eager)
    plugin.set_attn_implementation("mla_plugin")
    return plugin, eager


@pytest.mark.parametrize("kept", [0, 1, 3])
@pytest.mark.parametrize("padding", ["none", "left", "right", "holes"])
def test_logits_of_the_last_tokens(models, padding, kept):
    ids, mask = tokens_of(padding)
    with torch.no_grad():
        found, expected = (model(ids, attention_mask=mask, logits_to_keep=kept).logits for model in models)
    read = mask[:, -kept:].bool() if kept else mask.bool()
    torch.testing.assert_close(found[read], expected[read], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("padding", ["none", "left"])
def test_generate(models, padding, cache):
    ids, mask = tokens_of(padding)
    arguments = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    found, expected = (model.generate(ids, **arguments) for model in models)
    assert torch.equal(found, expected)
