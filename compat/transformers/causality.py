"""Whether a layer that gets no mask is causal, which the layers of some models do not say reliably."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel


def is_causal_without_mask(module: Any) -> bool:
    """Whether a layer that gets no mask attends to no later keys: by its ``is_causal``, if its model can be trusted."""
    if is_bidirectional_without_mask(getattr(module, "config", None)):
        return False
    return bool(getattr(module, "is_causal", True))


def is_bidirectional_without_mask(config: Any) -> bool:
    """Whether layers of a model attend in both directions where they get no mask, whatever their ``is_causal`` says.

    These are the models that support neither transformers' own sdpa nor other attention functions: in them the
    attribute may be missing or wrong, because nothing reads it. ``attention_mask_for`` gives them the masks of eager
    attention, where a mask is missing only if it would hide no key.

    ``config`` may serve several models, and its class may be derived from theirs. Where one of them supports attention
    functions, another one counts only if its module calls them: wrappers, such as reward models, do not.
    """
    return bool(_is_known_bidirectional(config.__class__))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_known_bidirectional(config_class: Any) -> bool:
    """Dynamo would trace the search. For PyTorch 2.10 a class is a constant, and a config is none."""
    return _is_bidirectional(config_class, len(PreTrainedModel.__subclasses__()))


@functools.lru_cache(maxsize=256)
def _is_bidirectional(config_class: type[Any], families: int) -> bool:
    """``families``: number of direct subclasses of ``PreTrainedModel``, so that models defined later count."""
    for kind in config_class.__mro__:
        models = [model for model in _subclasses(PreTrainedModel) if getattr(model, "config_class", None) is kind]
        if models:
            unsupported = [model for model in models if not _supports_attention_functions(model)]
            return len(unsupported) == len(models) or any(map(_calls_attention_functions, unsupported))
    return False


def _supports_attention_functions(model: type[Any]) -> bool:
    return any(getattr(model, name, False) for name in ("_supports_sdpa", "_supports_attention_backend"))


def _calls_attention_functions(model: type[Any]) -> bool:
    return hasattr(sys.modules.get(model.__module__), "ALL_ATTENTION_FUNCTIONS")


def _subclasses(of: type[Any]) -> Iterator[type[Any]]:
    for found in of.__subclasses__():
        yield found
        yield from _subclasses(found)
