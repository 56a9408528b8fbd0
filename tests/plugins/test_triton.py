"""The Triton kernels: conformance in the interpreter on the CPU and on a device, refusals on hypothetical platforms."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pytest
import torch

import mla_plugin
from mla_plugin import Platform
from mla_plugin.conformance import BackendConformance, Case
from mla_plugin.kernels import tiles
from mla_plugin.kernels.prefill import launch_backward as prefill_backward
from mla_plugin.kernels.prefill import launch_forward as prefill
from mla_plugin.kernels.prefill import packing
from mla_plugin.plugins import triton
from tests.plugins.test_sdpa import NanPadding
from tests.requests import A100, CPU, H100, mla_request

REFUSES: Mapping[str, str] = {
    "fp64": "dtype=torch.float64",
    "arbitrary": "attn_mask_type='arbitrary'",
    "bias": "bias_type=",
    "head_dims=13/7": "head_dim_qk=13",
    "head_dims=1/1": "head_dim_qk=1,",
}


def programs(case: Case) -> int:
    """Tiles of scores: what the interpreter's time depends on."""
    pairs = zip(case.seqlens_q, case.seqlens_kv, strict=True)
    return sum(case.num_heads * -(-len_q // 64) * -(-len_kv // 64) for len_q, len_kv in pairs)


def covering(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """Few cheap float32 and float16 cases, found greedily, that have every tag: the interpreter is slow."""
    candidates = [case for case in cases if case.dtype in (torch.float32, torch.float16) and programs(case) <= 24]
    missing = {tag for case in candidates for tag in case.tags}
    chosen = []
    while missing:
        best = max(candidates, key=lambda case: len(case.tags & missing) / (6 + programs(case)))
        chosen.append(best)
        missing -= best.tags
    return tuple(chosen)


class TestInterpreter(BackendConformance):
    backend = "triton"
    is_slow = True
    refuses: Mapping[str, str] = {key: REFUSES[key] for key in ("arbitrary", "bias", "head_dims=1/1", "head_dims=13/7")}

    def cases(self) -> tuple[Case, ...]:
        return covering(super().cases())


class TestInterpreterWithNanPadding(NanPadding, TestInterpreter):
    refuses: Mapping[str, str] = MappingProxyType({})


@pytest.mark.gpu
class TestCuda(BackendConformance):
    backend = "triton"
    device = "cuda"
    refuses = REFUSES


@pytest.mark.gpu
class TestCudaWithNanPadding(NanPadding, TestCuda):
    refuses: Mapping[str, str] = {"fp64": "dtype=torch.float64"}


TITAN = Platform("cuda", (7, 5), packages=(("triton", "3.7.1"),))
SMALL = Platform("cuda", (8, 7), packages=(("triton", "3.7.1"),), shared_memory_per_block=65536)
CONSUMER = Platform("cuda", (8, 6), packages=(("triton", "3.7.1"),), shared_memory_per_block=101376)
INTERPRETER = Platform(packages=(("triton", "3.7.1"),), tools=frozenset({"triton-interpreter"}))


@pytest.mark.parametrize(
    ("changes", "platform", "reasons"),
    [
        ({}, A100, []),
        ({}, H100, []),
        ({"dtype": torch.float16}, INTERPRETER, []),
        ({}, INTERPRETER, ["dtype=torch.bfloat16"]),
        ({}, CPU, ["triton is not installed", "device_type='cpu'"]),
        ({}, TITAN, ["compute_capability=(7, 5) < (8, 0)"]),
        ({}, SMALL, ["shared_memory_per_block=65536 < 101376"]),
        ({"head_dim_qk": 100, "head_dim_v": 584}, A100, ["head_dim_qk=100", "head_dim_v=584"]),
        ({"head_dim_qk": 584}, A100, ["head_dim_qk=584"]),
        ({"head_dim_qk": 520}, A100, ["head_dim_qk=520, accepted above 512 is 528, 544 or 576"]),
        ({"head_dim_qk": 576, "head_dim_v": 512, "dtype": torch.float32}, A100, []),
        ({"head_dim_qk": 576, "head_dim_v": 512}, CONSUMER, []),
        ({"head_dim_qk": 512, "head_dim_v": 256, "dtype": torch.float32}, CONSUMER, []),
        (
            {"head_dim_qk": 264, "head_dim_v": 264, "dtype": torch.float32},
            CONSUMER,
            ["head_dim_qk=264, head_dim_v=264"],
        ),
        ({"dtype": torch.float64}, A100, ["dtype=torch.float64"]),
        ({"attn_mask_type": "arbitrary"}, A100, ["attn_mask_type='arbitrary'"]),
        ({"bias_type": "alibi"}, A100, ["bias_type='alibi'"]),
        ({"dropout_p": 0.1}, A100, ["dropout_p=0.1"]),
        ({"softmax_type": "learnable"}, A100, ["softmax_type='learnable'"]),
        ({"has_score_mod": True}, A100, ["score_mod=True"]),
        ({"fp8": True}, A100, ["fp8=True"]),
        ({"return_max_logit": True}, A100, ["return_max_logit=True"]),
        ({"num_splits": 2}, A100, ["num_splits=2"]),
        ({"has_kv_cache": True}, A100, ["has_kv_cache=True"]),
        ({"context_parallel": True, "cp_size": 2}, A100, ["cp_size=2"]),
    ],
)
def test_refusals(changes: dict[str, object], platform: Platform, reasons: list[str]) -> None:
    found = list(triton.refusals(mla_request(**changes), platform))
    assert len(found) == len(reasons)
    for reason, expected in zip(found, reasons, strict=True):
        assert expected in reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("platform", "gpu_class"), [(A100, "163 KiB"), (CONSUMER, "99 KiB")], ids=["A100", "consumer"])
def test_there_is_a_tile_for_everything_accepted(dtype: torch.dtype, platform: Platform, gpu_class: str) -> None:
    accepted = 0
    for head_dim_qk in range(8, 577, 8):
        for head_dim_v in range(8, 513, 8):
            request = mla_request(head_dim_qk=head_dim_qk, head_dim_v=head_dim_v, dtype=dtype)
            if not list(triton.refusals(request, platform)):
                columns = sum(packing.columns_of(head_dim_qk, head_dim_v))
                assert all(tiles.tile_for(table, gpu_class, dtype.itemsize, columns) for table in tiles.TABLES.values())
                accepted += 1
    assert accepted > 3000


@pytest.mark.parametrize(("text", "tuned"), [(None, False), ("1", False), ("0", True)])
def test_the_environment_asks_for_autotuning(text: str | None, tuned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for module, name in ((prefill, "forward"), (prefill_backward, "backward")):
        original = getattr(module, name)

        def spy(*arguments: object, original: object = original, **options: object) -> object:
            seen.append(options["tuned"])
            return original(*arguments)  # type: ignore[operator]

        monkeypatch.setattr(module, name, spy)
    if text is not None:
        monkeypatch.setenv("NVTE_DISABLE_TRITON_AUTOTUNING", text)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q = torch.randn(1, 5, 2, 24, device=device, requires_grad=True)
    mla_plugin.attention(q, q, q[..., :16], backend="triton").sum().backward()
    assert seen == [tuned, tuned]
