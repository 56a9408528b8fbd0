"""The refusals that tests/plugins/test_decode_gpu.py expects of each backend, judged for an H200 without one."""

from __future__ import annotations

import pytest

from mla_plugin.conformance import ConformanceError, DecodeCase, DecodeConformance
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.types import Platform
from tests.plugins import test_decode_gpu as on_gpu

PACKAGES = {
    "flash-mla": "1.0.0",
    "flash_attn_3": "3.0.0",
    "flashinfer-python": "0.6.13",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "vllm": "0.25.1",
}
H200 = Platform(
    "cuda",
    (9, 0),
    packages=tuple(sorted(PACKAGES.items())),
    cudnn_version=(9, 13, 0),
    cuda_version="13.0",
    shared_memory_per_block=232448,
    multi_processor_count=132,
    tools=frozenset({"nvcc", "ninja"}),
    device_name="NVIDIA H200",
)
SUITES = (on_gpu.TestSdpa, on_gpu.TestTriton, on_gpu.TestFlashInfer, on_gpu.TestFlashAttention3, on_gpu.TestFlashMLA)


def on_device(case: DecodeCase) -> DecodeRequest:
    return case.request("cpu").replace(device_type="cuda", device_index=0)


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.backend)
def test_every_case_is_answered_as_expected(suite: type[DecodeConformance], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "platform", lambda self: H200)
    monkeypatch.setattr(suite, "_checked_answer", suite._answer)  # without what needs a device
    monkeypatch.setattr(suite, "_accepts", lambda self, case: self.takes(on_device(case)))
    monkeypatch.setattr(suite, "_once", lambda self, make, otherwise: make())
    monkeypatch.setattr(on_gpu.torch.cuda, "get_device_capability", lambda: (9, 0))
    given = suite()
    faults = []
    for case in given.cases():
        try:
            given.decide(on_device(case), str(case), case.tags | {case.name})
        except ConformanceError as fault:  # all of them at once
            faults.append(f"{case}: {fault}"[:200])
    assert not faults, "\n".join(faults)
