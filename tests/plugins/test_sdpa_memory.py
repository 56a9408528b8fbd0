"""No route makes a tensor of S_q * S_kv elements, and on a CUDA device no length is read on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.hooks.attention import AttentionRequest, Plan, Residuals
from mla_plugin.hooks.types import Platform
from mla_plugin.plugins import sdpa
from mla_plugin.plugins.sdpa import blocked, efficient
from tests.plugins.calls import both_passes, request, tensors


class LargestTensor(TorchDispatchMode):
    """Remembers the elements of the largest storage that an operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() // x.element_size() for x in tree_leaves(result) if torch.is_tensor(x)]
        self.elements = max([self.elements, *sizes])
        return result


def largest(call: AttentionRequest, given: AttentionTensors) -> int:
    with LargestTensor() as mode:
        both_passes(call, given, dlse=torch.ones(call.batch_size, call.num_heads, call.max_seqlen_q))
    return mode.elements


def test_the_measure_sees_a_score_matrix() -> None:
    q = torch.randn(300, 2)
    with LargestTensor() as mode:
        torch.softmax(q @ q.T, -1)
    assert mode.elements == 300 * 300


@pytest.mark.parametrize("mask", ["no_mask", "causal", "causal_bottom_right", "padding_causal"])
@pytest.mark.parametrize("lengths", [(1024, 1024), (1024, 700), (700, 1024)])
def test_the_kernel_route_is_linear(mask: str, lengths: tuple[int, int]) -> None:
    """Nothing is larger than the widest padded input: heads times tokens times the wider head dim and one column."""
    call = request(attn_mask_type=mask, max_seqlen_q=lengths[0], max_seqlen_kv=lengths[1], head_dim_v=24)
    cu_seqlens = [torch.tensor([0, length - 100], dtype=torch.int32) for length in lengths]
    offsets = {"cu_seqlens_q": cu_seqlens[0], "cu_seqlens_kv": cu_seqlens[1]} if "padding" in mask else {}
    elements = largest(call, tensors(call, **offsets))
    assert elements <= call.num_heads * max(lengths) * 25
    assert elements < min(lengths) ** 2


@pytest.mark.parametrize(
    "changes", [{"window_size": (300, 5)}, {"dropout_p": 0.1}, {"bias_type": "post_scale_bias"}, {"padded": True}]
)
def test_blocks_stay_within_their_budget(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", 1 << 16)
    changes, is_padded = {k: v for k, v in changes.items() if k != "padded"}, "padded" in changes
    call = request(attn_mask_type="no_mask", max_seqlen_q=1024, max_seqlen_kv=1024, **changes)
    if is_padded:  # the blocks' CUDA path, with tensors on the CPU
        call = call.replace(attn_mask_type="padding", device_type="cuda", dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 999], dtype=torch.int32)
    bias = torch.zeros(1, 1, 1, 1024) if "bias_type" in changes else None
    given = tensors(call, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, bias=bias, dropout_seed=torch.tensor([1]))
    assert largest(call, given) <= 1 << 16


@pytest.mark.parametrize("qkv_format", ["bshd", "thd"])
@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize("changes", [{}, {"dtype": torch.float64}, {"window_size": (5, 0)}])
def test_the_cuda_paths_read_no_length(
    qkv_format: str, mask: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake tensors have no values, so reading one raises."""
    # PyTorch 2.13 registers a fake of the backward that lacks the argument ``out``, so no call fits it.
    monkeypatch.setattr(efficient, "_backward", lambda *x, **_: (*map(torch.empty_like, x[1:4]), None))
    call = request(qkv_format=qkv_format, attn_mask_type=mask, device_type="cuda", batch_size=3, **changes)
    tokens = (150,) if qkv_format == "thd" else (3, 64)
    with FakeTensorMode():
        q, k, v = (torch.empty(*tokens, heads, dim, dtype=call.dtype) for heads, dim in ((2, 24), (1, 24), (1, 16)))
        lengths = [torch.empty(4, dtype=torch.int32) for _ in range(4)]
        if qkv_format == "bshd":
            lengths[2:] = [None, None]
        given = AttentionTensors(q, k, v, 0.2, *lengths)
        plan = Plan(call, Platform("cuda"), "sdpa", "sdpa")
        output = sdpa.forward(plan, given)
        residuals = Residuals(given, output.out, output.lse)
        gradients = sdpa.backward(plan, residuals, torch.empty_like(output.out), torch.empty_like(output.lse))
    assert output.out.shape == (*tokens, 2, 16)
    assert output.lse.shape == ((2, 150) if qkv_format == "thd" else (3, 2, 64))
    assert (gradients.dq.shape, gradients.dk.shape, gradients.dv.shape) == (q.shape, k.shape, v.shape)


@pytest.mark.gpu
@pytest.mark.parametrize("qkv_format", ["bshd", "thd"])
def test_peak_memory_on_the_device_is_linear(qkv_format: str) -> None:
    """Twice the tokens take twice the memory, within a tenth; a score matrix would take four times."""

    def peak(length: int) -> int:
        mask = {"attn_mask_type": "padding_causal"} if qkv_format == "thd" else {}
        heads = {"num_heads": 8, "num_kv_heads": 8, "head_dim_qk": 192, "head_dim_v": 128}
        call = request(device_type="cuda", dtype=torch.bfloat16, max_seqlen_q=length, max_seqlen_kv=length, **heads)
        cu_seqlens = torch.tensor([0, length], dtype=torch.int32, device="cuda")
        given = tensors(call, "cuda", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
        if qkv_format == "thd":
            call = call.replace(qkv_format="thd", **mask)
            given = AttentionTensors(given.q[0], given.k[0], given.v[0], 0.1, cu_seqlens, cu_seqlens)
        torch.cuda.reset_peak_memory_stats()
        both_passes(call, given)
        return torch.cuda.max_memory_allocated()

    peak(1024)
    assert peak(16384) < 2.2 * peak(8192)
