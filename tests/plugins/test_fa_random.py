"""Random calls of the FlashAttention backends over their emulations, against ``plain``; padding holds NaN."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from mla_plugin import Platform
from mla_plugin.hooks.attention import Plan, Residuals
from mla_plugin.hooks.types import Accepted
from mla_plugin.kernels.prefill import padding
from mla_plugin.plugins import cudnn, fa2, fa3, fa4
from mla_plugin.plugins.fa2 import providers
from tests.plugins import flash_attention_2, flash_attention_3, flash_attention_4, plain, test_cudnn
from tests.plugins.flash_libraries import install
from tests.plugins.flash_on_cpu import write_gaps
from tests.plugins.random_calls import poison_padding, random_call

PLUGINS: dict[str, tuple[ModuleType, tuple[tuple[str, str], ...]]] = {
    "cudnn": (cudnn, ()),
    "fa2": (fa2, ()),
    "fa2_package": (fa2, (("flash-attn", "2.8.3"),)),
    "fa3": (fa3, (("flash-attn-3", "3.0.0"),)),
    "fa4": (fa4, (("flash-attn-4", "4.0.0b36"),)),
}
DIMS = ((192, 128), (64, 64), (96, 64), (128, 128), (128, 64), (256, 256), (56, 56))


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "write_gaps", write_gaps)
    monkeypatch.setattr(cudnn, "_forward", test_cudnn._emulated_forward)
    monkeypatch.setattr(cudnn, "_backward", test_cudnn._emulated_backward)
    monkeypatch.setattr(providers, "aten_forward", flash_attention_2.aten_forward)
    monkeypatch.setattr(providers, "aten_backward", flash_attention_2.aten_backward)
    install(monkeypatch, "flash_attn.flash_attn_interface", **flash_attention_2.MEMBERS)
    install(monkeypatch, "flash_attn_interface", **flash_attention_3.NEWER)
    install(monkeypatch, "flash_attn.cute.interface", **flash_attention_4.MEMBERS)


def check(name: str, seed: int) -> bool:
    """Whether the backend took the call; an error where it did and was wrong."""
    plugin, packages = PLUGINS[name]
    platform = Platform("cuda", (9, 0), packages, (9, 13, 0), "13.0")
    request, given = random_call(seed, (torch.bfloat16, torch.float16), dims=DIMS)
    given = replace(given, softmax_scale=request.head_dim_qk**-0.5)  # a larger one multiplies the rounding of out
    return_lse = seed % 3 == 0 and name.startswith("fa2")  # the others hand a gradient of lse on
    asked = request.replace(device_type="cuda", return_lse=return_lse)
    if not isinstance(plugin.select_backend(asked, platform), Accepted):
        return False
    plan = Plan(asked, platform, "", "")
    given = poison_padding((request, given), torch.nan) if request.has_padding else given
    leaves = replace(given, **{n: getattr(given, n).detach().double().requires_grad_() for n in ("q", "k", "v")})
    inputs = (leaves.q, leaves.k, leaves.v)
    exact, exact_lse = plain.attention(request, leaves)
    output = plugin.forward(plan, given)
    dout = torch.randn_like(output.out)
    dlse = torch.randn_like(output.lse) if return_lse else None
    if request.has_padding:
        dout = poison_padding((request, replace(given, q=dout)), torch.nan, ("q",)).q
    total = torch.where(dout.isnan(), 0, exact * dout.double()).sum()
    if dlse is not None:
        total = total + torch.where(exact_lse.isneginf(), 0, exact_lse * dlse.double()).sum()
    gradients = plugin.backward(plan, Residuals(given, output.out, output.lse), dout, dlse)
    wanted = [torch.zeros_like(x) for x in inputs]
    if total.requires_grad:
        wanted = list(torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True))
    close(output.lse, exact_lse)
    for found, expected in zip((output.out, gradients.dq, gradients.dk, gradients.dv), (exact, *wanted), strict=True):
        close(found, expected)
    return True


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    finite = expected.detach()[expected.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 1.0
    torch.testing.assert_close(found.double(), expected.detach(), rtol=0.03, atol=0.03 * max(1.0, largest))


@pytest.mark.parametrize("name", PLUGINS)
def test_random_calls(name: str) -> None:
    """Of many calls a backend takes a part; that part is right."""
    taken = sum(check(name, seed) for seed in range(150))
    assert taken > 3
