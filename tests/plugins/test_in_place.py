"""An in-place change of out or lse before the backward is PyTorch's usual error, whichever backend computed them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mla_plugin
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


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd", "bhsd", "thd"])
@pytest.mark.parametrize("dims", [(192, 128), (64, 64)])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_changed_result_is_pytorchs_usual_error(
    name: str, dims: tuple[int, int], qkv_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (name, qkv_format) == ("cudnn", "thd"):
        qkv_format = "bshd"  # cudnn refuses thd
    computed_by(monkeypatch, name)
    tokens = {"bshd": (1, 16, 2), "sbhd": (16, 1, 2), "bhsd": (1, 2, 16), "thd": (16, 2)}[qkv_format]
    options: dict[str, Any] = {"qkv_format": qkv_format, "return_lse": True}
    if qkv_format == "thd":
        options |= {"cu_seqlens_q": torch.tensor([0, 9, 16], dtype=torch.int32), "max_seqlen_q": 9, "max_seqlen_kv": 9}
    for changed in (0, 1):
        q, k, v = (torch.randn(*tokens, dim, dtype=torch.bfloat16, requires_grad=True) for dim in (dims[0], *dims))
        results = mla_plugin.attention(q, k, v, **options)
        results[changed].mul_(2)
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            results[0].sum().backward()
