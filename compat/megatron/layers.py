"""The attention calls of each layer of a Megatron-Core model: those that its core attention would make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.transformer_layer import TransformerLayer

from mla_plugin.compat.megatron import ranks
from mla_plugin.compat.megatron.core_attention import MLACoreAttention, _masked
from mla_plugin.layers import AttentionCall, Batch, LayerCall, LayerKind, ModelLayers, grouped


def layers_of(model: Any, batch: Batch) -> ModelLayers:
    """The layers of a model, such as a ``GPTModel`` or a ``TransformerBlock``; this rank's heads.

    Args:
        model: a Megatron module, on any device.
        batch: of sequences without padding.

    Returns:
        each kind of layer with its calls: training, or prefill.

    Raises:
        TypeError: the model has no attention layer.
    """
    is_training = model.training if batch.is_training is None else batch.is_training
    found = [_kind(module, batch, is_training) for module in _mixers(model)]
    if not found:
        raise TypeError(f"{type(model).__name__} has no layer with self-attention")
    parameter = next(model.parameters(), None)
    device = torch.device("meta") if parameter is None else parameter.device
    return ModelLayers(f"{type(model).__name__} (Megatron-Core)", grouped(found), device.type, device.index)


def _mixers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Attention modules, and modules used instead of one: linear attention, state space models."""
    seen: set[int] = set()
    for module in model.modules():
        mixers: list[Any] = [module] if isinstance(module, Attention) else []
        if isinstance(module, TransformerLayer):
            mixers = [getattr(module, "self_attention", None)]
        elif hasattr(module, "mixer"):
            mixers = [module.mixer]
        for mixer in mixers:
            is_mixer = isinstance(mixer, torch.nn.Module) and "Identity" not in type(mixer).__name__
            if is_mixer and id(mixer) not in seen:
                seen.add(id(mixer))
                yield mixer


def _kind(module: Any, batch: Batch, is_training: bool) -> LayerKind:
    name, core = type(module).__name__, getattr(module, "core_attention", None)
    if core is None:
        return LayerKind(name, note="no softmax attention: it runs as Megatron-Core has it")
    if not isinstance(core, MLACoreAttention):
        note = (
            f"its core attention is {type(core).__name__}, not this library's: call "
            'mla_plugin.register("megatron") before the model is built, or see docs/hosts/megatron.md'
        )
        return LayerKind(name, note=note)
    window = core.window_for(core.attn_mask_type.name)
    if window is not None:
        name += f", window {tuple(window)}"
    what = "training" if is_training else "prefill"
    try:
        call = _call(module, core, batch, is_training)
    except ValueError as error:
        return LayerKind(name, note=str(error))
    return LayerKind(name, (LayerCall(what, call),))


def _call(module: Any, core: MLACoreAttention, batch: Batch, is_training: bool) -> AttentionCall:
    config = module.config
    heads = module.num_attention_heads_per_partition
    if core.v_channels is not None and hasattr(config, "qk_pos_emb_head_dim"):
        kv_heads, dim_qk, dim_v = heads, config.qk_head_dim + config.qk_pos_emb_head_dim, core.v_channels
    else:
        dim_qk = dim_v = module.hidden_size_per_attention_head
        kv_heads = module.num_query_groups_per_partition
    dtype, length, shared = batch.dtype or config.params_dtype, batch.seqlen, {}
    if core.cp_group is not None:
        shared = {"cp_group": core.cp_group, "cp_comm_type": core.cp_comm_type}
        length = ranks.tokens_on_a_rank(length, core.cp_group.size())
    q, k, v = (
        torch.empty(length, batch.batch_size, *shape, dtype=dtype, device="meta", requires_grad=is_training)
        for shape in ((heads, dim_qk), (kv_heads, dim_qk), (kv_heads, dim_v))
    )
    mask = torch.empty(1, 1, length, length, dtype=torch.bool, device="meta")
    mask_type = core.attn_mask_type.name
    arguments = {"qkv_format": "sbhd", **_masked(mask_type, mask, is_packed=False)}
    arguments |= {"window_size": core.window_for(mask_type), "host": "megatron"}
    arguments |= {"deterministic": config.deterministic_mode}
    arguments |= {"softmax_scale": core.softmax_scale, "dropout_p": core.attention_dropout if is_training else 0.0}
    return AttentionCall((q, k, v), arguments | shared)
