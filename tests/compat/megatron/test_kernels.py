"""The core attention on our Triton kernels, in their interpreter or on a GPU, and on a GPU's other backends."""

from __future__ import annotations

import pytest
import torch

from tests.compat.megatron.parts import (
    D_QK,
    D_V,
    H,
    causal,
    core,
    packed_reference,
    packing,
    reference,
    scores,
    tensors,
)

pytestmark = pytest.mark.xdist_group("megatron")  # importing it takes three seconds
gpu = pytest.mark.gpu


def on(device, leaves) -> list[torch.Tensor]:
    return [x.detach().to(device).requires_grad_() for x in leaves]


def plain(q, k, v, spans) -> torch.Tensor:
    """The yardstick: the same in the tensors' own dtype and on their device, [T, H * D_V]."""
    outs = torch.zeros(len(q), H * D_V, dtype=q.dtype, device=q.device)
    for (first, last), _ in spans:
        s = torch.einsum("qhd,khd->hqk", q[first:last], k[first:last]) * core().softmax_scale
        weights = s.masked_fill(~causal(last - first).to(q.device), -torch.inf).softmax(-1)
        outs[first:last] = torch.einsum("hqk,khd->qhd", weights, v[first:last]).flatten(1)
    return outs


def assert_as_exact_as_plain(module, device, dtype, times=2) -> None:
    """Packed sequences with padding, V with zeros appended: output and gradients, and the largest scores."""
    torch.manual_seed(0)
    leaves = tensors(40, batch=(), dtype=dtype)
    params, spans = packing((13, 0, 17), (16, 3, 21))
    dout = torch.randn(40, H * D_V).to(dtype)
    moved = on(device, leaves)
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        setattr(params, name, getattr(params, name).to(device))
    padded = torch.nn.functional.pad(moved[2], (0, D_QK - D_V))
    out = module(moved[0], moved[1], padded, None, packed_seq_params=params).flatten(1)
    found = [out, *torch.autograd.grad(out, moved, dout.to(device))]
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    exact = packed_reference(*exact_leaves, spans)
    exact_all = [exact, *torch.autograd.grad(exact, exact_leaves, dout.double())]
    low_leaves = on(device, leaves)
    low = plain(*low_leaves, spans)
    low_all = [low, *torch.autograd.grad(low, low_leaves, dout.to(device))]
    for x, yardstick, true in zip(found, low_all, exact_all, strict=True):
        limit = times * (yardstick.double().cpu() - true).norm() + 1e-7 * true.norm()
        assert (x.double().cpu() - true).norm() <= limit
    q, k, _ = exact_leaves
    largest = [scores(q[a:b, None], k[a:b, None], causal(b - a)).amax((0, 2, 3)) for (a, b), _ in spans if b > a]
    torch.testing.assert_close(
        module.current_max_attn_logits.double().cpu(), torch.stack(largest).amax(0).detach(), rtol=2e-6, atol=2e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_packed_on_triton(monkeypatch, dtype):
    monkeypatch.setenv("MLA_PLUGIN_BACKEND", "triton")
    assert_as_exact_as_plain(core(qk_clip=True), "cuda" if torch.cuda.is_available() else "cpu", dtype)


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["triton", "sdpa"])
def test_packed_on_a_gpu(monkeypatch, backend, dtype):
    monkeypatch.setenv("MLA_PLUGIN_BACKEND", backend)
    # PyTorch's memory-efficient kernel in float32: up to 2.8 times the error of its plain products, 5e-7 of a gradient
    times = 4 if (backend, dtype) == ("sdpa", torch.float32) else 2
    assert_as_exact_as_plain(core(qk_clip=True), "cuda", dtype, times)


@gpu
@pytest.mark.parametrize("backend", ["triton", "sdpa", "cudnn"])
def test_deepseek_dims_on_a_gpu(monkeypatch, backend):
    """sbhd, 192 and 128 columns: the output to bfloat16's roundings, the largest scores to float32's."""
    monkeypatch.setenv("MLA_PLUGIN_BACKEND", backend)
    q, k, v = (torch.randn(257, 2, H, dim, dtype=torch.bfloat16, device="cuda") for dim in (192, 192, 128))
    module = core(qk_clip=True, v_channels=128)
    out = module(q, k, v, None)
    visible = causal(257).cuda()
    expected = reference(q, k, v.double(), visible)
    assert (out.double() - expected).norm() < 4e-3 * expected.norm()
    largest = scores(q, k, visible).amax((0, 2, 3))
    torch.testing.assert_close(module.current_max_attn_logits.double(), largest, rtol=2e-6, atol=2e-5)
