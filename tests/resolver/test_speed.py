"""Which backends would be faster than the chosen ones, and why they do not run: every statement holds for the plan."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

import pytest
import torch

from mla_plugin import Accepted, DecodeRequest, Platform, hookimpl
from mla_plugin.hooks.manager import get_manager
from mla_plugin.resolver import attention_speed, decode_preference, speed, survey, survey_decode
from mla_plugin.resolver.speed import faster, passes
from mla_plugin.resolver.why import why
from tests.requests import A100, CPU, mla_request

H100 = Platform(
    "cuda",
    (9, 0),
    packages=(("flash-attn-4", "4.0.0b36"), ("torch", "2.13.0"), ("triton", "3.7.1"), ("vllm", "0.25.1")),
    cudnn_version=(9, 20, 0),
    cuda_version="13.0",
)
TRAINING = mla_request(is_training=True)
GROUPED = mla_request(is_training=True, num_heads=64, num_kv_heads=4, max_seqlen_q=1024, max_seqlen_kv=1024)
"""FlashAttention 4 has no backward for it."""
WITH_LSE = mla_request(head_dim_qk=128, return_lse=True, is_training=True)
"""Faster backwards than Triton's take no gradient of lse."""
DECODE = DecodeRequest(torch.bfloat16, "cuda", 8, 1, 128, 512, 64, max_seqlen_kv=4096, page_size=64)


def without(platform: Platform, *names: str) -> Platform:
    return dataclasses.replace(platform, packages=tuple(x for x in platform.packages if x[0] not in names))


def lines(request, platform: Platform = H100, environ=None, **rest) -> list[str]:
    decide = survey_decode if isinstance(request, DecodeRequest) else survey
    return list(faster(decide(request, platform=platform, environ=environ or {}, **rest), environ or {}))


class Other:
    """A backend of another package that takes every attention call."""

    def __init__(self, answer: Accepted) -> None:
        self.answer = answer

    @hookimpl
    def select_backend(self) -> Accepted:
        return self.answer


@pytest.fixture
def add() -> Iterator[object]:
    def register(answer: Accepted) -> None:
        get_manager().register(Other(answer), "other")

    yield register
    get_manager().unregister("other")


def test_passes_are_those_that_the_request_has() -> None:
    assert list(passes(survey(TRAINING, platform=H100, environ={}))) == ["forward", "backward"]
    assert list(passes(survey(mla_request(), platform=H100, environ={}))) == ["forward"]
    assert list(passes(survey_decode(DECODE, platform=H100, environ={}))) == ["decode"]
    off = {"NVTE_UNFUSED_ATTN": "0"}
    assert passes(survey(mla_request(device_type="cpu"), platform=CPU, environ=off)) == {}
    assert passes(survey_decode(DECODE.replace(device_type="cpu"), platform=CPU, environ=off)) == {}


def test_nothing_is_faster_than_the_fastest_and_nothing_is_compared_off_cuda() -> None:
    assert lines(TRAINING) == []
    assert lines(DECODE, environ={"MLA_PLUGIN_BLOCK": "flashmla,flashinfer"}) == []
    assert lines(TRAINING.replace(device_type="cpu"), CPU) == []
    assert lines(DECODE.replace(device_type="cpu"), CPU) == []


def test_a_faster_backend_has_its_reasons_and_its_ratio() -> None:
    (line,) = lines(mla_request(), without(H100, "flash-attn-4", "vllm"))[:1]
    ratio = re.fullmatch(r"forward on fa4 would be (\d\.\d\d) times as fast: flash-attn-4 is not installed", line)
    assert ratio is not None
    times = attention_speed.relative_times(mla_request(), H100, "forward")
    chosen = survey(mla_request(), platform=without(H100, "flash-attn-4", "vllm"), environ={}).plan.forward_backend
    assert float(ratio[1]) == pytest.approx(times[chosen] / times["fa4"], abs=6e-3)


def test_decode_is_compared_by_its_own_table() -> None:
    few, environ = DECODE.replace(num_heads=16), {"MLA_PLUGIN_BLOCK": "triton"}
    ratio = decode_preference.measured_times(few, H100)["fa3"]
    assert ratio > 1.02
    assert passes(survey_decode(few, platform=H100, environ=environ)) == {"decode": "fa3"}
    assert lines(few, environ=environ) == [
        f"decode on triton would be {ratio:.2f} times as fast: excluded by MLA_PLUGIN_BLOCK"
    ]
    off = environ | {"NVTE_FLASH_ATTN": "0"}
    assert lines(few, environ=off)[1].endswith(": NVTE_FLASH_ATTN=0")


@pytest.mark.parametrize(("ratio", "is_said"), [(1.009, False), (1.011, True)])
def test_what_two_runs_of_one_kernel_differ_by_is_not_faster(ratio, is_said, monkeypatch) -> None:
    behind = {"fa4": 0.0, "triton": math.log(ratio), "fa2": 2.0, "cudnn": 2.0, "fa3": 2.0}
    monkeypatch.setattr(attention_speed, "_estimates_of", lambda *_: behind)
    found = lines(mla_request(), without(H100, "flash-attn-4"))
    assert [line.split(":")[0] for line in found] == ["forward on fa4 would be 1.01 times as fast"] * is_said


def test_every_fused_backend_is_faster_than_the_fallback() -> None:
    """Measured or not: its own time is in no table."""
    found = lines(mla_request(dtype=torch.float64))
    assert [line.split(":")[0].removeprefix("forward on ") for line in found] == [
        f"{name} would be faster" for name in attention_speed.fastest_first(mla_request(), H100, NAMES, "forward")
    ]
    assert all("dtype=torch.float64" in line or "dtype=float64" in line for line in found)


NAMES = ("triton", "fa3", "fa4", "fa2", "cudnn")


def test_where_nothing_was_measured_the_order_is_of_the_generation() -> None:
    found = lines(mla_request(), A100, {"NVTE_MLA_TRITON": "0", "MLA_PLUGIN_BLOCK": "fa2"})
    assert found[0] == "forward on triton would be faster: NVTE_MLA_TRITON=0"
    assert found[1] == "forward on fa2 would be faster: excluded by MLA_PLUGIN_BLOCK"
    assert not any(name in line for line in found for name in ("fa3", "fa4"))


def test_a_third_party_backend_is_compared_with_nothing(add) -> None:
    add(Accepted(priority=1))
    assert lines(mla_request()) == []
    assert passes(survey(TRAINING, platform=H100, environ={})) == {"forward": "other", "backward": "other"}


def test_a_third_party_backend_is_placed_by_its_priority(add) -> None:
    add(Accepted(priority=1))
    answer = why("triton", TRAINING, platform=H100, environ={"NVTE_MLA_TRITON": "1"})
    placed = "a third-party backend is placed by its priority"
    assert answer.reasons == (placed, "this request's backward runs on the forward's backend")
    assert why("other", mla_request(), platform=H100, environ={}).state == "runs"


def test_a_third_party_backend_that_leaves_its_backward_to_the_fallback(add) -> None:
    add(Accepted(priority=1, backward_by="sdpa"))
    found = lines(TRAINING)
    assert "backward on triton would be faster: other leaves this request's backward to sdpa" in found
    assert not any(line.startswith("forward") for line in found)


def test_a_backend_that_only_runs_the_forward_says_so() -> None:
    decision = survey(WITH_LSE, platform=H100, environ={})
    assert decision.plan.backward_backend == "triton"
    (line,) = (line for line in faster(decision, {}) if line.startswith("backward on fa4"))
    assert line.endswith(" times as fast: forward only: the kernel takes no gradient of lse")
    platform = without(H100, "flash-attn-4")
    (line,) = (line for line in lines(GROUPED, platform, {"MLA_PLUGIN_BLOCK": "cudnn"}) if "backward on cudnn" in line)
    assert line.endswith(": excluded by MLA_PLUGIN_BLOCK")


def test_inside_transformer_engine_one_backend_runs_both_passes_unless_it_leaves_one_to_another() -> None:
    packages = tuple(sorted({**dict(H100.packages), "flash-attn": "2.8.3"}.items()))
    platform = dataclasses.replace(H100, packages=packages)
    inside = {"host": "transformer_engine", "head_dim_qk": 128}
    decision = survey(mla_request(is_training=True, **inside), platform=platform, environ={})
    assert passes(decision) == {"forward": "cudnn", "backward": "cudnn"}
    accepted = {entry.backend for entry in decision.trace if entry.accepted}
    found = {line.split()[2]: line.partition(": ")[2] for line in faster(decision, {}) if line.startswith("backward")}
    assert found["fa4"] == "this request's backward runs on the forward's backend"
    assert "fa4" in accepted
    found = [line for line in faster(decision, {}) if line.startswith("forward on fa4")]
    assert found[0].endswith(": that is TransformerEngine's order")
    decision = survey(mla_request(is_training=True, return_lse=True, **inside), platform=platform, environ={})
    assert passes(decision) == {"forward": "cudnn", "backward": "sdpa"}
    found = {line.split()[2]: line.partition(": ")[2] for line in faster(decision, {}) if line.startswith("backward")}
    assert found["fa2"] == "cudnn leaves this request's backward to sdpa"
    assert found["fa4"] == found["cudnn"] == "forward only: the kernel takes no gradient of lse"


def test_the_opt_in_is_named_for_both_passes_and_only_where_it_decides() -> None:
    environ = {"NVTE_MLA_TRITON": "1"}
    request = mla_request(head_dim_qk=128, head_dim_v=64, is_training=True)
    assert passes(survey(request, platform=H100, environ=environ)) == {"forward": "triton", "backward": "triton"}
    found = lines(request, environ=environ)
    directions = {line.split()[0] for line in found if line.endswith(": NVTE_MLA_TRITON=1 puts triton first")}
    assert directions == {"forward", "backward"}
    window = mla_request(window_size=(512, 0))
    decision = survey(window, platform=H100, environ=environ)
    assert speed.why_before(decision, "triton", "fa2", "forward", environ).startswith("measured: fa2 takes ")
    blocked = environ | {"MLA_PLUGIN_BLOCK": "triton"}
    assert why("fa2", request, platform=H100, environ=blocked).reasons[0].startswith("measured: fa2 takes ")
    for decode_environ in (environ, {"MLA_PLUGIN_STRICT_TE": "1"}):
        few = DECODE.replace(num_heads=16, host="transformer_engine")
        assert why("fa3", few, platform=H100, environ=decode_environ).reasons[0].startswith("measured: fa3 takes ")


def test_what_was_not_measured_is_said(monkeypatch) -> None:
    decision = survey(TRAINING, platform=H100, environ={})
    found = speed.why_before(decision, "triton", "fa3", "backward", {})
    assert found == "fa3 was not measured for this backward"
    assert speed.why_before(decision, "triton", "sdpa", "backward", {}) == (
        "sdpa is the fallback, tried after the fused backends"
    )
