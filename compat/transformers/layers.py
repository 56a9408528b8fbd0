"""The attention calls of each layer of a transformers model: those that its forward would make, without running it.

Attention layers are recognised by attributes that all of them have in transformers: ``layer_idx`` and ``is_causal``.
Other modules with a ``layer_idx`` and no attention inside are other token mixers (linear attention, state space
models), which this library does not compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.compat.transformers import attention, latent
from mla_plugin.compat.transformers.latent import NAME
from mla_plugin.compat.transformers.projection import dtype_of, obstacle
from mla_plugin.compat.transformers.sinks import with_sinks
from mla_plugin.compat.transformers.steps import latent_steps
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.layers import AttentionCall, Batch, LayerCall, LayerKind, ModelLayers, grouped


def layers_of(model: Any, batch: Batch) -> ModelLayers:
    """The layers of a ``PreTrainedModel``.

    Args:
        model: on any device, the meta device too.
        batch: of sequences without padding.

    Returns:
        each kind of layer with its calls: training, or prefill and the next token.

    Raises:
        TypeError: the model has no layer of either kind, as an encoder of images may.
    """
    is_training = model.training if batch.is_training is None else batch.is_training
    dtype = batch.dtype or model.dtype
    found = [_kind(module, batch, dtype, is_training) for module in _mixers(model)]
    if not found:
        raise TypeError(f"{type(model).__name__} has no attention layer with layer_idx, by which they are known")
    notes = []
    implementation = getattr(model.config.get_text_config(), "_attn_implementation", None)
    if implementation != NAME:
        notes.append(
            f'its attn_implementation is {implementation!r}; this is what model.set_attn_implementation("{NAME}") runs'
        )
    notes += _steps_so_far(model)
    device = model.device
    return ModelLayers(
        f"{type(model).__name__} (transformers)", grouped(found), device.type, device.index, tuple(notes)
    )


def _steps_so_far(model: torch.nn.Module) -> Iterator[str]:
    """A text that groups layers with equal counts."""
    alike: dict[tuple[int, int, str | None], list[str]] = {}
    for name, steps in latent_steps(model).items():
        alike.setdefault((steps.absorbed, steps.expanded, steps.reason), []).append(name)
    for (absorbed, expanded, reason), names in alike.items():
        layers = names[0] if len(names) == 1 else f"{len(names)} layers from {names[0]} to {names[-1]}"
        why = "" if reason is None else f", the last one: {reason}"
        yield f"so far {layers}: {absorbed} calls over latents, {expanded} over expanded keys and values{why}"


def _mixers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Modules that mix tokens, in order: attention layers, and those with a ``layer_idx`` and no other one inside."""
    within: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(outer) for outer in within) or not hasattr(module, "layer_idx"):
            continue
        is_attention = hasattr(module, "is_causal")
        if is_attention or not any(hasattr(x, "layer_idx") for x in module.modules() if x is not module):
            within.append(f"{name}.")
            yield module


def _kind(module: Any, batch: Batch, dtype: torch.dtype, is_training: bool) -> LayerKind:
    name = type(module).__name__
    if not hasattr(module, "is_causal"):
        return LayerKind(name, note="no softmax attention: it runs as the model has it")
    dims = _dims(module)
    if dims is None:
        return LayerKind(name, note="its head dims are not known: neither qk_head_dim and v_head_dim nor head_dim")
    window = _window(module, batch)
    if window is not None:
        name += f", window of {window} tokens"
    if is_training:
        return LayerKind(name, (LayerCall("training", _expanded(module, dims, batch, dtype, batch.seqlen, True)),))
    prefill = LayerCall("prefill", _expanded(module, dims, batch, dtype, batch.seqlen, False))
    step, note = _step(module, dims, batch, dtype)
    return LayerKind(name, (prefill, LayerCall("next token", step)), note)


def _dims(module: Any) -> tuple[int, int, int, int] | None:
    """Query heads, key-value heads, head_dim_qk and head_dim_v as attention gets them."""
    config = module.config
    heads = getattr(module, "num_heads", None) or config.num_attention_heads
    kv_heads = heads // getattr(module, "num_key_value_groups", 1)
    if hasattr(module, "v_head_dim") and hasattr(module, "qk_nope_head_dim"):
        return heads, kv_heads, module.qk_nope_head_dim + module.qk_rope_head_dim, module.v_head_dim
    dim = getattr(module, "head_dim", None)
    return None if not isinstance(dim, int) else (heads, kv_heads, dim, dim)


def _window(module: Any, batch: Batch) -> int | None:
    config = module.config  # Mistral's layers read it there
    of_all = None if getattr(config, "layer_types", None) else getattr(config, "sliding_window", None)
    window = getattr(module, "sliding_window", of_all)
    return window if isinstance(window, int) and window < batch.seqlen else None


def _recorded(attend: Callable[..., Any]) -> AttentionCall:
    """The attention call that ``attend`` makes through its argument."""
    calls = []

    def record(*tensors: torch.Tensor, **arguments: Any) -> Any:
        calls.append(AttentionCall(tensors, arguments))  # type: ignore[arg-type]
        q, v = tensors[0], tensors[2]
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]))
        return (out, lse) if arguments.get("return_lse") else out

    attend(record)
    return calls[0]


def _expanded(
    module: Any, dims: tuple[int, int, int, int], batch: Batch, dtype: torch.dtype, s_q: int, is_training: bool
) -> AttentionCall:
    """Attention over expanded keys and values of the whole length, by the last ``s_q`` queries."""
    heads, kv_heads, dim_qk, dim_v = dims
    window = _window(module, batch)
    s_kv = window if window is not None and s_q == 1 else batch.seqlen  # what the cache of such a layer keeps
    shapes = ((s_q, heads, dim_qk), (s_kv, kv_heads, dim_qk), (s_kv, kv_heads, dim_v))
    q, k, v = (
        torch.empty(batch.batch_size, *shape, dtype=dtype, device="meta", requires_grad=is_training) for shape in shapes
    )
    sinks = getattr(module, "sinks", None)
    s_aux = torch.empty(heads, dtype=dtype, device="meta") if isinstance(sinks, torch.Tensor) else None
    dropout = getattr(module, "attention_dropout", 0.0) if is_training else 0.0
    dropout = getattr(dropout, "p", dropout)  # Falcon's is a module

    def call(attention_function: Callable[..., Any]) -> None:
        def attend(*tensors: torch.Tensor, **arguments: Any) -> torch.Tensor:
            arguments |= {"dropout_p": dropout, "host": "transformers"}
            return with_sinks(attention_function, *tensors, s_aux=s_aux, **arguments)

        is_sparse = getattr(module.config, "index_topk", None) is not None
        if is_sparse or window is not None:  # ``masks`` makes those patterns: additive, and bool
            kind = dtype if is_sparse else torch.bool
            mask = torch.empty(batch.batch_size, 1, s_q, s_kv, dtype=kind, device="meta")
            attend(q, k, v, **attention._dense_mask(mask, None, None, q, k))
        else:
            attention._unmasked(attend, q, k, v, module.is_causal, None)

    return _recorded(call)


def _step(
    module: Any, dims: tuple[int, int, int, int], batch: Batch, dtype: torch.dtype
) -> tuple[AttentionCall | DecodeRequest, str | None]:
    """One more token: over the latent cache where the layer has one, and why not where it might have."""
    expanded = _expanded(module, dims, batch, dtype, 1, False)
    if not hasattr(type(module), "expand_kv") or not latent.caches_latents(module.config):
        return expanded, None
    heads, _, dim_qk, dim_v = dims
    rank, rope = module.kv_lora_rank, module.qk_rope_head_dim
    keys, top_k = batch.seqlen, getattr(module.config, "index_topk", None)
    is_sparse = getattr(module, "indexer", None) is not None or latent._makes_its_mask(module)
    if not latent.is_decode(1, keys, rank, module.qk_nope_head_dim, dim_v):
        return expanded, "so few keys are expanded, not decoded over the latent cache"
    query, *cache = (
        torch.empty((), dtype=dtype, device=module.kv_b_proj.weight.device).expand(shape)
        for shape in ((1, heads, 1, dim_qk), (1, 1, keys, rank), (1, 1, keys, rope))
    )
    if (found := obstacle(module, dtype_of(query), query, *cache)) is not None:
        return expanded, f"it decodes over expanded keys and values: {found.text}; what to do: {found.advice}"
    if top_k is not None and not is_sparse:  # a dense layer beside sparse ones, which has their additive mask
        return expanded, None
    if top_k is not None:
        keys = min(latent.most_selected(module), keys)
    q, q_rope, c_kv, k_rope = (
        torch.empty(batch.batch_size, *shape, dtype=dtype, device="meta")
        for shape in ((1, heads, rank), (1, heads, rope), (keys, rank), (keys, rope))
    )
    lengths = torch.empty(batch.batch_size, dtype=torch.int32, device="meta") if top_k is not None else None
    with_lse = isinstance(getattr(module, "sinks", None), torch.Tensor)
    tensors = DecodeTensors(q, q_rope, c_kv, k_rope, 1.0, causal=False, return_lse=with_lse, seqlens_kv=lengths)
    return DecodeRequest.of(tensors, host="transformers"), None
