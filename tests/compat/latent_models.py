"""What the tests of decoding over latents share: models, caches, steps, and a spy on what they call."""

from __future__ import annotations

import copy
from collections import Counter

import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache

import mla_plugin
from tests.compat.test_transformers_models import VOCABULARY, tokens_of, trio

NUM_NEW = 4
LENGTH = 9


class Spy:
    """Counts the calls of ``mla_plugin.decode`` and ``.attention``, and keeps what decode was given."""

    def __init__(self, monkeypatch):
        self.calls, self.decoded = Counter(), []
        attention, decode = mla_plugin.attention, mla_plugin.decode

        def spy_on_attention(*tensors, **arguments):
            self.calls["expanded"] += 1
            return attention(*tensors, **arguments)

        def spy_on_decode(q_nope_abs, q_rope, kv_cache, **arguments):
            self.calls["absorbed"] += 1
            self.decoded.append({"q_nope_abs": q_nope_abs, "c_kv": kv_cache[0], "k_rope": kv_cache[1], **arguments})
            return decode(q_nope_abs, q_rope, kv_cache, **arguments)

        monkeypatch.setattr(mla_plugin, "attention", spy_on_attention)
        monkeypatch.setattr(mla_plugin, "decode", spy_on_decode)


def fresh(name: str = "DeepseekV3", implementation: str = "mla_plugin") -> torch.nn.Module:
    """A new model with the trio's weights."""
    model = copy.deepcopy(trio(name).eager)
    model.set_attn_implementation(implementation)
    return model


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if hasattr(type(module), "expand_kv")]


def generate(model: torch.nn.Module, padding: str = "left", **arguments) -> torch.Tensor:
    ids, mask = tokens_of(padding)
    return model.generate(ids, attention_mask=mask, max_new_tokens=NUM_NEW, do_sample=False, **arguments)


def cache_of(model: torch.nn.Module, kind: str) -> Cache:
    config = model.config.get_text_config()
    return DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=LENGTH + 8)


def step(model: torch.nn.Module, past: Cache, num_tokens: int = 1, **arguments) -> torch.Tensor:
    """Logits of the tokens from LENGTH on."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (3, num_tokens), generator=generator)
    positions = torch.arange(LENGTH, LENGTH + num_tokens)[None].expand(3, -1)
    with torch.no_grad():
        return model(ids, past_key_values=past, position_ids=positions, use_cache=True, **arguments).logits


def prefill(model: torch.nn.Module, kind: str = "dynamic") -> Cache:
    past = cache_of(model, kind)
    with torch.no_grad():
        model(tokens_of("none")[0], past_key_values=past, use_cache=True)
    return past
