"""Random calls of the fallback, on the CPU and on the CUDA path with its kernels emulated, against ``plain``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.hooks.attention import AttentionRequest, Plan, Residuals
from mla_plugin.hooks.types import Platform
from mla_plugin.plugins import sdpa
from mla_plugin.plugins.sdpa import batches, blocked, efficient, tiles
from tests.plugins import emulation, plain
from tests.plugins.random_calls import poison_padding, random_call

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 1e-2}


def check(request: AttentionRequest, given: AttentionTensors, device_type: str) -> None:
    """Both passes, with and without a gradient of lse, and with NaN in all padding."""
    request = request.replace(device_type=device_type)
    plan = Plan(request, Platform(device_type), "sdpa", "sdpa")
    given = poison_padding((request, given), torch.nan) if request.has_padding else given
    names = [name for name in ("q", "k", "v", "bias") if getattr(given, name) is not None]
    leaves = replace(given, **{name: getattr(given, name).detach().double().requires_grad_() for name in names})
    exact, exact_lse = plain.attention(request, leaves)
    output = sdpa.forward(plan, given)
    tolerance = TOLERANCE[request.dtype]
    close(output.out, exact, tolerance)
    close(output.lse, exact_lse, tolerance)
    assert output.out.is_contiguous()
    dout = torch.randn_like(output.out)
    for dlse in (None, torch.randn_like(output.lse)):
        total = (exact * dout.double()).sum()
        if dlse is not None:
            total = total + (exact_lse.masked_fill(exact_lse.isneginf(), 0) * dlse.double()).sum()
        gradients = sdpa.backward(plan, Residuals(given, output.out, output.lse), dout, dlse)
        if not total.requires_grad:
            wanted = [torch.zeros_like(getattr(leaves, name)) for name in names]
        else:
            inputs = [getattr(leaves, name) for name in names]
            wanted = torch.autograd.grad(total, inputs, retain_graph=True, allow_unused=True, materialize_grads=True)
        for name, expected in zip(names, wanted, strict=True):
            found = getattr(gradients, f"d{name}")
            if name == "bias" and not request.bias_requires_grad:
                assert found is None
                continue
            close(found, expected, tolerance)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    largest = expected.detach()[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 1.0
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected.detach(), rtol=tolerance, atol=tolerance * max(1.0, largest))


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficient, "_forward", emulation.forward)
    monkeypatch.setattr(efficient, "_backward", emulation.backward)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_random_call(seed: int, device_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 2:
        monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", 64)
        monkeypatch.setattr(blocked, "MIN_BLOCK_ROWS", 3)
    if seed % 3:  # parts of one sequence and head, or of a few
        sizes = batches.Sizes(1, 1, 1) if seed % 3 == 1 else batches.Sizes(1, 900, 900)
        monkeypatch.setattr(batches, "COPIED", sizes)
        monkeypatch.setattr(batches, "AS_GIVEN", sizes)
        monkeypatch.setattr(tiles, "FORWARD_SIDE", 1 + seed % 7)
        monkeypatch.setattr(tiles, "BACKWARD_SIDE", 1 + seed % 5)
        monkeypatch.setattr(tiles, "ROWS_PER_THREAD", 1)
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    check(*random_call(seed, dtypes), device_type)
