"""``register``: every dense MLA layer that is built afterwards uses the plugin."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec

from mla_plugin.compat.megatron.core_attention import MLACoreAttention
from mla_plugin.compat.megatron.specs import fix_te_flag, module_of, name_of

try:
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla
except ImportError:  # 0.16
    absorbed_mla = None

logger = logging.getLogger("mla_plugin")

_REPLACED = (DotProductAttention, TEDotProductAttention)
"""Megatron's dense core attentions. Without TransformerEngine the second is a placeholder class."""


def register() -> None:
    """Give ``MLACoreAttention`` to every dense MLA layer built from now on; calling it again changes nothing.

    It replaces Megatron's ``DotProductAttention`` and ``TEDotProductAttention``. The layer's spec decides:
    sparse (DSA) layers and layers with a core attention of the program's own keep it, and a warning names each kind
    once. Megatron then also stops appending zeros to V.
    """
    layer = multi_latent_attention.MultiLatentAttention
    if layer.__init__.__module__ == __name__:
        return
    fix_te_flag()
    _choose_when_built(layer, _ours_for_megatrons_own)
    if absorbed_mla is not None:
        _choose_when_built(absorbed_mla.AbsorbedMLASelfAttention, _as_it_is)
    original_prepare = getattr(multi_latent_attention, "_prepare_mla_core_attention_value", None)
    if original_prepare is None:
        return

    def prepare(layer: Any, query: torch.Tensor, value: torch.Tensor, packed_seq_params: Any) -> Any:
        # without packed_seq_params Megatron does not append zeros to V
        is_ours = isinstance(layer.core_attention, MLACoreAttention)
        return original_prepare(layer, query, value, None if is_ours else packed_seq_params)

    multi_latent_attention._prepare_mla_core_attention_value = prepare


def _choose_when_built(layer: Any, choose: Callable[[Any], Any]) -> None:
    """Let ``choose`` decide on the submodules of every layer of this class."""
    original_init = layer.__init__

    def init(self: Any, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, config, choose(submodules), *args, **kwargs)

    layer.__init__ = init


def _ours_for_megatrons_own(submodules: Any) -> Any:
    """The submodules of a layer that expands its latents to K and V."""
    core_attention = submodules.core_attention
    module = module_of(core_attention)
    if core_attention is None or any(module is replaced for replaced in _REPLACED):
        return dataclasses.replace(submodules, core_attention=ModuleSpec(module=MLACoreAttention))
    if not (isinstance(module, type) and issubclass(module, MLACoreAttention)):
        _warn_once(name_of(core_attention))
    return submodules


def _as_it_is(submodules: Any) -> Any:
    """The submodules of a layer with weight absorption, which Megatron uses for sparse attention only."""
    _warn_once(name_of(submodules.core_attention))
    return submodules


@functools.cache
def _warn_once(name: str) -> None:
    logger.warning(
        'MLA layers with the core attention %s keep it: mla_plugin.register("megatron") replaces '
        "DotProductAttention and TEDotProductAttention, not of sparse attention or of a program's own",
        name,
    )
