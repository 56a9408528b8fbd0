"""A backward over some of the keys, with the out and lse of all: the parts' gradients add up to the whole's.

Context parallelism calls a backward so, once for each part of the keys that a rank holds.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.hooks.attention import AttentionRequest, Gradients, Plan, Residuals
from mla_plugin.hooks.types import Platform
from mla_plugin.plugins import sdpa
from mla_plugin.plugins.sdpa import blocked, efficient
from tests.plugins import emulation
from tests.plugins.calls import request, tensors

CUT = 23
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "cpu_kernel": ("cpu", {}),
    "cpu_blocks_bias": ("cpu", {"bias_type": "post_scale_bias"}),
    "cpu_blocks_pre_scale_bias": ("cpu", {"bias_type": "pre_scale_bias"}),
    "cpu_blocks_arbitrary": ("cpu", {"attn_mask_type": "arbitrary"}),
    "cuda_kernel": ("cuda", {}),
    "cuda_blocks": ("cuda", {"dtype": torch.float64}),
    "cuda_blocks_bias": ("cuda", {"bias_type": "post_scale_bias"}),
}


def _some_keys(given: AttentionTensors, keys: slice) -> AttentionTensors:
    parts = {name: getattr(given, name)[:, keys] for name in ("k", "v")}
    for name in ("bias", "attention_mask"):
        if getattr(given, name) is not None:
            parts[name] = getattr(given, name)[..., keys]
    return dataclasses.replace(given, **parts)


def _backward(
    call: AttentionRequest, given: AttentionTensors, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None
) -> Gradients:
    call = call.replace(max_seqlen_kv=given.k.shape[0 if call.qkv_format == "thd" else 1])
    plan = Plan(call, Platform(call.device_type), "sdpa", "sdpa")
    return sdpa.backward(plan, Residuals(given, residuals.out, residuals.lse), dout, dlse)


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize(
    ("name", "layout"),
    [*((name, "bshd") for name in ROUTES), ("cpu_kernel", "thd"), ("cuda_kernel", "thd"), ("cuda_blocks", "thd")],
)
def test_parts_add_up(name: str, layout: str, with_dlse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficient, "_forward", emulation.forward)
    monkeypatch.setattr(efficient, "_backward", emulation.backward)
    monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", 1024)
    device_type, changes = ROUTES[name]
    call = request(
        **{"attn_mask_type": "no_mask", "bias_requires_grad": "bias_type" in changes, **changes},
        device_type=device_type,
    )
    extra: dict[str, Any] = {}
    if "bias_type" in changes:
        extra["bias"] = torch.randn(1, 2, 64, 64, dtype=call.dtype)
    if call.attn_mask_type == "arbitrary":
        extra["attention_mask"] = torch.rand(1, 1, 64, 64) < 0.5
        extra["attention_mask"][..., 7, :] = True  # sees no key at all
        extra["attention_mask"][..., 8, :CUT] = True  # sees none of the first part
    if layout == "thd":
        call = call.replace(qkv_format="thd", attn_mask_type="padding")
    given = tensors(call, **extra)
    plan = Plan(call, Platform(device_type), "sdpa", "sdpa")

    def packed(x: AttentionTensors) -> AttentionTensors:
        if layout == "bshd":
            return x
        offsets = [torch.tensor([0, y.shape[1]], dtype=torch.int32) for y in (x.q, x.k)]
        return AttentionTensors(x.q[0], x.k[0], x.v[0], x.softmax_scale, *offsets)

    whole = packed(given)
    output = sdpa.forward(plan, whole)
    residuals = Residuals(whole, output.out, output.lse)
    dout = torch.randn_like(output.out)
    dlse = torch.randn_like(output.lse) if with_dlse else None
    expected = sdpa.backward(plan, residuals, dout, dlse)
    parts = [
        _backward(call, packed(_some_keys(given, keys)), residuals, dout, dlse)
        for keys in (slice(0, CUT), slice(CUT, 64))
    ]
    axis = 0 if layout == "thd" else 1
    found = {
        "dq": parts[0].dq + parts[1].dq,
        "dk": torch.cat([part.dk for part in parts], axis),
        "dv": torch.cat([part.dv for part in parts], axis),
    }
    if expected.dbias is not None:
        assert parts[0].dbias is not None
        assert parts[1].dbias is not None
        found["dbias"] = torch.cat([parts[0].dbias, parts[1].dbias], -1)
    for gradient, value in found.items():
        torch.testing.assert_close(value, getattr(expected, gradient), rtol=1e-4, atol=1e-5, msg=gradient)


@pytest.mark.parametrize("changes", [{}, {"window_size": (9, 3)}, {"bias_type": "post_scale_bias"}])
def test_the_given_out_is_used(changes: dict[str, Any]) -> None:
    """delta = rowsum(dout * out): with out = 0 and dlse = 0, dS = P * dP."""
    call = request(attn_mask_type="no_mask", dtype=torch.float64, num_kv_heads=2, **changes)
    bias = torch.zeros(1, 1, 64, 64, dtype=torch.float64) if "bias_type" in changes else None
    given = tensors(call, bias=bias)
    plan = Plan(call, Platform(), "sdpa", "sdpa")
    output = sdpa.forward(plan, given)
    dout = torch.randn_like(output.out)
    gradients = sdpa.backward(plan, Residuals(given, torch.zeros_like(output.out), output.lse), dout, None)
    q, k, v, d = (x.transpose(1, 2) for x in (given.q, given.k, given.v, dout))
    i, j = torch.arange(64)[:, None], torch.arange(64)
    left, right = call.window_size
    hidden = ((j < i - left) if left >= 0 else False) | ((j > i + right) if right >= 0 else False)
    scores = q @ k.transpose(-1, -2) * given.softmax_scale
    scores = scores.masked_fill(torch.as_tensor(hidden), -torch.inf)
    dq = (scores.softmax(-1) * (d @ v.transpose(-1, -2))) @ k * given.softmax_scale
    torch.testing.assert_close(gradients.dq, dq.transpose(1, 2))
