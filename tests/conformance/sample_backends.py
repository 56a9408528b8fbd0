"""Backends to try the suite on: two that keep the contract, written in two ways."""

from __future__ import annotations

import torch

from mla_plugin.arguments.layout import from_bhsd, to_bhsd
from mla_plugin.conformance import BackendConformance, Case, cases
from mla_plugin.hooks import hookimpl
from mla_plugin.hooks.attention import AttentionOutput, Gradients
from mla_plugin.hooks.manager import BackendManager
from mla_plugin.hooks.types import Accepted, Refused
from mla_plugin.reference import attention, attention_with_gradients, visibility

FLASH_REFUSES = {"thd": "qkv_format=thd", "padding_masks": "attn_mask_type=padding", "bias": "bias_type="}
LOG2_E = 1.4426950408889634


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class ReferenceBackend:
    """The oracle itself, accumulating as a kernel does; autograd is its backward. A broken one overrides a method."""

    def decide(self, request):
        return Accepted()

    def compute(self, request, tensors) -> AttentionOutput:
        output = attention(request, tensors, compute_dtype=accumulator(request.dtype))
        return AttentionOutput(output.out.to(request.dtype), output.lse)

    def differentiate(self, request, residuals, dout, dlse) -> Gradients:
        _, gradients = attention_with_gradients(
            request, residuals.tensors, dout, dlse, compute_dtype=accumulator(request.dtype)
        )
        return Gradients(**{name: x if x is None else x.to(request.dtype) for name, x in vars(gradients).items()})

    @hookimpl
    def select_backend(self, request, platform):
        return self.decide(request)

    @hookimpl
    def forward(self, plan, tensors):
        return self.compute(plan.request, tensors)

    @hookimpl
    def backward(self, plan, residuals, dout, dlse):
        return self.differentiate(plan.request, residuals, dout, dlse)


class FlashBackend(ReferenceBackend):
    """FlashAttention's arithmetic: base 2, weights rounded before the product, the backward from out and lse alone."""

    def decide(self, request):
        reasons = []
        if request.qkv_format == "thd":
            reasons.append("qkv_format=thd, accepted are dense layouts")
        if request.has_padding:
            reasons.append(f"attn_mask_type={request.attn_mask_type} has padding")
        if request.bias_type != "no_bias":
            reasons.append(f"bias_type={request.bias_type}, accepted is no_bias")
        return Refused(tuple(reasons)) if reasons else Accepted()

    def operands(self, request, tensors):
        group = request.num_heads // request.num_kv_heads
        q, k, v = (
            to_bhsd(x, request.qkv_format).to(accumulator(request.dtype)) for x in (tensors.q, tensors.k, tensors.v)
        )
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        hidden = ~visibility(request, q.shape[2], k.shape[2])
        if tensors.attention_mask is not None:
            hidden = hidden | tensors.attention_mask
        scores = (q @ k.mT * (tensors.softmax_scale * LOG2_E)).masked_fill(hidden, -torch.inf)
        return q, k, v, scores

    def compute(self, request, tensors):
        _, _, v, scores = self.operands(request, tensors)
        row_max = scores.amax(-1, keepdim=True)
        row_max = row_max.masked_fill(row_max.isneginf(), 0)
        weights = torch.exp2(scores - row_max)
        row_sum = weights.sum(-1, keepdim=True)
        out = weights.to(request.dtype).to(v.dtype) @ v / row_sum.masked_fill(row_sum == 0, 1)
        lse = (row_max + row_sum.log2()).squeeze(-1) / LOG2_E
        return AttentionOutput(from_bhsd(out, request.qkv_format).to(request.dtype), lse)

    def differentiate(self, request, residuals, dout, dlse):
        q, k, v, scores = self.operands(request, residuals.tensors)
        out, dout = (to_bhsd(x, request.qkv_format).to(q.dtype) for x in (residuals.out, dout))
        lse = residuals.lse.masked_fill(residuals.lse.isneginf(), torch.inf)
        weights = torch.exp2(scores - (lse * LOG2_E)[..., None])
        delta = (dout * out).sum(-1, keepdim=True)
        if dlse is not None:
            delta = delta - dlse[..., None]
        dscores = (weights * (dout @ v.mT - delta)).to(request.dtype).to(q.dtype)
        dq = dscores @ k * residuals.tensors.softmax_scale
        dk = dscores.mT @ q * residuals.tensors.softmax_scale
        dv = weights.to(request.dtype).to(q.dtype).mT @ dout
        dk, dv = (x.unflatten(1, (request.num_kv_heads, -1)).sum(2) for x in (dk, dv))
        return Gradients(*(from_bhsd(x, request.qkv_format).to(request.dtype) for x in (dq, dk, dv)))


def manager_of(backend: object) -> BackendManager:
    manager = BackendManager(builtins={}, load_entry_points=False)
    manager.register(backend, "sample")
    return manager


def suite_of(backend_object: object, **attributes: object) -> BackendConformance:
    """The suite as a test file's subclass would have it."""
    members = {"backend": "sample", **attributes}
    if "manager" not in members:
        members["manager"] = manager_of(backend_object)
    return type("TestSample", (BackendConformance,), members)()


def case_named(name: str) -> Case:
    return next(case for case in cases() if case.name == name)
