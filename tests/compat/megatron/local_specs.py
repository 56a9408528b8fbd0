"""Specs that hold sparse and recurrent layers, out of Megatron's modules that need no TransformerEngine."""

from __future__ import annotations

import dataclasses

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

DSA_OPTIONS = {"dsa_indexer_n_heads": 4, "dsa_indexer_head_dim": 16, "dsa_indexer_topk": 4}


class Duplicated(Linear):
    """Stands in for TransformerEngine's linear layer, of which the indexer also asks on which ranks it lies."""

    def __init__(self, *args, parallel_mode=None, **kwargs) -> None:
        super().__init__(*args, **kwargs)


def mla_layer() -> ModuleSpec:
    """Megatron's own, which attends through its ``DotProductAttention``."""
    return gpt_layer_specs.get_gpt_layer_local_spec(multi_latent_attention=True)


def sparse_core() -> ModuleSpec:
    """As ``get_dsa_module_spec_for_backend`` puts it together."""
    indexer = dsa.DSAIndexerSubmodules(
        linear_wq_b=Duplicated, linear_wk=Duplicated, k_norm=WrappedTorchNorm, linear_weights_proj=Duplicated
    )
    submodules = dsa.DSAttentionSubmodules(indexer=ModuleSpec(module=dsa.DSAIndexer, submodules=indexer))
    return ModuleSpec(module=dsa.DSAttention, submodules=submodules)


def sparse_layer() -> ModuleSpec:
    """An MLA layer with sparse attention, as hybrid models of 0.18 have it."""
    layer = mla_layer()
    layer.submodules.self_attention.submodules.core_attention = sparse_core()
    return layer


def delta_layer() -> ModuleSpec:
    """A gated delta net in the place of attention."""
    parts = GatedDeltaNetSubmodules(in_proj=Linear, out_norm=WrappedTorchNorm, out_proj=Linear)
    mixer = ModuleSpec(module=GatedDeltaNet, submodules=parts)
    return ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(self_attention=mixer))


def mlp_layer() -> ModuleSpec:
    """No attention at all."""
    submodules = TransformerLayerSubmodules(mlp=mla_layer().submodules.mlp)
    assert submodules.self_attention is IdentityOp
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def on_local_linears(attention: ModuleSpec) -> ModuleSpec:
    """An attention of Megatron's hybrid specs with the linear layers of its local ones; the rest as it is."""
    parts, local = attention.submodules, mla_layer().submodules.self_attention.submodules
    names = [field.name for field in dataclasses.fields(parts) if field.name.startswith("linear")]
    linears = {name: getattr(local, name) for name in names if getattr(parts, name) is not None}
    return dataclasses.replace(attention, submodules=dataclasses.replace(parts, **linears))
