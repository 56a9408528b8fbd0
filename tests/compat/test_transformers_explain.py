"""``mla_plugin.explain(model)`` for transformers: what it says of a layer is what the layer then asks for."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
import transformers
from transformers import DynamicCache

import mla_plugin
from mla_plugin import DecodeRequest, DecodeTensors, Platform
from mla_plugin.compat.transformers import LatentSteps, latent_steps
from mla_plugin.compat.transformers.layers import layers_of
from mla_plugin.layers import AttentionCall, Batch
from mla_plugin.operations.attention.api import request_of_call
from mla_plugin.resolver import survey
from tests.compat.latent_models import NUM_NEW, fresh, generate, prefill
from tests.compat.test_transformers_models import every_family, since_5_23
from tests.requests import H100

BATCH, LENGTH = 3, 11
GPU = dataclasses.replace(H100, cuda_version="13.0")


@pytest.fixture
def asked(monkeypatch):
    """Every request that is made from now on."""
    found = []
    attention, decode = mla_plugin.attention, mla_plugin.decode

    def spy_on_attention(*tensors, **arguments):
        found.append(request_of_call(*tensors, **arguments)[0])
        return attention(*tensors, **arguments)

    def spy_on_decode(q_nope_abs, q_rope, kv_cache, *, softmax_scale, host, **rest):
        tensors = DecodeTensors(q_nope_abs, q_rope, *kv_cache, softmax_scale, causal=q_nope_abs.shape[1] > 1, **rest)
        found.append(DecodeRequest.of(tensors, host=host))
        return decode(q_nope_abs, q_rope, kv_cache, softmax_scale=softmax_scale, host=host, **rest)

    monkeypatch.setattr(mla_plugin, "attention", spy_on_attention)
    monkeypatch.setattr(mla_plugin, "decode", spy_on_decode)
    return found


def said(model: torch.nn.Module, what: str, seqlen: int = LENGTH, **batch) -> set:
    """The requests that ``explain`` speaks of."""
    layers = layers_of(model, Batch(BATCH, seqlen, **batch))
    calls = [call for kind in layers.kinds for name, call in kind.asked if name == what]
    requests = [request_of_call(*c.tensors, **c.arguments)[0] if isinstance(c, AttentionCall) else c for c in calls]
    return {request.replace(device_type="cpu") for request in requests}


@every_family
def test_it_speaks_of_the_requests_that_the_layers_make(name, asked):
    model = fresh(name).eval()
    ids = torch.randint(3, 20, (BATCH, LENGTH))
    past = DynamicCache(config=model.config.get_text_config())
    with torch.no_grad():
        model(ids, past_key_values=past)
        prefill = set(asked)
        expected = said(model, "prefill")
        assert prefill == expected
        asked.clear()
        model(ids[:, :1], past_key_values=past)
        step = set(asked)
    assert step == said(model, "next token", LENGTH + 1)
    assert step


@pytest.mark.parametrize("name", ["DeepseekV3", "GptOss"])
def test_training_is_what_a_model_in_training_asks_for(name, asked):
    model = fresh(name).train()
    for layer in model.modules():
        if hasattr(layer, "attention_dropout"):
            layer.attention_dropout = 0.25
    model(torch.randint(3, 20, (BATCH, LENGTH)), use_cache=False)
    assert set(asked) == said(model, "training")
    assert all(request.is_training and request.dropout_p == 0.25 for request in asked)
    assert said(model, "prefill") == set()
    assert said(model, "prefill", is_training=False)


def deepseek(**changes) -> torch.nn.Module:
    with torch.device("meta"):
        config = transformers.DeepseekV3Config(num_hidden_layers=3, **changes)
        return transformers.DeepseekV3ForCausalLM(config).to(torch.bfloat16).eval()


def test_a_model_without_memory_is_explained_layer_by_layer():
    text = mla_plugin.explain(deepseek(), batch_size=4, seqlen=8192, platform=GPU)
    lines = text.splitlines()
    assert lines[0] == "DeepseekV3ForCausalLM (transformers), batch 4, 8192 tokens"
    assert "attn_implementation is 'sdpa'" in lines[1]
    assert lines.count("3 x DeepseekV3Attention") == 1
    assert "head dims 192/128, causal, inference  on cuda sm90" in text
    assert "decode bfloat16, batch 4, lengths 1 x 8192, 128 heads, kv_lora_rank 512, rope 64" in text
    assert "=> forward: triton" in text
    assert re.search(r"forward on fa4 would be 1\.\d+ times as fast", text)
    assert "flash-attn-4 is not installed" in text


def test_what_is_faster_is_what_the_table_says():
    """With FlashAttention 3 and 4 in place nothing is faster than what runs."""
    packages = (*H100.packages, ("flash-attn-3", "3.0.0"), ("flash-attn-4", "4.0.0b36"))
    platform = Platform("cuda", (9, 0), packages=packages, cudnn_version=(9, 20, 0), cuda_version="13.0")
    text = mla_plugin.explain(deepseek(), batch_size=1, seqlen=4096, platform=platform)
    prefill = text.split("next token")[0]
    assert "=> forward: " in prefill
    assert "no backend is known to be faster" in prefill
    assert "would be" not in prefill


@since_5_23
def test_hybrid_models_name_their_other_layers():
    text = mla_plugin.explain(fresh("KimiLinear").eval(), seqlen=64)
    assert "x KimiLinearDeltaAttention\n  note: no softmax attention: it runs as the model has it" in text
    assert "x KimiLinearMLAAttention" in text or "x KimiLinearAttention" in text


def test_windows_are_kinds_of_their_own():
    text = mla_plugin.explain(fresh("GptOss").eval(), seqlen=64)
    assert "1 x GptOssAttention, window of 5 tokens" in text
    assert "1 x GptOssAttention\n" in text


def test_why_is_answered_for_every_layer():
    text = mla_plugin.explain(deepseek(), platform=GPU, why="fa4", is_training=True, seqlen=512)
    assert '=> pip install "mla-plugin[fa4]"' in text
    assert "Then fa4 runs this request's " in text  # both passes, or the one where it is measured to be the fastest
    text = mla_plugin.explain(deepseek(), platform=GPU, why="fa4")
    assert "fa4 cannot compute this: DecodeRequest, expected AttentionRequest" in text


def test_where_nothing_runs_every_reason_is_given():
    text = mla_plugin.explain(fresh("Llama").eval(), seqlen=16, environ={"NVTE_UNFUSED_ATTN": "0"})
    assert "=> no backend" in text
    assert "NVTE_UNFUSED_ATTN=0" in text


def test_a_projection_that_cannot_be_absorbed_is_named():
    model = fresh("DeepseekV3").eval()
    attention = model.model.layers[0].self_attn
    attention.kv_b_proj = torch.nn.Sequential(attention.kv_b_proj)
    attention.kv_b_proj.weight = attention.kv_b_proj[0].weight
    text = mla_plugin.explain(model, seqlen=64)
    assert "it decodes over expanded keys and values: kv_b_proj is a torch.nn.modules.container.Sequential" in text


def test_a_model_that_ran_says_how_often_it_decoded_over_latents():
    model = fresh("DeepseekV3").eval()
    assert "so far" not in mla_plugin.explain(model, seqlen=64)
    generate(model)
    names = [f"model.layers.{i}.self_attn" for i in (0, 1)]
    first = LatentSteps(NUM_NEW - 1, 1, "so many queries are faster over expanded keys: a prompt, or a chunk of one")
    assert latent_steps(model) == dict.fromkeys(names, first)
    assert (
        f"so far 2 layers from {names[0]} to {names[1]}: {NUM_NEW - 1} calls over latents, 1 over expanded keys and "
        "values, the last one: so many queries are faster"
    ) in mla_plugin.explain(model, seqlen=64)
    past = prefill(model)
    model(torch.tensor([[5]] * 3), past_key_values=past)
    latent_steps(model)[names[0]].absorbed = 0  # a copy
    steps = LatentSteps(NUM_NEW - 1, 3, "gradients are wanted, and decode has no backward")
    assert latent_steps(model) == dict.fromkeys(names, steps)
    assert latent_steps(fresh("DeepseekV3")) == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size=0; expected at least 1"),
        ({"seqlen": 2.5}, "seqlen=2.5; expected an int"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16'; expected a torch.dtype"),
        ({"is_training": 1}, "is_training=1; expected True, False or None"),
        ({"length": 3}, "got an unexpected keyword argument 'length'; expected batch_size, seqlen"),
        ({"platform": "cuda"}, "platform='cuda'; expected a mla_plugin.Platform"),
        ({"why": "fa9"}, "no backend named 'fa9' is registered"),
    ],
)
def test_arguments_that_are_off(arguments, message):
    with pytest.raises((ValueError, TypeError)) as caught:
        mla_plugin.explain(fresh("DeepseekV3"), **arguments)
    assert message in str(caught.value)


def test_a_model_of_no_host_is_refused():
    with pytest.raises(TypeError, match=r"got torch.nn.modules.linear.Linear; expected .*PreTrainedModel"):
        mla_plugin.explain(torch.nn.Linear(2, 2))


def test_a_model_without_attention_is_refused():
    model = transformers.ResNetModel(transformers.ResNetConfig(depths=[1], hidden_sizes=[8], embedding_size=8))
    with pytest.raises(TypeError, match="ResNetModel has no attention layer"):
        mla_plugin.explain(model)


def test_the_decision_is_that_of_a_survey():
    (request,) = said(deepseek(), "prefill", 4096)
    decision = survey(request.replace(device_type="cuda"), platform=GPU)
    text = mla_plugin.explain(deepseek(), batch_size=BATCH, seqlen=4096, platform=GPU)
    assert f"=> forward: {decision.plan.forward_backend}\n" in text


def test_calls_are_counted_for_models_only() -> None:
    with pytest.raises(TypeError, match=r"model is NoneType; expected a torch\.nn\.Module"):
        latent_steps(None)


def test_a_dropout_that_is_a_module():
    """Falcon's."""
    config = transformers.FalconConfig(vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    model = transformers.FalconForCausalLM(config).train()
    assert "training" in mla_plugin.explain(model, batch_size=2, seqlen=8)
