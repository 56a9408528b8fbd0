"""``mla_plugin.explain(model)`` for Megatron-Core: what it says of a layer is what the layer then asks for."""

from __future__ import annotations

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

import mla_plugin
from mla_plugin.compat.megatron import mla_gpt_layer_spec, with_core_attention
from mla_plugin.compat.megatron.layers import layers_of
from mla_plugin.layers import Batch
from mla_plugin.operations.attention.api import request_of_call
from tests.compat.megatron.parts import config
from tests.requests import H100

pytestmark = [pytest.mark.xdist_group("megatron"), pytest.mark.usefixtures("on_the_cpu")]
LENGTH, BATCH = 12, 2


def gpt(**changes) -> GPTModel:
    torch.manual_seed(0)
    settings = config(num_layers=3, **changes)
    return GPTModel(settings, mla_gpt_layer_spec(), vocab_size=32, max_sequence_length=64)


def said(model, **batch):
    layers = layers_of(model, Batch(BATCH, LENGTH, **batch))
    calls = [(what, call) for kind in layers.kinds for what, call in kind.asked]
    return [(what, request_of_call(*c.tensors, **c.arguments)[0].replace(device_type="cpu")) for what, c in calls]


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("changes", [{}, {"window_size": (4, 0)}, {"attention_dropout": 0.25}])
def test_it_speaks_of_the_requests_that_the_layers_make(monkeypatch, is_training, changes):
    asked, attention = [], mla_plugin.attention

    def spy(*tensors, **arguments):
        asked.append(request_of_call(*tensors, **arguments)[0])
        return attention(*tensors, **arguments)

    monkeypatch.setattr(mla_plugin, "attention", spy)
    model = gpt(**changes).train(is_training)
    ids = torch.randint(32, (BATCH, LENGTH))
    with torch.set_grad_enabled(is_training):
        model(ids, torch.arange(LENGTH).expand(BATCH, -1), None)
    found = said(model)
    assert set(asked) == {request for _, request in found}
    assert {what for what, _ in found} == {"training" if is_training else "prefill"}


def test_the_text_has_a_section_for_each_kind():
    for model in (gpt(params_dtype=torch.bfloat16), gpt(params_dtype=torch.bfloat16).decoder):
        text = mla_plugin.explain(model, batch_size=2, seqlen=4096, platform=H100)
        assert text.splitlines()[0] == f"{type(model).__name__} (Megatron-Core), batch 2, 4096 tokens"
        assert "3 x MLASelfAttention\n  training: sbhd bfloat16, batch 2, lengths 4096 x 4096, 4 heads" in text
        assert "=> forward: " in text
        assert "flash-attn-4 is not installed" in text


def test_grouped_heads_of_plain_attention():
    settings = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, num_query_groups=2, use_cpu_initialization=True
    )
    spec = with_core_attention(get_gpt_layer_local_spec())
    ((_, request),) = said(GPTModel(settings, spec, vocab_size=32, max_sequence_length=64))
    sizes = (request.num_heads, request.num_kv_heads, request.head_dim_qk, request.head_dim_v)
    assert sizes == (4, 2, 16, 16)


def test_a_core_attention_that_is_not_ours_says_how_to_get_ours():
    settings = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True)
    model = GPTModel(settings, get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=64)
    text = mla_plugin.explain(model)
    assert "2 x SelfAttention\n  note: its core attention is DotProductAttention, not this library's" in text
    assert 'mla_plugin.register("megatron")' in text


def test_a_model_without_layers_is_refused():
    with pytest.raises(TypeError, match="MLACoreAttention has no layer with self-attention"):
        mla_plugin.explain(gpt().decoder.layers[0].self_attention.core_attention)
