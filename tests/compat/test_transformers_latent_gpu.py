"""Decoding over latents on a GPU, in bfloat16, with DeepSeek-V3's head dims: every form of cache, padding and graph.

An error is compared with that of "sdpa" in bfloat16, both against float64.
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache, StaticCache

import mla_plugin
from mla_plugin.compat.transformers import latent

pytestmark = pytest.mark.gpu

PROMPT, NUM_STEPS, BATCH = 300, 4, 3


@pytest.fixture(scope="module")
def models() -> dict[str, DeepseekV3ForCausalLM]:
    mla_plugin.register("transformers")
    config = DeepseekV3Config(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=128,
        initializer_range=0.05,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    exact = DeepseekV3ForCausalLM._from_config(config, attn_implementation="sdpa").cuda().eval()
    rounded = copy.deepcopy(exact).bfloat16()
    exact.load_state_dict({name: x.double() for name, x in rounded.state_dict().items()})
    models = {"exact": exact.double(), "sdpa": rounded, "mla_plugin": copy.deepcopy(rounded)}
    models["mla_plugin"].set_attn_implementation("mla_plugin")
    return models


@pytest.fixture
def absorbed(monkeypatch) -> dict[str, list[torch.Size]]:
    """The shapes of the results of decodes: by the kernels with W_UK and W_UV, and by ``mla_plugin.decode``."""
    shapes: dict[str, list[torch.Size]] = {"fused": [], "in parts": []}
    decode, fused = mla_plugin.decode, latent.decode_projected

    def decode_spy(q_nope_abs, *arguments, **options):
        shapes["in parts"].append(q_nope_abs.shape[:3])
        return decode(q_nope_abs, *arguments, **options)

    def fused_spy(*arguments, **options):
        out = fused(*arguments, **options)
        if out is not None:
            shapes["fused"].append(out.shape[:3])
        return out

    monkeypatch.setattr(mla_plugin, "decode", decode_spy)
    monkeypatch.setattr(latent, "decode_projected", fused_spy)
    return shapes


def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 512, (BATCH, PROMPT + NUM_STEPS), generator=generator).cuda()


def logits(model, kind: str, padding: int, queries: int, compiled=None) -> torch.Tensor:
    """Of the tokens after the prompt, given ``queries`` at a time; the first row is padded on the left."""
    ids, config = tokens(), model.config
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    past = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config, max_cache_len=PROMPT + 64)
    found = []
    with torch.inference_mode():
        for start, end in [(0, PROMPT)] + [(i, i + queries) for i in range(PROMPT, PROMPT + NUM_STEPS, queries)]:
            call = model if start == 0 or compiled is None else compiled
            given = {"attention_mask": mask[:, :end]} if padding else {}
            out = call(
                ids[:, start:end],
                past_key_values=past,
                position_ids=positions[:, start:end],
                use_cache=True,
                **given,
            )
            found.append(out.logits.double())
    return torch.cat(found[1:], dim=1)


def assert_as_good_as_sdpa(models, found: torch.Tensor, *way) -> None:
    exact = logits(models["exact"], *way)
    error, of_sdpa = (x - exact for x in (found, logits(models["sdpa"], *way)))
    assert of_sdpa.norm() <= 0.05 * exact.norm()
    assert error.norm() <= 2 * of_sdpa.norm()


@pytest.mark.parametrize("way", ["fused", "in parts"])
@pytest.mark.parametrize("queries", [1, 2, 4])
@pytest.mark.parametrize("padding", [0, 70])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_steps(models, absorbed, kind, padding, queries, way, monkeypatch):
    if way == "in parts":
        monkeypatch.setattr(latent, "_may_fuse", lambda query: False)
    logits(models["mla_plugin"], kind, padding, queries)  # the layers hand over latents from their second call on
    for shapes in absorbed.values():
        shapes.clear()
    found = logits(models["mla_plugin"], kind, padding, queries)
    expected: dict[str, list[tuple[int, ...]]] = {"fused": [], "in parts": []}
    expected[way] = [(BATCH, queries, 16)] * (2 * NUM_STEPS // queries)
    assert absorbed == expected
    assert_as_good_as_sdpa(models, found, kind, padding, queries)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_step_over_a_static_cache(models, mode):
    torch._dynamo.reset()
    model = models["mla_plugin"]
    compiled = torch.compile(model.forward, mode=mode, fullgraph=True)
    found = logits(model, "static", 0, 1, compiled)
    assert_as_good_as_sdpa(models, found, "static", 0, 1)


def test_generate_compiles_its_steps_over_a_static_cache(models):
    """Every token that it chose has, exactly computed, a logit near the highest one."""
    ids = tokens()[:, :PROMPT]
    mask = torch.ones_like(ids)
    mask[0, :70] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    chosen = models["mla_plugin"].generate(ids, attention_mask=mask, **options)
    longer = torch.nn.functional.pad(mask, (0, 6), value=1)
    positions = (longer.cumsum(1) - 1).clamp_min(0)
    with torch.inference_mode():
        exact, of_sdpa = (
            models[name](chosen, attention_mask=longer, position_ids=positions).logits[:, PROMPT - 1 : -1].double()
            for name in ("exact", "sdpa")
        )
    gap = exact.amax(-1) - exact.gather(-1, chosen[:, PROMPT:, None])[..., 0]
    assert (gap <= 4 * (of_sdpa - exact).abs().amax()).all()
