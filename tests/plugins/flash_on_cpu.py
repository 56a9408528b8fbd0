"""Run a FlashAttention plugin as on a given GPU platform, with tensors on the CPU and its library emulated."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType

import pytest
import torch

from mla_plugin import AttentionRequest, Platform, hookimpl
from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.conformance import BackendConformance, Case
from mla_plugin.hooks.attention import AttentionOutput, Gradients, Plan, Residuals
from mla_plugin.hooks.manager import BackendManager
from mla_plugin.hooks.types import Accepted, Refused
from mla_plugin.kernels.prefill import padding
from mla_plugin.plugins.sdpa import efficient
from tests.plugins import emulation
from tests.plugins.flash_cases import packed_cases
from tests.plugins.test_sdpa import CudaPath

REFUSES = {
    "fp32": "dtype=torch.float32",
    "fp64": "dtype=torch.float64",
    "arbitrary": "attn_mask_type='arbitrary'",
    "bias": "bias_type=",
    "causal unequal_lengths": "FlashAttention aligns bottom-right",
    "padding_causal unequal_lengths": "FlashAttention aligns bottom-right",
    "no_tokens": "expected at least 1 each",
    "top_left_diagonal unequal_lengths": "FlashAttention aligns bottom-right",
    "head_dims=13/7": "head_dim_qk=13",
    "head_dims=576/512": "head_dim_qk=576",
    "head_dims=320/272": "head_dim_qk=320",
}
"""Refusals of all versions: label of the cases to a part of the reason."""


class OnPlatform:
    """A plugin that is told that it runs on ``platform``."""

    def __init__(self, plugin: ModuleType, platform: Platform) -> None:
        self._plugin, self._platform = plugin, platform

    def _on_platform(self, plan: Plan) -> Plan:
        return Plan(plan.request, self._platform, plan.forward_backend, plan.backward_backend)

    @hookimpl
    def select_backend(self, request: AttentionRequest, platform: Platform) -> Accepted | Refused:
        return self._plugin.select_backend(request.replace(device_type="cuda"), self._platform)

    @hookimpl
    def forward(self, plan: Plan, tensors: AttentionTensors) -> AttentionOutput:
        return self._plugin.forward(self._on_platform(plan), tensors)

    @hookimpl
    def backward(self, plan: Plan, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
        return self._plugin.backward(self._on_platform(plan), residuals, dout, dlse)


def manager_on(name: str, plugin: ModuleType, platform: Platform) -> BackendManager:
    """A manager with the plugin on the platform, and with the fallback, which may run its backward."""
    manager = BackendManager(builtins={}, load_entry_points=False)
    manager.register(OnPlatform(plugin, platform), name)
    manager.register(CudaPath(), "sdpa")
    return manager


def few(refuses: Mapping[str, str], cases: tuple[Case, ...]) -> dict[str, str]:
    """The refusals that apply to at least one of the cases."""
    labels = [case.tags | {case.name, "training", "inference"} for case in cases]
    return {key: text for key, text in refuses.items() if any(found.issuperset(key.split()) for found in labels)}


def write_gaps(x: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor | None, value: float = 0.0) -> None:
    """``kernels.prefill.padding.write_gaps``, which takes a second for a small batch in the interpreter."""
    inside = torch.zeros(x.shape[0], dtype=torch.bool)
    lengths = starts.diff() if lengths is None else lengths
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=False):
        inside[start : start + length] = True
    x[~inside] = value


class FittingRefusals(BackendConformance):
    """The suite's cases depend on what the plugin accepts; ``refuses`` is reduced to the refusals that they meet."""

    may_refuse: Mapping[str, str] = REFUSES
    """As ``refuses``; entries that match none of the cases are ignored."""

    @property
    def refuses(self) -> Mapping[str, str]:
        return _refuses(type(self))


@functools.cache
def _refuses(suite: type[FittingRefusals]) -> Mapping[str, str]:
    return few(suite.may_refuse, suite().cases())


class FlashConformance(FittingRefusals):
    """The suite with the other GPU kernels that the plugins call emulated too."""

    is_slow = True

    def cases(self) -> tuple[Case, ...]:
        """The suite's cases and the packed batches."""
        return (*super().cases(), *packed_cases((4, 2), (torch.bfloat16,)))

    @pytest.fixture(autouse=True)
    def _on_the_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(padding, "write_gaps", write_gaps)
        monkeypatch.setattr(efficient, "_forward", emulation.forward)
        monkeypatch.setattr(efficient, "_backward", emulation.backward)
