"""cuDNN attention: refusals on hypothetical platforms, conformance with the kernel emulated and on a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_plugin import AttentionRequest, Platform, hookimpl
from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.conformance import BackendConformance
from mla_plugin.conformance import cases as conformance_cases
from mla_plugin.conformance.attention.oracle import Oracle
from mla_plugin.conformance.budget import Yardstick
from mla_plugin.hooks.attention import AttentionOutput, Gradients, Plan, Residuals
from mla_plugin.hooks.manager import BackendManager
from mla_plugin.hooks.types import Accepted, Refused
from mla_plugin.plugins import cudnn
from mla_plugin.plugins.sdpa import efficient
from mla_plugin.reference import attention
from tests.plugins import emulation
from tests.plugins.flash_on_cpu import few
from tests.plugins.test_sdpa import CudaPath
from tests.requests import mla_request

H100 = Platform("cuda", (9, 0), cudnn_version=(9, 13, 0), cuda_version="13.0")
B200 = Platform("cuda", (10, 0), cudnn_version=(9, 13, 0), cuda_version="13.0")
A100 = Platform("cuda", (8, 0), cudnn_version=(9, 13, 0), cuda_version="13.0")
RTX = Platform("cuda", (12, 0), cudnn_version=(9, 18, 1), cuda_version="13.0")
CPU = Platform()

REFUSES = {
    "fp32": "dtype=torch.float32",
    "fp64": "dtype=torch.float64",
    "thd": "qkv_format='thd'",
    "padding_masks": "attn_mask_type='padding",
    "arbitrary": "attn_mask_type='arbitrary'",
    "window": "window_size=",
    "unequal_lengths causal": "expected equal lengths or attn_mask_type='causal_bottom_right'",
    "more_queries causal_bottom_right": "expected at least 2 keys more than queries",
    "unequal_lengths window_without_causal_mask": "=",
    "lengths_2_3-causal_bottom_right-bf16": "expected at least 2 keys more than queries",
    **{
        f"lengths_{q}_1-{mask}-bf16": "max_seqlen_kv=1 < 2"
        for q in (1, 67)
        for mask in ("causal", "causal_bottom_right")
    },
    **dict.fromkeys(("no_sequences-bshd-fp16", "no_sequences-bhsd-bf16"), "batch_size=0"),
    "bias": "bias_type=",
    "deterministic training": "deterministic=True",
    "head_dims=256/256": "head_dim_qk=256",
    "head_dims=192/256": "head_dim_v=256",
    "head_dims=136/200": "head_dim_qk=136",
    "head_dims=13/7": "multiples of 8",
    "head_dims=64/512": "head_dim_v=512",
    "head_dims=576/512": "head_dim_qk=576",
}


@pytest.mark.gpu
@pytest.mark.peer("a Hopper GPU")
class TestCuda(BackendConformance):
    """What is refused is that of compute capability 9.0."""

    backend = "cudnn"
    device = "cuda"
    refuses = few(REFUSES, (*conformance_cases(), *conformance_cases("large")))


class _CudnnOnCpu:
    """The plugin on a hypothetical H100, over the tensors of the CPU."""

    @hookimpl
    def select_backend(self, request: AttentionRequest, platform: Platform) -> Accepted | Refused:
        return cudnn.select_backend(request.replace(device_type="cuda"), H100)

    @hookimpl
    def forward(self, plan: Plan, tensors: AttentionTensors) -> AttentionOutput:
        return cudnn.forward(plan, tensors)

    @hookimpl
    def backward(self, plan: Plan, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
        return cudnn.backward(plan, residuals, dout, dlse)


def _call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float) -> Any:
    """The kernel's demands, then its arguments as a request and tensors of the oracle."""
    for x in (q, k, v):
        assert x.dtype in (torch.bfloat16, torch.float16)
        assert x.stride(-1) == 1
        assert all(stride % 8 == 0 for stride in x.stride()[:-1])
        assert all(stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)
    request = AttentionRequest(
        qkv_format="bhsd",
        dtype=q.dtype,
        device_type="cpu",
        batch_size=q.shape[0],
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        max_seqlen_q=q.shape[2],
        max_seqlen_kv=k.shape[2],
        head_dim_qk=q.shape[3],
        head_dim_v=v.shape[3],
        attn_mask_type="causal" if is_causal else "no_mask",
    )
    assert not is_causal or q.shape[2] == k.shape[2]
    return request, AttentionTensors(q, k, v, scale)


def _emulated_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: None,
    compute_log_sumexp: bool,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
) -> tuple[Any, ...]:
    assert attn_bias is None
    assert compute_log_sumexp
    assert dropout_p == 0
    output = attention(*_call(query, key, value, is_causal, scale), compute_dtype=torch.float32)
    return (
        output.out.to(query.dtype),
        output.lse.unsqueeze(-1),
        None,
        None,
        query.shape[2],
        key.shape[2],
        None,
        None,
        None,
    )


def _memory_order(x: torch.Tensor) -> tuple[int, ...]:
    """The dimensions of more than one element, from the widest stride to the narrowest."""
    dims = [dim for dim, size in enumerate(x.shape) if size > 1]
    return tuple(sorted(dims, key=lambda dim: -x.stride(dim)))


def _emulated_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    attn_bias: None,
    cum_seq_q: None,
    cum_seq_k: None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    assert (max_q, max_k, dropout_p) == (query.shape[2], key.shape[2], 0)
    # the scores' gradients times the scale are rounded to float16
    assert query.dtype != torch.float16 or abs(scale) >= 2.0**-16
    # PyTorch caches the plans by the strides of q, k and v alone: the others must lie in memory as they do
    order_q = _memory_order(query)
    for x in (grad_out, out, key, value):
        order = _memory_order(x)
        assert [dim for dim in order if dim in order_q] == [dim for dim in order_q if dim in order]
    call = _call(query, key, value, is_causal, scale)
    oracle = Oracle(*call)
    gradients = oracle.backward(Yardstick(out.double(), out.double() * 0), logsumexp.squeeze(-1), grad_out, None)
    return tuple(gradients[name].exact.to(query.dtype) for name in ("dq", "dk", "dv"))


class TestCudaPath(BackendConformance):
    backend = "cudnn"
    is_slow = True
    refuses = few(REFUSES, (*conformance_cases(), *conformance_cases("large")))
    manager = BackendManager(builtins={}, load_entry_points=False)
    manager.register(_CudnnOnCpu(), "cudnn")
    manager.register(CudaPath(), "sdpa")

    @pytest.fixture(autouse=True)
    def _emulated_kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cudnn, "_forward", _emulated_forward)
        monkeypatch.setattr(cudnn, "_backward", _emulated_backward)
        monkeypatch.setattr(efficient, "_forward", emulation.forward)
        monkeypatch.setattr(efficient, "_backward", emulation.backward)


@pytest.mark.parametrize("platform", [H100, B200, Platform("cuda", (10, 3), (), (9, 11, 0), "13.0")])
@pytest.mark.parametrize("is_training", [False, True])
def test_mla_is_taken_where_the_kernel_exists(platform: Platform, is_training: bool) -> None:
    assert cudnn.select_backend(mla_request(is_training=is_training), platform) == Accepted()


@pytest.mark.parametrize("platform", [A100, H100, B200, RTX])
def test_small_head_dims_are_taken_everywhere(platform: Platform) -> None:
    assert isinstance(cudnn.select_backend(mla_request(head_dim_qk=96, head_dim_v=64), platform), Accepted)


def test_training_on_lse_hands_the_backward_to_sdpa() -> None:
    decision = cudnn.select_backend(mla_request(is_training=True, return_lse=True), H100)
    assert isinstance(decision, Accepted)
    assert decision.backward_by == "sdpa"
    assert cudnn.select_backend(mla_request(is_training=False, return_lse=True), H100) == Accepted()


def test_a_gradient_of_lse_is_an_error() -> None:
    request = mla_request(is_training=True)
    x = torch.zeros(2, 3, 16, 128)
    residuals = Residuals(AttentionTensors(x, x, x, 1.0), x, torch.zeros(2, 16, 3))
    with pytest.raises(ValueError, match="return_lse=True"):
        cudnn.backward(Plan(request, H100, "cudnn", "cudnn"), residuals, x, torch.zeros(2, 16, 3))


@pytest.mark.parametrize(
    ("platform", "changes", "reason"),
    [
        (CPU, {"device_type": "cpu"}, "device_type='cpu', expected 'cuda'"),
        (CPU, {}, "device_type='cpu', expected 'cuda'"),
        (Platform("cuda", (9, 0), (), (9, 13, 0)), {}, "cuda_version=None"),
        (Platform("cuda", (9, 0), (), None, "13.0"), {}, "cudnn_version=None < (9, 0, 0)"),
        (Platform("cuda", (9, 0), (), (8, 9, 7), "12.1"), {}, "cudnn_version=(8, 9, 7) < (9, 0, 0)"),
        (Platform("cuda", (9, 0), (), (9, 10, 1), "13.0"), {}, "cudnn_version=(9, 10, 1), expected any but"),
        (Platform("cuda", (7, 5), (), (9, 13, 0), "13.0"), {}, "compute_capability=(7, 5)"),
        (Platform("cuda", (10, 0), (), (9, 6, 0), "13.0"), {}, "cudnn_version=(9, 6, 0) < (9, 7, 0)"),
        (Platform("cuda", (12, 0), (), (9, 13, 0), "13.0"), {}, "cudnn_version=(9, 13, 0) < (9, 18, 1)"),
        (Platform("cuda", (9, 0), (), (9, 9, 0), "13.0"), {}, "cudnn_version=(9, 9, 0) < (9, 11, 0)"),
        (A100, {}, "head_dim_qk=192, head_dim_v=128 on compute_capability=(8, 0)"),
        (RTX, {}, "head_dim_qk=192, head_dim_v=128 on compute_capability=(12, 0)"),
        (H100, {"head_dim_qk": 576, "head_dim_v": 512}, "head_dim_qk=576, head_dim_v=512, expected at most 128"),
        (H100, {"head_dim_qk": 128, "head_dim_v": 192}, "head_dim_qk=128, head_dim_v=192, expected at most 128"),
        (H100, {"head_dim_v": 100}, "head_dim_v=100, expected multiples of 8"),
        (H100, {"dtype": torch.float32}, "dtype=torch.float32"),
        (H100, {"deterministic": True, "is_training": True}, "deterministic=True in training"),
        (H100, {"dropout_p": 0.1}, "dropout_p=0.1, expected 0"),
        (H100, {"max_seqlen_kv": 4096}, "max_seqlen_q=2048, max_seqlen_kv=4096, expected equal lengths or"),
        (
            H100,
            {"attn_mask_type": "causal_bottom_right", "bottom_right_diagonal": True, "max_seqlen_kv": 2049},
            "max_seqlen_q=2048, max_seqlen_kv=2049, expected at least 2 keys more than queries",
        ),
        (H100, {"window_size": (128, 0)}, "window_size=(128, 0)"),
        (H100, {"attn_mask_type": "no_mask", "max_seqlen_kv": 1, "window_size": (-1, -1)}, "max_seqlen_kv=1 < 2"),
        (H100, {"max_seqlen_q": 0, "max_seqlen_kv": 0}, "max_seqlen_q=0"),
        (H100, {"batch_size": 70_000}, "batch_size=70000 > 65535"),
        (H100, {"num_heads": 65_600, "num_kv_heads": 65_600}, "num_heads=65600 > 65535"),
        (H100, {"qkv_format": "thd"}, "qkv_format='thd'"),
        (H100, {"attn_mask_type": "padding_causal"}, "attn_mask_type='padding_causal'"),
        (H100, {"bias_type": "alibi"}, "bias_type='alibi'"),
        (H100, {"softmax_type": "learnable"}, "softmax_type='learnable'"),
        (H100, {"has_score_mod": True}, "score_mod=True"),
        (H100, {"fp8": True}, "fp8=True"),
        (H100, {"return_max_logit": True}, "return_max_logit=True"),
        (H100, {"num_splits": 4}, "num_splits=4"),
        (H100, {"has_kv_cache": True}, "has_kv_cache=True"),
        (H100, {"context_parallel": True, "cp_size": 2}, "cp_size=2"),
    ],
)
def test_a_refusal_says_what_was_found(platform: Platform, changes: dict[str, Any], reason: str) -> None:
    decision = cudnn.select_backend(mla_request(**changes), platform)
    assert isinstance(decision, Refused)
    assert any(reason in given for given in decision.reasons)


def test_every_reason_is_given() -> None:
    request = mla_request(dtype=torch.float64, dropout_p=0.5, bias_type="alibi", head_dim_qk=7)
    decision = cudnn.select_backend(request, A100)
    assert isinstance(decision, Refused)
    assert len(decision.reasons) == 4
