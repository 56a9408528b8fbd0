"""The fallback: conformance on the CPU, on the CUDA path with its kernels emulated, and on a CUDA device."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mla_plugin import hookimpl
from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.conformance import BackendConformance, Case
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, Gradients, Plan, Residuals
from mla_plugin.hooks.manager import BackendManager
from mla_plugin.hooks.types import Accepted, Platform, Refused
from mla_plugin.plugins import sdpa
from mla_plugin.plugins.sdpa import efficient
from tests.plugins import emulation


class TestCpu(BackendConformance):
    backend = "sdpa"


def with_padding(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """Those with rows outside the sequences, or with masks for them."""
    return tuple(case for case in cases if case.tags & {"padding_masks", "pad_between_seqs", "tail"})


class NanPadding(BackendConformance):
    """Only the cases with padding, which holds NaN."""

    is_slow = True
    padding_poison = torch.nan
    test_unusual_values = test_surroundings = test_drawn_calls = None

    def cases(self) -> tuple[Case, ...]:
        return with_padding(super().cases())


class TestCpuWithNanPadding(NanPadding, TestCpu):
    quick = True


@pytest.mark.gpu
class TestCuda(BackendConformance):
    backend = "sdpa"
    device = "cuda"


@pytest.mark.gpu
class TestCudaWithNanPadding(NanPadding, TestCuda):
    pass


def _as_cuda(plan: Plan) -> Plan:
    return Plan(plan.request.replace(device_type="cuda"), plan.platform, plan.forward_backend, plan.backward_backend)


class CudaPath:
    """The plugin as it would run on a CUDA device, over the tensors of the CPU."""

    @hookimpl
    def select_backend(self, request: AttentionRequest, platform: Platform) -> Accepted | Refused:
        return sdpa.select_backend(request.replace(device_type="cuda"), Platform("cuda", (9, 0)))

    @hookimpl
    def forward(self, plan: Plan, tensors: AttentionTensors) -> AttentionOutput:
        return sdpa.forward(_as_cuda(plan), tensors)

    @hookimpl
    def backward(self, plan: Plan, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
        return sdpa.backward(_as_cuda(plan), residuals, dout, dlse)


class TestCudaPath(BackendConformance):
    backend = "cuda_path"
    quick = is_slow = True
    manager = BackendManager(builtins={}, load_entry_points=False)
    manager.register(CudaPath(), "cuda_path")

    def cases(self) -> tuple[Case, ...]:
        # lse of one head and 32 rows needs no padding, so it stays a transposed view, whose head stride is 1
        case = Case("one_head_of_32_rows", seqlens_q=(32, 5), seqlens_kv=(3, 7), attn_mask_type="padding")
        return (*super().cases(), dataclasses.replace(case, num_heads=1, num_kv_heads=1))

    @pytest.fixture(autouse=True)
    def _emulated_kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(efficient, "_forward", emulation.forward)
        monkeypatch.setattr(efficient, "_backward", emulation.backward)


class TestCudaPathWithNanPadding(NanPadding, TestCudaPath):
    pass


def test_a_log_sum_exp_that_starts_off_16_bytes_is_moved() -> None:
    """Another backend may have made it; the kernel's misaligned read would end the process's use of the device."""
    request = AttentionRequest.of(AttentionTensors(*torch.randn(3, 1, 64, 2, 8), 1.0), is_training=True)
    call = efficient._dense_call(request, 1.0)
    lse = torch.randn(1 + 2 * 64)[1:].view(1, 2, 64)
    moved = call.kernel_lse(lse)
    assert lse.data_ptr() % 16
    assert moved.data_ptr() % 16 == 0
    assert torch.equal(moved, lse)
