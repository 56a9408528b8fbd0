"""Every backend of attention by its name, with emulated libraries, as the one that each call is planned on."""

from __future__ import annotations

from typing import Any

import pytest

from mla_plugin import AttentionRequest, Platform
from mla_plugin.hooks.attention import Plan
from mla_plugin.kernels.prefill import padding
from mla_plugin.operations.attention import known
from mla_plugin.plugins import cudnn
from mla_plugin.plugins.fa2 import providers
from mla_plugin.plugins.sdpa import efficient
from tests.plugins import emulation, flash_attention_2, flash_attention_3, flash_attention_4, test_cudnn
from tests.plugins.flash_libraries import install
from tests.plugins.flash_road import write_gaps

BACKENDS = ("sdpa", "triton", "cudnn", "fa2", "fa3", "fa4", "sdpa_cuda")
CUDA = Platform("cuda", (9, 0), (("flash-attn-3", "3.0.0"), ("flash-attn-4", "4.0.0b36")), (9, 13, 0), "13.0")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries, in the place of the real ones."""
    monkeypatch.setattr(padding, "write_gaps", write_gaps)
    monkeypatch.setattr(efficient, "_forward", emulation.forward)
    monkeypatch.setattr(efficient, "_backward", emulation.backward)
    monkeypatch.setattr(cudnn, "_forward", test_cudnn._emulated_forward)
    monkeypatch.setattr(cudnn, "_backward", test_cudnn._emulated_backward)
    monkeypatch.setattr(providers, "aten_forward", flash_attention_2.aten_forward)
    monkeypatch.setattr(providers, "aten_backward", flash_attention_2.aten_backward)
    install(monkeypatch, "flash_attn_interface", **flash_attention_3.NEWER)
    install(monkeypatch, "flash_attn.cute.interface", **flash_attention_4.MEMBERS)


def computed_by(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Every call's plan is the backend's, as on a Hopper where it is emulated."""
    backend = name.removesuffix("_cuda")

    def resolve(request: AttentionRequest, **_: Any) -> Plan:
        request = request if name in ("sdpa", "triton") else request.replace(device_type="cuda")
        return Plan(request, CUDA, backend, backend)

    monkeypatch.setattr(known, "resolve", resolve)
    monkeypatch.setattr(known, "_known", {})
