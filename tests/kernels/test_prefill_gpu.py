"""The prefill kernels where only a GPU will do: tensors of more than 2^31 elements, and many runs of the same call."""

import pytest
import torch

from mla_plugin.arguments.mask import Band
from mla_plugin.kernels import mla_attention
from mla_plugin.kernels.prefill import launch_backward as prefill_backward
from mla_plugin.kernels.prefill import launch_forward as prefill
from mla_plugin.kernels.prefill.packing import Packing

pytestmark = pytest.mark.gpu

SCALE = 192**-0.5
BFLOAT16 = {"device": "cuda", "dtype": torch.bfloat16}


def error(x: torch.Tensor, exact: torch.Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm()).item()


def rows_of_one_head(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The last len(q) queries of one causal sequence: their out and dq, and what they add to dk and dv."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
    scores = (q @ k.T) * SCALE
    future = torch.ones(scores.shape, dtype=torch.bool, device=q.device).triu(k.shape[0] - q.shape[0] + 1)
    out = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), dout.to(dtype)))


@pytest.mark.large_memory(52)
def test_more_than_2_31_elements() -> None:
    """A long sequence of 128 heads: q, k, v, out and their gradients all reach beyond 32-bit offsets."""
    seqlen, heads, last = 2**31 // (128 * 128) + 77, 128, 40
    q, k = (torch.randn(1, seqlen, heads, 192, **BFLOAT16).requires_grad_() for _ in range(2))
    v = torch.randn(1, seqlen, heads, 128, **BFLOAT16).requires_grad_()
    assert v.numel() > 2**31
    out = mla_attention(q, k, v, is_causal=True)
    dout = torch.randn_like(out)
    out.backward(dout)
    for head in (0, heads - 1):
        arguments = (q[0, -last:, head], k[0, :, head], v[0, :, head], dout[0, -last:, head])
        exact, plain = (rows_of_one_head(*arguments, dtype) for dtype in (torch.float64, torch.bfloat16))
        # the last keys are seen by the last queries alone, so their gradients are whole
        found = (out[0, -last:, head], q.grad[0, -last:, head], k.grad[0, -last:, head], v.grad[0, -last:, head])
        for x, wanted, reference in zip(found, exact, plain, strict=True):
            assert error(x, wanted[-last:]) <= 2 * error(reference[-last:], wanted[-last:])


@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd", "bhsd"])
@pytest.mark.large_memory(24)
def test_strides_beyond_2_31_elements(qkv_format: str) -> None:
    """Small tensors whose sequences, heads and tokens lie far apart, against the same values side by side."""
    sizes = {"bshd": (2, 130, 3), "sbhd": (130, 2, 3), "bhsd": (2, 3, 130)}[qkv_format]

    def far_apart(width: int) -> torch.Tensor:
        step = (2**31 // (sizes[0] * sizes[1] * sizes[2]) + 16) // 16 * 16
        buffer = torch.empty(step * sizes[0] * sizes[1] * sizes[2], **BFLOAT16)
        assert buffer.numel() > 2**31
        x = buffer.as_strided((*sizes, width), (step * sizes[1] * sizes[2], step * sizes[2], step, 1))
        return x.copy_(torch.randn(*sizes, width, **BFLOAT16))

    tensors = [far_apart(width) for width in (192, 192, 128, 128)]
    results = []
    for q, k, v, dout in (tensors, [x.contiguous() for x in tensors]):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = mla_attention(*leaves, is_causal=True, qkv_format=qkv_format)
        results.append([out, *torch.autograd.grad(out, leaves, dout)])
    for x, wanted in zip(*results, strict=True):
        assert torch.isfinite(wanted).all()
        assert error(x, wanted.double()) < 1e-3  # tensor descriptors or not: a few bits of the sums at most


def by_definition(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """out, dq, dk, dv of causal attention over [B, S, H, D] tensors."""
    q, k, v, dout = (x.detach().transpose(1, 2).to(dtype, copy=True) for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    scores = (q @ k.mT) * SCALE
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    out = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
    return [x.transpose(1, 2) for x in (out.detach(), *torch.autograd.grad(out, leaves, dout))]


@pytest.mark.parametrize(("offset", "gap"), [(0, 0), (0, 8), (1, 3)])
@pytest.mark.parametrize(
    "head_dims", [(24, 16), (64, 32), (80, 80), (112, 96), (192, 128)], ids=lambda x: f"{x[0]}_{x[1]}"
)
def test_strides_and_addresses_that_are_no_multiple_of_16(head_dims: tuple[int, int], offset: int, gap: int) -> None:
    """Where the assembler of CUDA 12.8 lost addresses of V: see ``with_aligned_rows``."""
    generator = torch.Generator("cuda").manual_seed(0)

    def spaced(width: int) -> torch.Tensor:
        row = width + gap
        buffer = torch.randn(2 * 150 * 3 * row + offset, generator=generator, device="cuda").bfloat16()
        return buffer[offset:].view(2, 150, 3, row)[..., :width]

    head_dim_qk, head_dim_v = head_dims
    tensors = [spaced(width) for width in (head_dim_qk, head_dim_qk, head_dim_v, head_dim_v)]
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out = mla_attention(*leaves, softmax_scale=SCALE, is_causal=True)
    found = [out, *torch.autograd.grad(out, leaves, tensors[3])]
    exact, low = (by_definition(tensors, precision) for precision in (torch.float64, torch.bfloat16))
    for x, wanted, plain in zip(found, exact, low, strict=True):
        assert error(x, wanted) <= 2 * error(plain, wanted)


@pytest.mark.parametrize("deterministic_on_purpose", [False, True])
def test_twenty_runs_agree_bit_for_bit(deterministic_on_purpose: bool) -> None:
    """Packed sequences of odd lengths, one empty, grouped heads: forward and backward."""
    torch.use_deterministic_algorithms(deterministic_on_purpose, warn_only=True)
    cu_seqlens = torch.tensor([0, 700, 700, 701, 1500], device="cuda", dtype=torch.int32)
    q = torch.randn(1500, 8, 192, **BFLOAT16)
    k, v = torch.randn(1500, 2, 192, **BFLOAT16), torch.randn(1500, 2, 128, **BFLOAT16)
    dout = torch.randn(1500, 8, 128, **BFLOAT16)
    packing = Packing("thd", 800, 800, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, mask=Band(-1, 0, False))

    def run() -> list[torch.Tensor]:
        out, lse = prefill.forward(q, k, v, SCALE, packing)
        return [out, lse, *prefill_backward.backward(q, k, v, out, lse, dout, None, SCALE, packing)]

    first = run()
    assert all(torch.isfinite(x).all() for x in first)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))
    torch.use_deterministic_algorithms(False)


@pytest.mark.peer("a second GPU")
def test_another_device_than_the_current_one() -> None:
    """Forward and backward, whose kernels are compiled and loaded in separate threads."""
    tensors = [torch.randn(1, 200, 2, width, **BFLOAT16) for width in (192, 192, 128, 128)]

    def run(device: str) -> list[torch.Tensor]:
        q, k, v, dout = (x.to(device).requires_grad_() for x in tensors)
        out = mla_attention(q, k, v, is_causal=True)
        return [x.cpu() for x in (out, *torch.autograd.grad(out, (q, k, v), dout))]

    for x, expected in zip(run("cuda:1"), run("cuda:0"), strict=True):
        assert torch.equal(x, expected)
