"""Every backend of attention by its name, with emulated libraries, as the one that each call is planned on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
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
from tests.plugins.flash_on_cpu import write_gaps

BACKENDS = ("sdpa", "triton", "cudnn", "fa2", "fa3", "fa4", "sdpa_cuda", "fa3_vllm", "fa3_sgl")
"""A backend's name, and what makes it another: sdpa's kernels for CUDA, FlashAttention 3 out of another package."""
CUDA = Platform("cuda", (9, 0), (("flash-attn-3", "3.0.0"), ("flash-attn-4", "4.0.0b36")), (9, 13, 0), "13.0")
PACKAGES = {"fa3_vllm": (("vllm", "0.25.1"),), "fa3_sgl": (("sgl-kernel", "0.3.21"),)}


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
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
    install(monkeypatch, "sgl_kernel.flash_attn", flash_attn_varlen_func=flash_attention_3.sgl_flash_attn_varlen_func)
    install(monkeypatch, "vllm.vllm_flash_attn")
    with flash_attention_3.vllm_operator():
        yield


def computed_by(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Every call's plan is the backend's, as on a Hopper where it is emulated."""
    backend, _, _ = name.partition("_")
    platform = replace(CUDA, packages=PACKAGES.get(name, CUDA.packages))

    def resolve(request: AttentionRequest, **_: Any) -> Plan:
        request = request if name in ("sdpa", "triton") else request.replace(device_type="cuda")
        return Plan(request, platform, backend, backend)

    monkeypatch.setattr(known, "resolve", resolve)
    monkeypatch.setattr(known, "_known", {})
