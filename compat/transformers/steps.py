"""Counts how often each layer used the latents and how often it expanded them, and logs why."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

_logger = logging.getLogger("mla_plugin.compat.transformers.latent")


class Reason(NamedTuple):
    """Why a call expanded K and V, and advice; advice None if there is nothing to do."""

    text: str
    advice: str | None = None


@dataclass
class LatentSteps:
    """Number of calls of one layer in this process; calls in compiled graphs are not counted.

    Attributes:
        absorbed: calls over latents.
        expanded: calls over expanded K and V, prompts included.
        reason: why the last of ``expanded`` was expanded; None if there is none.
    """

    absorbed: int = 0
    expanded: int = 0
    reason: str | None = None


_steps: weakref.WeakKeyDictionary[torch.nn.Module, LatentSteps] = weakref.WeakKeyDictionary()
_logged: dict[int, tuple[weakref.ref[Any], set[str]]] = {}
"""Logged reasons, by the id of a model's config, which its layers share."""


def record(module: Any, reason: Reason | None) -> None:
    """Count a call of a layer, expanded for ``reason`` or absorbed, and log each reason once for each model."""
    if torch.compiler.is_compiling() or not isinstance(module, torch.nn.Module):
        return
    steps = _steps.get(module)
    if steps is None:
        steps = _steps[module] = LatentSteps()
    if reason is None:
        steps.absorbed += 1
        return
    steps.expanded += 1
    steps.reason = reason.text
    if reason.advice is not None:
        _log_once(module, reason)


def _log_once(module: Any, reason: Reason) -> None:
    key, config = id(module.config), module.config
    if key not in _logged:
        _logged[key] = (weakref.ref(config, lambda _: _logged.pop(key, None)), set())
    logged = _logged[key][1]
    if reason.text in logged:
        return
    logged.add(reason.text)
    kind = type(module)
    _logger.warning(
        "layer %s, %s.%s, decodes over expanded K and V: %s; what to do: %s",
        getattr(module, "layer_idx", "?"),
        kind.__module__,
        kind.__qualname__,
        reason.text,
        reason.advice,
    )


def latent_steps(model: torch.nn.Module) -> dict[str, LatentSteps]:
    """How often each MLA layer of a model decoded over latents, and why it did not the last time that it did not.

    Args:
        model: of transformers; PEFT's and other wrappers too.

    Returns:
        name of each layer that was called without gradients since it was made, in order, to its counts. Empty before
        the first call, for models without latents, and for transformers before 5.15.

    Raises:
        TypeError: model is not a module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is {type(model).__name__}; expected a torch.nn.Module of transformers")
    found = ((name, _steps.get(module)) for name, module in model.named_modules())
    return {name: dataclasses.replace(steps) for name, steps in found if steps is not None}
