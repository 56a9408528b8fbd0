"""What a backend does on the host for one call: counted, because time differs between machines and moments.

The libraries are stand-ins that return the same memory every time, so that only a plugin's own steps are counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import mla_plugin
from mla_plugin import AttentionRequest, Platform, reference
from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.options import CallOptions
from mla_plugin.hooks.attention import Plan, Residuals, request_of
from mla_plugin.plugins import cudnn, fa2, fa3, fa4, sdpa
from mla_plugin.plugins.sdpa import efficient
from tests.plugins.flash_libraries import install
from tests.plugins.test_signatures import RECORDED

PACKAGES = (("flash-attn", "2.8.3"), ("flash-attn-3", "3.0.0"), ("flash-attn-4", "4.0.0b36"))
HOPPER = Platform("cuda", (9, 0), PACKAGES, (9, 13, 0), "13.0")


class Operator:
    """Stands in for one of FlashAttention 3's, of the newest recorded schema."""

    def __init__(self, name: str, results: tuple[Any, ...]) -> None:
        self._schema = torch._C.parse_schema(name + list(RECORDED["fa3"][f"flash_attn_3::{name}"])[-1])
        self._results, self.default = results, self

    def __call__(self, *_: Any) -> tuple[Any, ...]:
        return self._results


class Library:
    """Functions of every library that return the same results."""

    def __init__(self, q: torch.Tensor, v: torch.Tensor) -> None:
        tokens, heads = q.shape[1:3]
        lse, self.gradients = torch.empty(1, heads, tokens), (torch.empty_like(q), torch.empty_like(q), v.clone())
        out = torch.empty_like(v)
        self.out_and_lse = (out, lse)
        self.wide, self.narrow = (q.clone(), lse, None, None), (out, lse, None, None)
        self.heads_first = (out.transpose(1, 2), lse.unsqueeze(-1), *[None] * 7)
        self.rows_of_32 = (out, torch.empty(1, heads, -(-tokens // 32) * 32), None, None, 0, 0)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In the place of the real ones."""
        gradients = self.gradients
        dq, dk, dv = (x.transpose(1, 2) for x in gradients)
        monkeypatch.setattr(cudnn, "_forward", lambda *_, **__: self.heads_first)
        monkeypatch.setattr(cudnn, "_backward", lambda *_, **__: (dq, dk, dv))
        monkeypatch.setattr(efficient, "_forward", lambda *_, **__: self.rows_of_32)
        monkeypatch.setattr(efficient, "_backward", lambda *_, **__: (*gradients, None))
        flash = {"_flash_attn_forward": lambda *_, **__: self.wide, "_flash_attn_backward": lambda *_, **__: None}
        install(monkeypatch, "flash_attn.flash_attn_interface", **flash)
        install(
            monkeypatch,
            "flash_attn.cute.interface",
            flash_attn_func=lambda *_, **__: self.out_and_lse,
            _flash_attn_bwd=lambda *_, **__: gradients,
            _validate_head_dims=None,
        )
        install(monkeypatch, "flash_attn_interface")
        operators = {name: Operator(name, self.narrow) for name in ("fwd", "bwd")}
        monkeypatch.setattr(torch.ops, "flash_attn_3", SimpleNamespace(**operators), raising=False)


def calls_of(function: Callable[[], object]) -> int:
    """Functions that a call enters, those of C included, once everything that is kept is there."""
    count = 0

    def seen(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    for _ in range(3):
        function()
    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    ("name", "plugin", "forward", "backward"),
    [
        ("cudnn", cudnn, 22, 59),
        ("sdpa", sdpa, 20, 86),
        ("fa2", fa2, 25, 90),
        ("fa3", fa3, 22, 90),
        ("fa4", fa4, 20, 86),
    ],
)
def test_a_dense_call_takes_few_steps(
    name: str, plugin: ModuleType, forward: int, backward: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = (torch.zeros(1, 16, 2, 192, dtype=torch.bfloat16) for _ in range(2))
    v = torch.zeros(1, 16, 2, 128, dtype=torch.bfloat16)
    Library(q, v).install(monkeypatch)
    tensors = AttentionTensors(q, k, v, 0.1)
    vars(tensors)["kept"] = {}  # as the entry gives it
    request = request_of(tensors, CallOptions(is_training=True).completed(tensors)).replace(device_type="cuda")
    plan = Plan(request, HOPPER, name, name)
    output = plugin.forward(plan, tensors)
    residuals = Residuals(tensors, output.out.clone(), output.lse)
    dout = torch.zeros_like(v)
    found = (
        calls_of(lambda: plugin.forward(plan, tensors)),
        calls_of(lambda: plugin.backward(plan, residuals, dout, None)),
    )
    print(name, found)
    assert found[0] <= forward
    assert found[1] <= backward


def test_a_dense_call_of_vllms_operator_takes_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lengths that FlashAttention 3 out of vLLM needs with dense tensors are kept; no tensor is viewed."""
    q, v = torch.zeros(2, 16, 2, 192, dtype=torch.bfloat16), torch.zeros(2, 16, 2, 128, dtype=torch.bfloat16)
    operator = Operator("fwd", (torch.empty_like(v), torch.empty(2, 2, 16), None, None))
    install(monkeypatch, "vllm.vllm_flash_attn")
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", SimpleNamespace(fwd=operator), raising=False)
    tensors = AttentionTensors(q, q, v, 0.1)
    vars(tensors)["kept"] = {}
    request = request_of(tensors, CallOptions().completed(tensors)).replace(device_type="cuda")
    plan = Plan(request, replace(HOPPER, packages=(("vllm", "0.26.0"),)), "fa3", "fa3")
    assert fa3.forward(plan, tensors).out.shape == v.shape
    assert (found := calls_of(lambda: fa3.forward(plan, tensors))) <= 18, found


BASE: dict[str, Any] = {"softmax_scale": 0.1, "attn_mask_type": "causal", "deterministic": False, "return_lse": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "scale": {"softmax_scale": 0.3},
    "integer scale": {"softmax_scale": 1},
    "no mask": {"attn_mask_type": "no_mask"},
    "bottom right": {"attn_mask_type": "causal_bottom_right"},
    "window": {"window_size": (3, 0)},
    "deterministic": {"deterministic": True},
    "lse": {"return_lse": True},
    "backend": {"backend": "sdpa"},
    "layout": {"qkv_format": "sbhd"},
    "heads first": {"qkv_format": "bhsd"},
}
TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "given": lambda x: x,
    "strided": lambda x: torch.cat((x, x), 2)[:, :, ::2].contiguous()[:, :, : x.shape[2]],
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "sliced": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "odd address": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
    "columns apart": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "float64": lambda x: x.double(),
    "bfloat16": lambda x: x.bfloat16(),
}


@pytest.mark.parametrize("seed", [0, 1])
def test_calls_that_differ_in_one_thing_share_nothing_of_it(seed: int) -> None:
    """Everything that is kept is kept under a key; in shuffled order, each call after calls of other kinds."""
    generator = torch.Generator().manual_seed(seed)
    kinds = [(call, form) for call in VARIANTS for form in TENSORS]
    grads = [tuple(bool(bits >> i & 1) for i in range(3)) for bits in range(8)]
    for index in torch.randperm(len(kinds), generator=generator).tolist():
        call, form = kinds[index]
        options = BASE | VARIANTS[call]
        q, k, v = (TENSORS[form](torch.randn(6, 6, 6, dim, generator=generator)) for dim in (24, 24, 16))
        needs = grads[int(torch.randint(8, (), generator=generator))]
        given = [x.requires_grad_(wanted) for x, wanted in zip((q, k, v), needs, strict=True)]
        with torch.autocast("cpu", torch.bfloat16, enabled=form == "given" and index % 2 == 0):
            found = mla_plugin.attention(*given, **options)
        check(found, given, options)


def check(found: Any, given: list[torch.Tensor], options: dict[str, Any]) -> None:
    """Out, lse and the gradients against float64."""
    out, lse = found if options["return_lse"] else (found, None)
    tensors = AttentionTensors(*(x.detach() for x in given), float(options["softmax_scale"]))
    said = {name: options[name] for name in ("attn_mask_type", "window_size", "qkv_format") if name in options}
    request = AttentionRequest.of(tensors, **said)
    dout = torch.randn_like(out.float()).to(out.dtype)
    exact, gradients = reference.attention_with_gradients(request, tensors, dout)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(out.dtype, 6e-2)
    torch.testing.assert_close(out.double(), exact.out, atol=tolerance, rtol=tolerance)
    if lse is not None:
        torch.testing.assert_close(lse.double(), exact.lse, atol=tolerance, rtol=tolerance)
    wanted = [(x, getattr(gradients, name)) for x, name in zip(given, ("dq", "dk", "dv"), strict=True)]
    wanted = [(x, gradient) for x, gradient in wanted if x.requires_grad]
    assert out.requires_grad == bool(wanted)
    if wanted:
        results = torch.autograd.grad(out, [x for x, _ in wanted], dout)
        for result, (x, gradient) in zip(results, wanted, strict=True):
            assert result.dtype == x.dtype
            torch.testing.assert_close(result.double(), gradient, atol=5 * tolerance, rtol=5 * tolerance)
