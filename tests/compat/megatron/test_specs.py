"""Which attentions of Megatron's specs become ours, which stay, and the warnings about them."""

from __future__ import annotations

import logging

import pytest
import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

import mla_plugin
from mla_plugin.compat import megatron as adapter
from tests.compat.megatron import local_specs
from tests.compat.megatron.parts import config

# importing Megatron takes three seconds
pytestmark = [pytest.mark.xdist_group("megatron"), pytest.mark.usefixtures("on_the_cpu")]


def block(*layers) -> TransformerBlockSubmodules:
    return TransformerBlockSubmodules(layer_specs=list(layers))


def core_of(layer: ModuleSpec):
    return layer.submodules.self_attention.submodules.core_attention


def built(attention: ModuleSpec, **changes):
    return build_module(attention, config=config(**changes), layer_number=1)


def is_ours(layer: ModuleSpec) -> bool:
    return getattr(core_of(layer), "module", None) is adapter.MLACoreAttention


def test_layers_without_a_core_attention_are_left_alone():
    layers = [local_specs.delta_layer(), local_specs.mla_layer(), local_specs.mlp_layer(), local_specs.mla_layer()]
    delta, mlp = layers[0].submodules.self_attention.submodules, layers[2].submodules
    before = dict(vars(delta)), dict(vars(mlp))
    adapter.with_core_attention(block(*layers))
    assert is_ours(layers[1])
    assert is_ours(layers[3])
    assert (vars(delta), vars(mlp)) == before


def test_sparse_layers_keep_theirs_and_are_named_once(caplog):
    sparse = local_specs.sparse_layer()
    dense, chosen = local_specs.mla_layer(), core_of(sparse)
    adapter.with_core_attention(block(local_specs.mla_layer(), sparse, dense, sparse))
    assert core_of(sparse) is chosen
    assert is_ours(dense)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    named = "layer_specs[1].self_attention: MLASelfAttention attends through DSAttention, which is sparse"
    assert record.getMessage().splitlines()[1:] == [f"  {named}"]


def test_nothing_is_said_where_nothing_is_left(caplog):
    adapter.with_core_attention(block(local_specs.delta_layer(), local_specs.mla_layer()))
    assert not caplog.records


def test_without_a_dense_attention_nothing_changes_and_the_error_says_what_there_is():
    sparse, delta = local_specs.sparse_layer(), local_specs.delta_layer()
    chosen = core_of(sparse)
    message = (
        r"this TransformerBlockSubmodules holds\n"
        r"  layer_specs\[1\].self_attention: MLASelfAttention attends through DSAttention, which is sparse\n"
        r"  layer_specs\[0\].self_attention: GatedDeltaNet has no core attention$"
    )
    with pytest.raises(ValueError, match=message):
        adapter.with_core_attention(block(delta, sparse))
    assert core_of(sparse) is chosen


@pytest.mark.parametrize("spec", [ModuleSpec(module=torch.nn.Identity), local_specs.mlp_layer(), block()])
def test_a_spec_without_any_attention_is_refused(spec):
    with pytest.raises(ValueError, match=rf"this {type(spec).__name__} holds\n  no attention at all"):
        adapter.with_core_attention(spec)


def test_an_attention_alone():
    attention = local_specs.mla_layer().submodules.self_attention
    assert adapter.with_core_attention(attention) is attention
    assert attention.submodules.core_attention.module is adapter.MLACoreAttention


@pytest.mark.usefixtures("pristine")
def test_megatrons_own_spec_can_be_built_without_transformer_engine():
    layer = adapter.with_core_attention(local_specs.mla_layer())
    assert type(built(layer.submodules.self_attention).core_attention) is adapter.MLACoreAttention


def test_cross_attention_keeps_its_own():
    layer, cross = local_specs.mla_layer(), local_specs.mla_layer().submodules.self_attention
    layer.submodules.cross_attention = cross
    adapter.with_core_attention(layer)
    assert is_ours(layer)
    assert cross.submodules.core_attention is DotProductAttention


def test_a_block_that_predicts_several_tokens():
    """The block takes over the decoder's layer, or comes with one of its own."""
    options = config(mtp_num_layers=1, multi_latent_attention=True)
    layer = local_specs.mla_layer()
    predicting = gpt_layer_specs.get_gpt_mtp_block_spec(options, layer, use_transformer_engine=False)
    assert adapter.with_core_attention(predicting) is predicting
    assert is_ours(layer)


@pytest.mark.usefixtures("pristine")
@pytest.mark.parametrize("variant", [None, "dsa"])
def test_registered_sparse_layers_keep_their_core_attention(variant, caplog):
    """Hybrid models hold sparse layers without a word of it in the configuration."""
    mla_plugin.register("megatron")
    attention = local_specs.sparse_layer().submodules.self_attention
    for _ in range(2):
        module = built(attention, experimental_attention_variant=variant, **local_specs.DSA_OPTIONS)
        assert type(module.core_attention) is DSAttention
    (message,) = (record.getMessage() for record in caplog.records if record.name == "mla_plugin")
    assert message.startswith("MLA layers with the core attention DSAttention keep it")


@pytest.mark.usefixtures("pristine")
def test_registered_a_core_attention_of_the_programs_own_is_kept(caplog):
    class Own(DotProductAttention):
        def __init__(self, *, k_channels=None, v_channels=None, **arguments):
            super().__init__(**arguments)

    class OnOurs(adapter.MLACoreAttention):
        pass

    mla_plugin.register("megatron")
    attention = local_specs.mla_layer().submodules.self_attention
    for chosen, warnings in ((OnOurs, 0), (Own, 1)):
        attention.submodules.core_attention = ModuleSpec(module=chosen)
        assert type(built(attention).core_attention) is chosen
        assert len([record for record in caplog.records if record.name == "mla_plugin"]) == warnings


@pytest.mark.usefixtures("pristine")
@pytest.mark.parametrize(
    "spec",
    [
        DotProductAttention,
        ModuleSpec(module=DotProductAttention),
        ModuleSpec(module=("megatron.core.transformer.dot_product_attention", "DotProductAttention")),
        None,
    ],
)
def test_registered_every_spelling_of_megatrons_own_becomes_ours(spec):
    mla_plugin.register("megatron")
    attention = local_specs.mla_layer().submodules.self_attention
    attention.submodules.core_attention = spec
    assert type(built(attention).core_attention) is adapter.MLACoreAttention
    assert attention.submodules.core_attention is spec


def test_dense_layers_of_a_sparse_configuration():
    """Since 0.19 each layer's spec says what it is; before, a layer hands every core attention the indexer's inputs."""
    attention = adapter.mla_gpt_layer_spec().submodules.self_attention
    options = {"experimental_attention_variant": "dsa", **local_specs.DSA_OPTIONS}
    x = torch.randn(7, 2, 32, dtype=torch.float64)
    torch.manual_seed(3)
    plain = built(attention)
    torch.manual_seed(3)
    if hasattr(DSAttention, "requires_dsa_inputs"):
        torch.testing.assert_close(built(attention, **options)(x, None)[0], plain(x, None)[0])
    else:
        with pytest.raises(ValueError, match=r"'dsa'.* dense layers next to DSA need megatron-core >= 0.19"):
            built(attention, **options)


def test_multi_latent_attention_is_the_only_dense_mla_layer():
    """``register`` reaches a layer through this class; a class next to it would be missed silently."""
    found = {c.__name__ for c in multi_latent_attention.MultiLatentAttention.__subclasses__()}
    assert found == {"MLASelfAttention"}
