"""Megatron's layer specs: finds their attentions and replaces the dense ones."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any, TypeVar

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, get_module

from mla_plugin.compat.megatron.core_attention import MLACoreAttention

logger = logging.getLogger("mla_plugin")

Spec = TypeVar("Spec")

_NONE = object()

_MIXERS = ("self_attention", "mixer")
"""Fields of Megatron's submodules for what mixes tokens: self-attention, a gated delta net, Mamba."""


def with_core_attention(spec: Spec) -> Spec:
    """Put ``MLACoreAttention`` into every dense self-attention of a spec.

    Layers without a core attention (gated delta net, Mamba) stay as they are. So do sparse (DSA) layers, which a
    warning names, and cross-attention.

    Args:
        spec: Megatron's ``ModuleSpec`` of a layer, a hybrid stack or a multi-token-prediction block, or the submodules
            of one of them, such as ``TransformerBlockSubmodules``.

    Returns:
        The same spec, changed.

    Raises:
        ValueError: it holds no dense self-attention with a core attention; nothing is changed then.
    """
    mixers: dict[int, tuple[str, Any]] = {}  # layers share specs: each spec is reported once, for its first layer
    for path, mixer in _mixers(spec, ""):
        mixers.setdefault(id(mixer), (path, mixer))
    dense, sparse, others = [], [], []
    for path, mixer in mixers.values():
        core_attention = getattr(getattr(mixer, "submodules", None), "core_attention", _NONE)
        if core_attention is _NONE:
            others.append(f"{path}: {name_of(mixer)} has no core attention")
        elif is_sparse(core_attention):
            sparse.append(f"{path}: {name_of(mixer)} attends through {name_of(core_attention)}, which is sparse")
        else:
            dense.append(mixer)
    if not dense:
        found = "\n  ".join([*sparse, *others] or ["no attention at all"])
        raise ValueError(
            "expected Megatron's ModuleSpec of a layer, a hybrid stack or a multi-token-prediction block, or the "
            f"submodules of one of them, with a dense self-attention; this {type(spec).__name__} holds\n  {found}"
        )
    if sparse:
        logger.warning("with_core_attention leaves these layers to Megatron-Core:\n  %s", "\n  ".join(sparse))
    fix_te_flag()
    for attention in dense:
        attention.submodules.core_attention = ModuleSpec(module=MLACoreAttention)
    return spec


def mla_gpt_layer_spec(**options: Any) -> ModuleSpec:
    """The spec of a GPT layer with MLA out of Megatron's own modules, no TransformerEngine needed.

    Args:
        **options: those of Megatron's ``get_gpt_layer_local_spec``, such as ``num_experts``, ``moe_grouped_gemm``,
            ``qk_layernorm`` and ``normalization``.

    Returns:
        A new ``ModuleSpec``.
    """
    return with_core_attention(gpt_layer_specs.get_gpt_layer_local_spec(multi_latent_attention=True, **options))


def _mixers(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The token mixers in a spec, with their paths, such as ``layer_specs[3].self_attention``."""
    field = path.rpartition(".")[2]
    submodules: Any = getattr(node, "submodules", None)
    if field == "cross_attention" or node is IdentityOp:
        return
    if field in _MIXERS or hasattr(submodules, "core_attention"):
        yield path or "spec", node
    elif isinstance(node, ModuleSpec):
        yield from _mixers(submodules, path)
    elif isinstance(node, list):
        for index, item in enumerate(node):
            yield from _mixers(item, f"{path}[{index}]")
    elif dataclasses.is_dataclass(node) and not isinstance(node, type):
        for name in (entry.name for entry in dataclasses.fields(node)):
            yield from _mixers(getattr(node, name), f"{path}.{name}" if path else name)


def is_sparse(core_attention: Any) -> bool:
    """Whether a core attention has submodules, such as DSA's indexer, which selects keys."""
    return getattr(core_attention, "submodules", None) is not None


def module_of(spec: Any) -> Any:
    """The class that a spec builds; Megatron also accepts a class as spec."""
    return get_module(spec) if isinstance(spec, ModuleSpec) else spec


def name_of(spec: Any) -> str:
    """Name of the class that a spec builds."""
    module = module_of(spec)
    return getattr(module, "__name__", str(module))


def fix_te_flag() -> None:
    """Correct Megatron's flag for TransformerEngine if that is not installed.

    The MLA of 0.16 mistakes Megatron's placeholder classes for TransformerEngine's, and then fails in
    ``isinstance(layer, <placeholder>)``.
    """
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False
