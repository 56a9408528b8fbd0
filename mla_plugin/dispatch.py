"""From a plan to the plugin that it names."""

from __future__ import annotations

import torch

from mla_plugin.hooks.manager import get_manager
from mla_plugin.types import AttentionOutput, AttentionTensors, Gradients, Plan, Residuals


def _answered(result: object, hook: str, backend: str) -> object:
    if result is None:
        raise RuntimeError(f"the backend {backend!r} accepted the request but has no {hook}; it returned None")
    return result


def forward(plan: Plan, tensors: AttentionTensors) -> AttentionOutput:
    """Run the plan's forward."""
    output = get_manager().caller("forward", plan.forward_backend)(plan=plan, tensors=tensors)
    return output or _answered(output, "forward", plan.forward_backend)  # type: ignore[return-value]


def backward(plan: Plan, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
    """Run the plan's backward."""
    caller = get_manager().caller("backward", plan.backward_backend)
    gradients = caller(plan=plan, residuals=residuals, dout=dout, dlse=dlse)
    return gradients or _answered(gradients, "backward", plan.backward_backend)  # type: ignore[return-value]
