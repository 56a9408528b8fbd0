"""Calls the plugin that a plan names."""

from __future__ import annotations

from typing import TypeVar

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.hooks.attention import AttentionOutput, Gradients, Plan, Residuals
from mla_plugin.hooks.manager import get_manager

Answer = TypeVar("Answer", AttentionOutput, Gradients)


def _checked(result: object, answer: type[Answer], hook: str, backend: str) -> Answer:
    if result is None:
        raise RuntimeError(
            f"the backend {backend!r} accepted the request but has no {hook}; it returned None. "
            f"MLA_PLUGIN_BLOCK={backend} excludes it"
        )
    if not isinstance(result, answer):
        raise TypeError(
            f"{hook} of the backend {backend!r} returned {type(result).__name__}, not {answer.__name__}. "
            f"MLA_PLUGIN_BLOCK={backend} excludes it"
        )
    return result


def forward(plan: Plan, tensors: AttentionTensors) -> AttentionOutput:
    """Run the plan's forward; an exception from it gets a note that names the backend.

    Raises:
        ValueError: the backend has been unregistered since the plan was made.
        RuntimeError, TypeError: the backend returned None, or something other than an output.
    """
    output = get_manager().caller("forward", plan.forward_backend)(plan=plan, tensors=tensors)
    return _checked(output, AttentionOutput, "forward", plan.forward_backend)


def backward(plan: Plan, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
    """Run the plan's backward; errors as ``forward``."""
    caller = get_manager().caller("backward", plan.backward_backend)
    gradients = caller(plan=plan, residuals=residuals, dout=dout, dlse=dlse)
    return _checked(gradients, Gradients, "backward", plan.backward_backend)
