"""Outside TransformerEngine: the measured table decides, the two passes apart."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import prefill_table
from benchmarks.measured_calls import attention_request
from mla_plugin import AttentionRequest, NoBackendError, Platform, resolve
from mla_plugin.kernels.hopper.rule import TILES
from mla_plugin.resolver import attention_speed as speed
from mla_plugin.resolver import choice, survey
from tests.requests import A100, CPU, H100, mla_request

ROOT = Path(__file__).parent.parent.parent

RESULTS = [
    json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    for names in prefill_table.RESULTS[(9, 0)].values()
    for name in names
]
LIBRARIES = {"fa3": ("vllm", "0.25.1"), "fa4": ("flash-attn-4", "4.0.0b36")}
INSTALLED = [subset for n in range(3) for subset in itertools.combinations(LIBRARIES, n)]


def with_libraries(installed: tuple[str, ...], platform: Platform = H100) -> Platform:
    packages = (*platform.packages, *(LIBRARIES[name] for name in installed), ("nvidia-cutlass-dsl", "4.7.1"))
    return replace(platform, packages=packages, cudnn_version=(9, 19, 0), cuda_version="13.0")


def speeds(row: dict[str, Any], installed: tuple[str, ...], gpu: str) -> dict[str, float]:
    """Of the choice, as shares of the best that is installed."""
    missing = set(LIBRARIES) - set(installed)
    forward, backward = ({name: row[kind][name] for name in row[kind] if name not in missing} for kind in PASSES)
    platform = replace(with_libraries(installed), device_name=gpu)
    training = resolve(attention_request(row, True), platform=platform, environ={})
    inference = resolve(attention_request(row, False), platform=platform, environ={})
    first, second = training.forward_backend, training.backward_backend
    single = min(forward[name] + backward[name] for name in forward if name in backward)
    return {
        "inference": min(forward.values()) / forward[inference.forward_backend],
        "forward": min(forward.values()) / forward[first],
        "backward": min(backward.values()) / backward[second],
        "both": single / (forward[first] + backward[second]),
    }


PASSES = ("forward", "backward")


@pytest.mark.parametrize("installed", INSTALLED, ids="+".join)
@pytest.mark.parametrize("record", RESULTS, ids=lambda record: f"{record['benchmark']} {record['gpu']}")
def test_the_choice_is_never_far_from_the_best_that_is_installed(
    record: dict[str, Any], installed: tuple[str, ...]
) -> None:
    found = [speeds(row, installed, record["gpu"]) for row in record["rows"]]
    for row, shares in zip(record["rows"], found, strict=True):
        assert min(shares["inference"], shares["forward"], shares["backward"]) >= 0.95, (row, shares)
    assert sum(math.log(shares["both"]) for shares in found) >= 0


@pytest.mark.parametrize("direction", PASSES)
def test_calls_that_the_table_lacks_are_chosen_well_from_those_around(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call is left out of the table, on every GPU, and chosen from the others.

    Several backends are within 10 % of one another, and their order changes with the length.
    """
    table = speed._table((9, 0))
    found = []
    for row in table:
        others = tuple(other for other in table if other.place != row.place)
        monkeypatch.setattr(speed, "_table", lambda _, others=others: others)
        estimates = speed._estimates(replace(H100, device_name=f"NVIDIA {row.gpu}"), row.place, direction)
        behind = row.behind[direction]
        found.append(math.exp(-behind[min(behind, key=lambda name: estimates.get(name, math.inf))]))
    assert sum(found) / len(found) >= 0.98
    assert sum(share >= 0.95 for share in found) >= 0.87 * len(found)
    assert min(found) >= 0.7


def test_a_gpu_is_known_by_a_word_of_its_name() -> None:
    place = speed._Call.of(mla_request()).place
    by_gpu = {
        name: speed._estimates(replace(H100, device_name=name), place, "forward")
        for name in (None, "NVIDIA GH200 480GB", "NVIDIA H200")
    }
    assert by_gpu[None] == by_gpu["NVIDIA GH200 480GB"] != by_gpu["NVIDIA H200"]


def test_what_transformer_engine_would_raise_for_is_no_matter_elsewhere() -> None:
    """A window without its left side: TransformerEngine asserts; so it does with a batch of none."""
    request = mla_request(attn_mask_type="no_mask", window_size=(-1, 5))
    decision = survey(request, platform=with_libraries(("fa4",)), environ={})
    assert decision.cascade is None
    assert decision.plan is not None
    with pytest.raises(AssertionError):
        survey(request.replace(host="transformer_engine"), platform=H100, environ={})
    assert resolve(mla_request(batch_size=0), platform=H100, environ={}).forward_backend


def test_the_table_is_what_the_kept_results_say() -> None:
    assert prefill_table.MODULE.read_text() == prefill_table.text()


BUILTIN = ("triton", "flashinfer", "fa3", "fa4", "fa2", "cudnn", "sdpa")


def tried(request: AttentionRequest, environ: dict[str, str], platform: Platform = H100, **others: int) -> list[str]:
    return choice.order(request, platform, environ, others, BUILTIN, "forward")


@pytest.mark.parametrize(
    ("environ", "left_out"),
    [
        ({}, set()),
        ({"NVTE_FLASH_ATTN": "0"}, {"fa2", "fa3", "fa4"}),
        ({"NVTE_FLASH_ATTN_V2": "0"}, {"fa2"}),
        ({"NVTE_FLASH_ATTN_V3": "0"}, {"fa3"}),
        ({"NVTE_FLASH_ATTN_V4": "0"}, {"fa4"}),
        ({"NVTE_FUSED_ATTN": "0"}, {"cudnn"}),
        ({"NVTE_UNFUSED_ATTN": "0"}, {"sdpa"}),
        ({"NVTE_MLA_TRITON": "0"}, {"triton"}),
        ({"NVTE_MLA_TRITON": "true"}, set()),
    ],
)
@pytest.mark.parametrize("platform", [A100, H100])
def test_a_users_switches_decide_who_may_run(environ: dict[str, str], left_out: set[str], platform: Platform) -> None:
    assert set(BUILTIN) - set(tried(mla_request(), environ, platform)) == left_out


def test_the_opt_in_puts_triton_first_where_its_conditions_hold() -> None:
    assert tried(mla_request(), {"NVTE_MLA_TRITON": "1"})[0] == "triton"
    assert tried(mla_request(window_size=(512, 0)), {"NVTE_MLA_TRITON": "1"})[0] == "fa4"


def test_other_packages_stand_where_their_priority_says_and_the_fallback_behind_all_that_are_fused() -> None:
    names = tried(mla_request(), {}, A100, before=1, between=0, after=-1)
    assert names[0] == "before"
    assert names[-3:] == ["between", "sdpa", "after"]


def test_the_interpreter_is_for_tests() -> None:
    request = mla_request(device_type="cpu", dtype=torch.float16)
    interpreter = replace(CPU, packages=H100.packages, tools=frozenset({"triton-interpreter"}))
    assert tried(request, {}, CPU) == [name for name in BUILTIN if name != "triton"]
    (entry,) = (e for e in survey(request, platform=interpreter, environ={}).trace if e.backend == "triton")
    assert (entry.accepted, entry.layer) == (False, "host")
    assert entry.reasons == (
        "Triton's interpreter is slow; it runs only when requested by name or by NVTE_MLA_TRITON=1",
    )
    for given in ({"backend": "triton", "environ": {}}, {"environ": {"NVTE_MLA_TRITON": "1"}}):
        assert resolve(request, platform=interpreter, **given).forward_backend == "triton"


def test_the_opt_in_adds_triton_once_and_not_where_it_is_blocked() -> None:
    assert sorted(tried(mla_request(), {"NVTE_MLA_TRITON": "1"})) == sorted(BUILTIN)
    names = choice.order(mla_request(), H100, {"NVTE_MLA_TRITON": "1"}, {}, BUILTIN[1:], "forward")
    assert sorted(names) == sorted(BUILTIN[1:])
    with_both = {"NVTE_MLA_TRITON": "1", "MLA_PLUGIN_BLOCK": "triton"}
    assert "triton" not in runs(mla_request(is_training=True), **with_both)


def test_a_variable_that_is_off_is_the_environments() -> None:
    decision = survey(mla_request(), platform=H100, environ={"NVTE_FUSED_ATTN": "0", "NVTE_MLA_TRITON": "0"})
    off = {entry.backend: entry for entry in decision.trace if entry.layer == "environment"}
    assert set(off) == {"triton"}  # cudnn refuses this platform's version anyway
    assert not off["triton"].accepted
    assert off["triton"].reasons == ("NVTE_MLA_TRITON=0",)


def runs(request: AttentionRequest, installed: tuple[str, ...] = ("fa3", "fa4"), **environ: str) -> tuple[str, str]:
    plan = resolve(request, platform=with_libraries(installed), environ=environ)
    return plan.forward_backend, plan.backward_backend


def test_forward_and_backward_run_on_different_backends() -> None:
    """vLLM's FlashAttention 3 has no backward, and FlashAttention 4 none for grouped heads of unequal dims."""
    training = mla_request(is_training=True, num_heads=64, num_kv_heads=4)
    assert runs(mla_request(is_training=True)) == ("fa4", "triton")
    assert runs(training, NVTE_MLA_TRITON="0") == ("fa4", "cudnn")
    assert runs(training, ("fa3",), NVTE_MLA_TRITON="0") == ("fa3", "cudnn")
    packed = training.replace(qkv_format="thd", lengths_may_differ=False)
    assert runs(packed, ("fa3",), NVTE_MLA_TRITON="0")[0] == "fa3"
    entries = {entry.backend: entry for entry in survey(training, platform=with_libraries(("fa3",)), environ={}).trace}
    assert entries["fa3"].accepted
    assert "forward only: is_training=True: vllm has no backward" in "; ".join(entries["fa3"].reasons)


def test_keys_that_all_queries_see_count_as_work_without_a_mask() -> None:
    """cuDNN's backward of 8k queries to 24k keys before them took 16.8 ms on an H200, twice as long as the best."""
    causal = {"attn_mask_type": "causal_bottom_right", "is_training": True, "host": "direct"}
    sizes = {"num_heads": 16, "num_kv_heads": 16, "batch_size": 1, "max_seqlen_q": 8192}
    square, prefix = (mla_request(**causal, **sizes, max_seqlen_kv=keys) for keys in (8192, 32768))
    platform = replace(with_libraries(()), device_name="NVIDIA H200")
    behind = [speed.relative_times(request, platform, "backward")["cudnn"] for request in (square, prefix)]
    assert behind[0] < 1.2 < 1.3 < behind[1]


def test_a_gradient_of_lse_is_computed_by_the_fastest_backend_that_takes_one() -> None:
    assert runs(mla_request(is_training=True, return_lse=True)) == ("fa4", "triton")
    assert runs(mla_request(is_training=True, return_lse=True), NVTE_MLA_TRITON="0") == ("fa4", "fa2")


def test_one_generator_drops_the_same_weights_in_both_passes() -> None:
    assert runs(mla_request(is_training=True, dropout_p=0.1)) == ("sdpa", "sdpa")


def test_a_backend_by_name_keeps_its_own_backward() -> None:
    training = mla_request(is_training=True)
    plan = resolve(training, backend="cudnn", platform=with_libraries(("fa4",)), environ={})
    assert (plan.forward_backend, plan.backward_backend) == ("cudnn", "cudnn")
    with pytest.raises(NoBackendError, match=r"fa3 +refuses +is_training=True: vllm has no backward"):
        resolve(training, backend="fa3", platform=with_libraries(("fa3",)), environ={})
    plan = resolve(training.replace(return_lse=True), backend="cudnn", platform=with_libraries(()), environ={})
    assert (plan.forward_backend, plan.backward_backend) == ("cudnn", "sdpa")


def test_without_a_backward_both_passes_are_named_alike() -> None:
    for request in (mla_request(num_heads=64, num_kv_heads=4), mla_request(return_lse=True)):
        forward, backward = runs(request)
        assert forward == backward


def test_a_variable_asks_for_batch_invariance() -> None:
    decision = survey(mla_request(), platform=H100, environ={"MLA_PLUGIN_BATCH_INVARIANT": "1"})
    assert decision.request == mla_request(batch_invariant=True)
    assert survey(mla_request(), platform=H100, environ={"MLA_PLUGIN_BATCH_INVARIANT": "0"}).request == mla_request()
    assert decision.plan is not None
    assert decision.plan.trace == decision.trace


def test_without_a_backend_for_the_backward_nothing_trains() -> None:
    off = {"NVTE_MLA_TRITON": "0", "NVTE_FUSED_ATTN": "0", "NVTE_UNFUSED_ATTN": "0", "NVTE_FLASH_ATTN_V2": "0"}
    assert runs(mla_request(), ("fa3",), **off)[0] == "fa3"
    with pytest.raises(NoBackendError, match="no backend can run the backward") as caught:
        runs(mla_request(is_training=True), ("fa3",), **off)
    assert not any(entry.accepted for entry in caught.value.trace)


@pytest.mark.parametrize("strict", [True, False])
def test_transformer_engine_keeps_its_order(strict: bool) -> None:
    request = mla_request(host="direct" if strict else "transformer_engine")
    assert runs(request, **({"MLA_PLUGIN_STRICT_TE": "1"} if strict else {}))[0] == "cudnn"
    assert runs(mla_request())[0] == "fa4"


def test_the_name_of_the_gpu_prefers_what_it_measured() -> None:
    rows = {gpu: [row for row in speed._table((9, 0)) if row.gpu == gpu] for gpu in ("H100", "H200")}
    same = [(a, b) for a in rows["H100"] for b in rows["H200"] if a.place == b.place]
    behind = [(a.behind["backward"], b.behind["backward"]) for a, b in same]
    differing = [i for i, (a, b) in enumerate(behind) if b[min(a, key=a.__getitem__)] > 0.02]
    assert differing
    for row in (row for i in differing for row in same[i]):
        platform = replace(H100, device_name=f"NVIDIA {row.gpu} 80GB")
        estimates = speed._estimates(platform, row.place, "backward")
        assert row.behind["backward"][min(estimates, key=estimates.__getitem__)] < 0.001


def test_every_hopper_kernel_has_a_factor_for_the_plain_one() -> None:
    assert speed._PLAIN_KERNELS.keys() == TILES.keys()


def with_triton(version: str, platform: Platform) -> Platform:
    packages = tuple((name, version if name == "triton" else other) for name, other in platform.packages)
    return replace(platform, packages=packages)


@pytest.mark.parametrize("direction", PASSES)
def test_without_hopper_kernels_ours_count_as_slow_as_the_plain_ones(direction: str) -> None:
    """The table has the times of the Hopper kernels, which a newer Triton does not compile."""
    request, platform = mla_request(max_seqlen_q=8192, max_seqlen_kv=8192), with_libraries(tuple(LIBRARIES))
    times, newer = (
        speed.relative_times(request, with_triton(version, platform), direction) for version in ("3.7.1", "3.9.0")
    )
    slower = newer["triton"] / newer["cudnn"] / (times["triton"] / times["cudnn"])
    assert slower == pytest.approx(speed._PLAIN_KERNELS[192, 128][direction], rel=5e-2)
    assert newer["triton"] > 1.2
    other = request.replace(head_dim_qk=96, head_dim_v=96)  # has no Hopper kernel
    assert speed.relative_times(other, platform, direction)["triton"] == pytest.approx(
        speed.relative_times(other, with_triton("3.9.0", platform), direction)["triton"], rel=2e-2
    )


def test_where_nothing_was_measured_the_generation_decides() -> None:
    blackwell = replace(H100, compute_capability=(10, 0))
    assert tried(mla_request(), {}, blackwell)[:3] == ["cudnn", "fa4", "triton"]
    assert tried(mla_request(), {}, A100)[:2] == ["triton", "fa2"]
    assert tried(mla_request(head_dim_v=192), {}, A100)[:3] == ["fa2", "cudnn", "triton"]


def test_under_transformer_engines_rules_its_own_reason_comes_first() -> None:
    environ = dict.fromkeys(("NVTE_MLA_TRITON", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"), "0")
    decision = survey(mla_request(host="transformer_engine"), platform=with_libraries(()), environ=environ)
    entries = {entry.backend: (entry.layer, *entry.reasons) for entry in decision.trace}
    assert entries["triton"] == ("environment", "NVTE_MLA_TRITON=0")
    assert entries["sdpa"] == ("environment", "NVTE_UNFUSED_ATTN=0")
    assert entries["cudnn"] == ("cascade", "TransformerEngine rule 1: NVTE_FUSED_ATTN=0")
    decision = survey(mla_request(host="transformer_engine"), platform=with_libraries(()), environ={})
    (entry,) = (entry for entry in decision.trace if entry.backend == "triton")
    assert entry.layer == "host"
    assert entry.reasons[0].startswith("TransformerEngine's own choice applies unless NVTE_MLA_TRITON=1")


LOCAL = {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}
"""What Megatron-Core sets for ``attention_backend=local``: no TransformerEngine, its own attention instead."""


@pytest.mark.parametrize(
    ("host", "environ", "names"),
    [
        ("megatron", LOCAL, ["triton", "sdpa"]),
        ("megatron", {**LOCAL, "NVTE_MLA_TRITON": "0"}, ["sdpa"]),
        ("megatron", {**LOCAL, "MLA_PLUGIN_STRICT_TE": "1"}, []),
        ("megatron", {**LOCAL, "NVTE_FUSED_ATTN": "1"}, ["triton"]),
        ("megatron", {**LOCAL, "NVTE_FLASH_ATTN": "1"}, ["triton", "fa2"]),
        ("direct", LOCAL, ["triton"]),
        ("transformer_engine", LOCAL, []),
    ],
)
def test_megatrons_local_attention_is_the_fallback_too(host: str, environ: dict[str, str], names: list[str]) -> None:
    decision = survey(mla_request(host=host), platform=with_libraries((), A100), environ=environ)
    assert [entry.backend for entry in decision.trace if entry.accepted] == names
