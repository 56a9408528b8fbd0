"""Run by ``test_versions`` on Megatron-Core 0.19, whose hybrid models hold dense MLA layers next to sparse ones."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from megatron.core.models.hybrid import hybrid_layer_specs
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

import mla_plugin
from mla_plugin.compat import megatron as adapter
from tests.compat.megatron import local_specs
from tests.compat.megatron.parts import config
from tests.compat.megatron.test_layers import PlainCore, assert_same_training, hidden_states

pytestmark = [pytest.mark.usefixtures("on_the_cpu"), pytest.mark.usefixtures("pristine")]
SPARSE = {"experimental_attention_variant": "dsa", **local_specs.DSA_OPTIONS}


def layer_of(name: str, core_attention=None) -> ModuleSpec:
    """A layer of Megatron's stack on linear layers and norms that need no TransformerEngine."""
    layer = getattr(hybrid_layer_specs.hybrid_stack_spec.submodules, name)
    attention = local_specs.on_local_linears(layer.submodules.self_attention)
    if core_attention is not None:
        attention.submodules.core_attention = core_attention
    parts = dataclasses.replace(layer.submodules, self_attention=attention, input_layernorm=WrappedTorchNorm)
    return dataclasses.replace(layer, submodules=parts)


def stack(pattern: str, core_attention=None, **changes) -> HybridStack:
    """A model of D (sparse) and + (dense) layers, built by Megatron."""
    submodules = dataclasses.replace(
        hybrid_layer_specs.hybrid_stack_spec.submodules,
        mla_layer=layer_of("mla_layer", core_attention),
        dsa_layer=layer_of("dsa_layer", local_specs.sparse_core()),
    )
    torch.manual_seed(4)
    return HybridStack(
        config(num_layers=len(pattern), **changes),
        submodules,
        layer_type_list=list(pattern),
        post_layer_norm=False,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )


@pytest.mark.parametrize("changes", [SPARSE, local_specs.DSA_OPTIONS])
def test_registered_each_layer_gets_what_its_spec_says(changes):
    """Whether the configuration speaks of sparse attention, as Megatron's training program makes it do, or not."""
    mla_plugin.register("megatron")
    cores = [layer.self_attention.core_attention for layer in stack("D++D", **changes).layers]
    assert [type(core) for core in cores] == [
        DSAttention,
        adapter.MLACoreAttention,
        adapter.MLACoreAttention,
        DSAttention,
    ]


@pytest.mark.parametrize("changes", [SPARSE, {}])
def test_registered_the_dense_layers_train_as_the_formula(changes):
    mla_plugin.register("megatron")
    ours, plain = stack("++", **changes), stack("++", ModuleSpec(module=PlainCore), **changes)
    assert [type(layer.self_attention.core_attention) for layer in plain.layers] == [PlainCore] * 2
    x = hidden_states()
    for module, other in zip(ours.layers, plain.layers, strict=True):
        assert_same_training(module.self_attention, other.self_attention, x)
    torch.testing.assert_close(ours(x, None), plain(x, None), rtol=1e-9, atol=1e-10)
