"""Models of several parts, tokens that are drafted by a model's own layers, and what generates in other ways."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mla_plugin.compat.transformers import latent_steps
from tests.compat.latent_models import fresh
from tests.compat.test_transformers_models import _BASE, _MOE, since_5_23

IDS = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7, 8]])
DEEPSEEK = {**_BASE, **_MOE, "first_k_dense_replace": 1}


def absorbed(model: torch.nn.Module) -> list[int]:
    return [steps.absorbed for steps in latent_steps(model).values()]


def test_kimi_k25():
    """A DeepSeek-V3 with its own image tower."""
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.Kimi_K25Config(text_config={**DEEPSEEK, "model_type": "deepseek_v3"}, vision_config=vision)
    torch.manual_seed(0)
    eager = transformers.Kimi_K25ForConditionalGeneration(config).eval()
    eager.set_experts_implementation("eager")
    eager.set_attn_implementation("eager")
    model = copy.deepcopy(eager)
    model.set_attn_implementation("mla_plugin")
    tokens = [each.generate(IDS, max_new_tokens=6, do_sample=False) for each in (model, eager)]
    assert torch.equal(*tokens)
    assert absorbed(model) == [5, 5]


@since_5_23
def test_the_text_part_alone():
    model, eager = fresh("MistralLarge4", "eager"), fresh("MistralLarge4", "eager")
    model.set_attn_implementation({"text_config": "mla_plugin"})
    config = model.config
    assert (config.text_config._attn_implementation, config.vision_config._attn_implementation) == (
        "mla_plugin",
        "eager",
    )
    tokens = [each.generate(IDS, max_new_tokens=6, do_sample=False) for each in (model, eager)]
    assert torch.equal(*tokens)
    assert absorbed(model) == [5, 5]


def test_tokens_drafted_by_the_models_own_layers(tmp_path, monkeypatch):
    kind = transformers.DeepseekV3ForCausalLM
    torch.manual_seed(0)
    kind(transformers.DeepseekV3Config(**DEEPSEEK, num_mtp_layers=1)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights |= {name.replace("layers.1.", "layers.2."): x.clone() for name, x in weights.items() if "layers.1." in name}
    weights |= {f"model.layers.2.{name}.weight": torch.ones(32) for name in ("enorm", "hnorm", "shared_head.norm")}
    weights["model.layers.2.eh_proj.weight"] = torch.randn(32, 64) * 0.2
    save_file(weights, file, metadata={"format": "pt"})
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2.*"])
    tokens = []
    for implementation in ("mla_plugin", "eager"):
        model = kind.from_pretrained(tmp_path, attn_implementation=implementation, experts_implementation="eager")
        tokens.append(model.generate(IDS, max_new_tokens=6, do_sample=False, use_mtp=True))
        if implementation == "mla_plugin":
            assert min(absorbed(model)) > 0
    assert torch.equal(*tokens)


@pytest.mark.parametrize("name", ["mla_plugin", pytest.param("paged|mla_plugin", marks=since_5_23)])
@pytest.mark.filterwarnings("ignore:The `paged|` prefix")
def test_continuous_batching_is_refused(name):
    """transformers has a list of what may, and its paged cache holds K and V of one head dimension."""
    model = fresh("Llama")
    model.set_attn_implementation(name)
    config = transformers.GenerationConfig(max_new_tokens=2, do_sample=False, pad_token_id=0)
    with pytest.raises(ValueError, match=r"mla_plugin\S* is not supported"):
        model.generate_batch([[3, 4, 5]], generation_config=config)
