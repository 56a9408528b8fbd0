"""Run by ``test_versions`` on Megatron-Core 0.18 and newer: the layers of its hybrid models, as its own specs say."""

from __future__ import annotations

import pytest
import torch
from megatron.core.models.hybrid import hybrid_layer_specs
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention
from megatron.core.transformer.spec_utils import ModuleSpec

import mla_plugin
from mla_plugin.compat import megatron as adapter
from tests.compat.megatron import local_specs
from tests.compat.megatron.parts import D_QK, D_V, config, packing
from tests.compat.megatron.test_layers import PlainCore, hidden_states
from tests.compat.megatron.test_specs import built, core_of, is_ours

pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture(params=["hybrid_stack_spec", "hybrid_inference_stack_spec"])
def stack(request, monkeypatch):
    """Megatron's spec of a whole hybrid model; it is one object for every program, so it is put back."""
    spec = getattr(hybrid_layer_specs, request.param)
    for name in vars(spec.submodules):
        layer = getattr(spec.submodules, name)
        attention = getattr(getattr(layer, "submodules", None), "self_attention", None)
        if hasattr(getattr(attention, "submodules", None), "core_attention"):
            monkeypatch.setattr(attention.submodules, "core_attention", attention.submodules.core_attention)
    return spec


def test_a_stack_gets_ours_in_its_dense_layers(stack, caplog):
    sparse, others = core_of(stack.submodules.dsa_layer), stack.submodules.mamba_layer
    assert adapter.with_core_attention(stack) is stack
    dense = [stack.submodules.attention_layer, getattr(stack.submodules, "mla_layer", None)]
    assert all(is_ours(layer) for layer in dense if layer is not None)
    assert core_of(stack.submodules.dsa_layer) is sparse
    assert stack.submodules.mamba_layer is others
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.count("dsa_layer.self_attention: ") == message.count("which is sparse") == 1


@pytest.mark.usefixtures("pristine")
def test_registered_its_sparse_layers_stay_sparse(stack, caplog):
    """The spec's own class and core attention, the indexer on linear layers that need no TransformerEngine."""
    mla_plugin.register("megatron")
    attention = local_specs.on_local_linears(stack.submodules.dsa_layer.submodules.self_attention)
    assert attention.submodules.core_attention.module is DSAttention
    attention.submodules.core_attention = local_specs.sparse_core()
    module = built(attention, **local_specs.DSA_OPTIONS)
    assert type(module) is attention.module
    assert type(module.core_attention) is DSAttention
    assert [record.getMessage()[:49] for record in caplog.records if record.name == "mla_plugin"] == [
        "MLA layers with the core attention DSAttention ke"
    ]


def widths_of_v(spec) -> list[int]:
    """What reaches the core attention of a packed batch, with the layer's output and the formula's."""
    module, plain = built(spec), built(spec)
    plain.load_state_dict(module.state_dict())
    plain.core_attention = PlainCore(
        config(), 1, AttnMaskType.causal, "self", softmax_scale=module.softmax_scale, v_channels=D_V
    )
    widths = []
    module.core_attention.register_forward_pre_hook(lambda core, args: widths.append(args[2].shape[-1]))
    x, params = hidden_states(batch=1), packing((5, 7))[0]
    alone = torch.cat([plain(part, None)[0] for part in x.split([5, 7])])
    torch.testing.assert_close(module(x, None, packed_seq_params=params)[0], alone, rtol=1e-10, atol=1e-11)
    return widths


@pytest.mark.usefixtures("pristine")
def test_v_of_a_packed_batch_comes_with_zeros_and_registered_without():
    """Megatron's own layer, outside of hybrid models too."""
    assert widths_of_v(adapter.mla_gpt_layer_spec().submodules.self_attention) == [D_QK]
    mla_plugin.register("megatron")
    assert widths_of_v(local_specs.mla_layer().submodules.self_attention) == [D_V]


def test_a_mamba_layer_alone_is_refused(stack):
    with pytest.raises(ValueError, match=r"this ModuleSpec holds\n  mixer: MambaMixer has no core attention$"):
        adapter.with_core_attention(stack.submodules.mamba_layer)


def test_nothing_in_a_stack_changes_when_none_of_it_is_dense(stack):
    layers = type(stack.submodules)(mamba_layer=stack.submodules.mamba_layer, dsa_layer=stack.submodules.dsa_layer)
    chosen = core_of(layers.dsa_layer)
    with pytest.raises(ValueError, match=r"dsa_layer.self_attention: .* is sparse\n  mamba_layer.mixer: MambaMixer"):
        adapter.with_core_attention(ModuleSpec(module=stack.module, submodules=layers))
    assert core_of(layers.dsa_layer) is chosen
