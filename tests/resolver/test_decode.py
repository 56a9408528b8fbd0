"""Which backend decodes, and why the others do not."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

import pytest
import torch

import mla_plugin
from benchmarks import decode_table
from mla_plugin.arguments.decode import Profile
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.manager import BUILTIN_BACKENDS, get_manager
from mla_plugin.hooks.types import Accepted, NoBackendError, Platform, Refused
from mla_plugin.resolver import decode_measured, decode_preference, resolve, survey_decode
from mla_plugin.resolver.decode import describe_request
from tests.repository.project import ROOT

PACKAGES = (("flashinfer-python", "0.6.13"), ("triton", "3.6.0"), ("vllm", "0.25.1"))


def request(**changes: object) -> DecodeRequest:
    return DecodeRequest(
        dtype=torch.bfloat16,
        device_type="cuda",
        batch_size=32,
        seqlen_q=1,
        num_heads=16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        max_seqlen_kv=4096,
        page_size=64,
        has_seqlens_kv=True,
        has_host_lengths=True,
    ).replace(**changes)


def gpu(capability: tuple[int, int] = (9, 0), **changes: object) -> Platform:
    facts: dict[str, object] = {
        "compute_capability": capability,
        "packages": PACKAGES,
        "shared_memory_per_block": 232448,
        "tools": frozenset({"nvcc", "ninja"}),
    }
    return Platform("cuda", **(facts | changes))  # type: ignore[arg-type]


def chosen(call: DecodeRequest, platform: Platform, environ: dict[str, str] | None = None) -> str:
    return resolve(call, platform=platform, environ=environ or {}).forward_backend


def with_table(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(decode_preference, "MEASURED", {(9, 0): (("H200",), "\n".join(("", *lines, "")))})
    decode_preference._table.cache_clear()
    monkeypatch.setattr(decode_preference, "_table", decode_preference._table.__wrapped__)


@pytest.fixture
def _fixed_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another measurement changes nothing here."""
    with_table(monkeypatch, "32 16 1 4096 4096 64 | 1 4 2 3", "32 128 1 4096 4096 64 | 4 1 2 3")


@pytest.mark.usefixtures("_fixed_table")
def test_the_next_in_the_order_where_the_first_cannot() -> None:
    call = request()
    assert chosen(call.replace(has_host_lengths=False), gpu()) == "triton"
    assert chosen(call.replace(num_heads=128, has_host_lengths=False), gpu()) == "flashmla"
    assert chosen(call.replace(num_heads=128, has_joined_rows=False), gpu()) == "flashinfer"
    assert chosen(call.replace(num_heads=128, has_joined_rows=False, has_host_lengths=False), gpu()) == "fa3"
    assert chosen(call.replace(num_heads=128), gpu(packages=(("triton", "3.6.0"),))) == "triton"
    assert chosen(call, gpu(packages=())) == "sdpa"
    assert chosen(call.replace(dtype=torch.float64), gpu()) == "sdpa"


def test_triton_where_nothing_was_measured() -> None:
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        assert chosen(request(num_heads=128), gpu(capability, shared_memory_per_block=None)) == "triton"


@pytest.mark.parametrize(
    ("environ", "backend", "reason"),
    [
        ({"NVTE_MLA_TRITON": "0"}, "triton", "NVTE_MLA_TRITON=0"),
        ({"NVTE_FLASH_ATTN": "0"}, "fa3", "NVTE_FLASH_ATTN=0"),
        ({"NVTE_FLASH_ATTN_V3": "0"}, "fa3", "NVTE_FLASH_ATTN_V3=0"),
        ({"NVTE_UNFUSED_ATTN": "0"}, "sdpa", "NVTE_UNFUSED_ATTN=0"),
        ({"MLA_PLUGIN_BLOCK": "flashinfer"}, "flashinfer", "excluded by MLA_PLUGIN_BLOCK"),
    ],
)
def test_a_variable_keeps_a_backend_off(environ: dict[str, str], backend: str, reason: str) -> None:
    decision = survey_decode(request(), platform=gpu(), environ=environ)
    (entry,) = (entry for entry in decision.trace if entry.backend == backend)
    assert not entry.accepted
    assert entry.reasons == (reason,)
    assert decision.plan is not None
    assert decision.plan.forward_backend != backend


def test_batch_invariance_is_asked_for_by_the_request_or_a_variable() -> None:
    plain = survey_decode(request(), platform=gpu(), environ={})
    for call, environ in ((request(batch_invariant=True), {}), (request(), {"MLA_PLUGIN_BATCH_INVARIANT": "1"})):
        decision = survey_decode(call, platform=gpu(), environ=environ)
        assert decision.request.batch_invariant
        assert "batch_invariant" in describe_request(decision.request)
        assert decision.plan is not None
        assert decision.plan.forward_backend == "triton"
        reason = "batch_invariant=True, expected False: the bits of a row may depend on the rest of the batch, as "
        for entry in decision.trace:
            was_taken = next(x.accepted for x in plain.trace if x.backend == entry.backend)
            assert entry.accepted == (entry.backend == "triton")
            why = [found.removeprefix(reason) for found in entry.reasons if found.startswith(reason)]
            assert len(why) == 1 or entry.accepted or not was_taken
            assert all("splits" in text or "products" in text for text in why)
    assert not plain.request.batch_invariant
    assert survey_decode(request(), platform=gpu(), environ={"MLA_PLUGIN_BATCH_INVARIANT": "yes"}).plan == plain.plan


def test_left_padding_in_pages_has_no_invariant_bits() -> None:
    for page_size, is_taken in ((64, False), (None, True)):
        call = request(batch_invariant=True, has_leftpad_kv=True, page_size=page_size)
        entry = next(x for x in survey_decode(call, platform=gpu(), environ={}).trace if x.backend == "triton")
        assert entry.accepted == is_taken
        assert is_taken or entry.reasons[0].startswith("batch_invariant=True with leftpad_kv and page_size=64")


def test_a_backend_asked_for_by_name_runs_or_raises() -> None:
    assert resolve(request(), backend="sdpa", platform=gpu(), environ={}).forward_backend == "sdpa"
    environ = {"MLA_PLUGIN_BACKEND": "fa3"}
    assert chosen(request(batch_size=1), gpu(), environ) == "fa3"
    with pytest.raises(NoBackendError, match=r"(?s)no decode backend .*pages of 64") as caught:
        resolve(request(kv_lora_rank=384), backend="fa3", platform=gpu(), environ={})
    assert "kv_lora_rank=384, expected 256 or 512" in str(caught.value)
    with pytest.raises(ValueError, match="no backend named 'fa9'"):
        resolve(request(), backend="fa9", platform=gpu(), environ={})


def test_decisions_are_cached_and_each_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NVTE_DEBUG", "1")
    monkeypatch.setenv("NVTE_DEBUG_LEVEL", "1")
    logger = logging.getLogger("mla_plugin")
    before, call = logger.level, request(device_type="cpu", batch_size=91)
    try:
        assert resolve(call) is resolve(call)
    finally:
        logger.setLevel(before)
    assert [record.getMessage() for record in caplog.records] == ["decode: sdpa"]
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    with pytest.raises(NoBackendError):
        resolve(call)


def test_nothing_left_names_every_backend() -> None:
    with pytest.raises(NoBackendError) as caught:
        resolve(request(), platform=gpu(packages=()), environ={"NVTE_UNFUSED_ATTN": "0"})
    assert {entry.backend for entry in caught.value.trace} == set(BUILTIN_BACKENDS)
    assert all(entry.reasons for entry in caught.value.trace)


@pytest.mark.usefixtures("_fixed_table")
def test_explain_tells_the_whole_decision() -> None:
    text = mla_plugin.explain(request(), platform=gpu(), environ={})
    first, *_, last = text.splitlines()
    assert first == (
        "decode bfloat16, batch 32, lengths 1 x 4096, 16 heads, kv_lora_rank 512, rope 64, pages of 64, "
        "has_seqlens_kv, has_host_lengths  on cuda sm90"
    )
    assert last == "=> decode: triton"
    assert "fa3 kernel" in text
    assert "cudnn       refuses   DecodeRequest, expected AttentionRequest" in text
    nothing = mla_plugin.explain(request(), platform=gpu(packages=()), environ={"NVTE_UNFUSED_ATTN": "0"})
    assert nothing.splitlines()[-1] == "=> no backend"


class Other:
    """A backend of another package."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    @mla_plugin.hookimpl
    def select_backend(self, request: object, platform: Platform) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "place"),
    [
        (Accepted(priority=1), 0),
        (Accepted(), 4),
        (Accepted(priority=-1), 5),
        (Refused(("batch_size=32 > 1",)), None),
        (AttributeError("'DecodeRequest' object has no attribute 'head_dim_qk'"), None),
    ],
)
def test_a_backend_of_another_package_has_its_place(answer: object, place: int | None) -> None:
    manager = get_manager()
    manager.register(Other(answer), "other")
    try:
        decision = survey_decode(request(), platform=gpu(), environ={})
    finally:
        manager.unregister("other")
    assert sorted(entry.backend for entry in decision.trace) == sorted((*BUILTIN_BACKENDS, "other"))
    accepted = [entry.backend for entry in decision.trace if entry.accepted]
    assert ("other" in accepted) == (place is not None)
    if place is not None:
        assert accepted.index("other") == place


def test_the_cpu_falls_to_sdpa_alone() -> None:
    decision = survey_decode(request(device_type="cpu", dtype=torch.float32), environ={})
    assert decision.plan is not None
    assert decision.plan.forward_backend == "sdpa"
    (entry,) = (entry for entry in decision.trace if entry.backend == "triton")
    assert entry.reasons == ("off CUDA it runs only when requested by name",)


def test_every_name_in_the_table_is_a_backend() -> None:
    for order in (decode_measured.BACKENDS, decode_preference.FUSED):
        assert set(order) <= set(BUILTIN_BACKENDS)


GPUS = {"NVIDIA H200": "NVIDIA_H200", "NVIDIA H100 80GB HBM3": "NVIDIA_H100_80GB_HBM3"}


def kept_result(name: str, device_name: str) -> list[dict[str, Any]]:
    path = ROOT / "benchmarks" / "results" / f"{name}_{GPUS[device_name]}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def asked_in(row: dict[str, Any]) -> DecodeRequest:
    """The request of a measured call."""
    return request(
        batch_size=row["B"],
        num_heads=row["H"],
        seqlen_q=row["S_q"],
        max_seqlen_kv=row["longest"],
        page_size=row["page"],
        profile=Profile.rounded(row["mean"], row["longest"] / row["mean"]),
    )


def test_the_table_is_the_kept_result() -> None:
    assert decode_table.MODULE.read_text() == decode_table.text()
    assert decode_table.BACKENDS == decode_measured.BACKENDS
    assert set(decode_preference.FUSED) == set(decode_measured.BACKENDS)


def behind(row: dict[str, Any], missing: tuple[str, ...], device_name: str) -> float | None:
    """The best of those that are left over the choice among them; None if none is left."""
    left = {name: ms for name, ms in row["ms"].items() if name not in missing}
    order = decode_preference.measured_order(asked_in(row), gpu(device_name=device_name))
    chosen = next((name for name in order if name in left), None)
    return None if chosen is None else min(left.values()) / left[chosen]


MISSING = [(), *((name,) for name in decode_measured.BACKENDS), ("flashmla", "flashinfer"), ("triton", "fa3")]


@pytest.mark.parametrize("device_name", GPUS)
@pytest.mark.parametrize("missing", MISSING, ids=str)
def test_the_choice_is_the_best_that_is_left_in_every_measured_cell(missing: tuple[str, ...], device_name: str) -> None:
    """Cells of which several share a place in the table decide together."""
    rows = kept_result("decode_preference", device_name)
    shares = [share for row in rows if (share := behind(row, missing, device_name)) is not None]
    assert min(shares) >= 0.95
    assert math.prod(shares) ** (1 / len(shares)) >= 0.98


def fastest(**changes: Any) -> str:
    return decode_preference.measured_order(request(**changes), gpu())[0]


@pytest.mark.parametrize(
    ("changes", "slower"),
    [({"num_heads": 64}, 1.14), ({"num_heads": 16}, 1.0), ({"num_heads": 64, "page_size": 16}, 1.28)],
    ids=str,
)
def test_without_the_hopper_kernel_ours_counts_as_slow_as_the_plain_one(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], slower: float
) -> None:
    """The table has the times of the Hopper kernel wherever it takes the call."""
    heads, page_size = changes["num_heads"], changes.get("page_size", 64)
    with_table(monkeypatch, f"32 {heads} 1 4096 4096 {page_size} | 1 1 1 1")
    newer = gpu(packages=tuple((name, {"triton": "3.9.0"}.get(name, version)) for name, version in PACKAGES))
    assert "triton" in dict(newer.packages)
    for platform, expected in ((gpu(), 1.0), (newer, slower)):
        times = decode_preference.measured_times(request(**changes), platform)
        assert times["triton"] / times["fa3"] == pytest.approx(expected)


def test_heads_between_those_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As fast as both sides of them make them, the near one counting most."""
    with_table(monkeypatch, "32 16 1 4096 4096 64 | 1 4 3 2", "32 64 1 4096 4096 64 | 2 1 3 4")
    given = {heads: decode_preference.measured_times(request(num_heads=heads), gpu()) for heads in (16, 24, 40, 64)}
    assert given[16]["flashmla"] == pytest.approx(4, rel=1e-2)
    assert given[64]["triton"] == pytest.approx(2, rel=1e-2)
    ratios = [times["flashmla"] / times["triton"] for times in given.values()]
    assert ratios == sorted(ratios, reverse=True)
    assert [fastest(num_heads=heads) for heads in (16, 24, 40, 64)] == ["triton", "triton", "flashmla", "flashmla"]


@pytest.mark.parametrize(
    ("changes", "backend"),
    [
        ({}, "triton"),
        ({"profile": Profile(4096, 1)}, "triton"),
        ({"profile": Profile(4096, 4)}, "flashmla"),
        ({"profile": Profile(512, 8)}, "flashmla"),
        ({"profile": Profile(2048, 1), "max_seqlen_kv": 1 << 17}, "triton"),
        ({"page_size": 1}, "fa3"),
        ({"page_size": 8}, "fa3"),
        ({"page_size": 16}, "flashinfer"),
        ({"page_size": 128}, "triton"),
        ({"page_size": None}, "triton"),
        ({"seqlen_q": 4}, "flashinfer"),
    ],
)
def test_what_the_order_depends_on(changes: dict[str, Any], backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_table(
        monkeypatch,
        "32 16 1 4096 4096 64 | 1 2 3 4",
        "32 16 1 4096 20000 64 | 2 1 3 4",
        "32 16 1 4096 4096 1 | 3 - 2 1",
        "32 16 1 4096 4096 16 | 3 - 1 2",
        "32 16 4 4096 4096 64 | 3 2 1 4",
    )
    assert fastest(**changes) == backend


def test_unknown_lengths_are_ragged_and_half_of_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with_table(monkeypatch, "32 16 1 4096 8192 64 | 2 1 3 4", "32 16 1 8192 8192 64 | 1 2 3 4")
    assert fastest(max_seqlen_kv=8192, has_host_lengths=False) == "flashmla"
    assert fastest(max_seqlen_kv=8192) == "triton"


def test_no_sequence_and_no_room() -> None:
    for empty in ({"batch_size": 0, "max_seqlen_kv": 0}, {"seqlen_q": 0}):
        assert len(decode_preference.measured_order(request(**empty), gpu())) == 4


def test_the_gpu_decides_by_its_own_measurements() -> None:
    """Where the capability was not measured, nothing is compared."""
    assert decode_preference.measured_times(request(), gpu((8, 0))) == {}
    assert decode_preference.measured_order(request(), gpu((8, 0))) == decode_preference.FUSED


def test_a_request_is_described_by_what_it_has() -> None:
    flags = ("causal", "has_seqlens_kv", "has_host_lengths", "has_leftpad_kv", "return_lse", "batch_invariant")
    for flag in flags:
        plain = dict.fromkeys(flags, False)
        assert flag in describe_request(request(**plain | {flag: True})).split(", ")
        assert flag not in describe_request(request(**plain)).split(", ")
    assert "contiguous cache" in describe_request(request(page_size=None))
    text = describe_request(request(profile=Profile(512, 8)))
    assert "mean length about 512, the longest 8 times as long" in text
    assert "mean length" not in describe_request(request(profile=Profile(512, 8), has_seqlens_kv=False))


def test_a_decision_without_a_plan_has_its_error_and_the_layers_of_its_reasons() -> None:
    environ = {"MLA_PLUGIN_BLOCK": "fa3,flashmla", "NVTE_UNFUSED_ATTN": "0", "NVTE_MLA_TRITON": "0"}
    decision = survey_decode(request(), platform=gpu(packages=PACKAGES[1:]), environ=environ)
    with pytest.raises(NoBackendError) as caught:
        resolve(request(), platform=gpu(packages=PACKAGES[1:]), environ=environ)
    assert decision.error == str(caught.value)
    layers = {entry.backend: entry.layer for entry in decision.trace}
    assert (layers["fa3"], layers["triton"], layers["flashinfer"]) == ("environment", "environment", "backend")
    assert survey_decode(request(), platform=gpu(), environ={}).error is None
    named = survey_decode(request(), backend="triton", platform=gpu(), environ={})
    assert {entry.layer for entry in named.trace if entry.accepted} == {"backend"}
    assert {entry.layer for entry in named.trace if "requested by name" in entry.reasons[0]} == {"host"}


@pytest.mark.parametrize(
    ("field", "value"), [("batch_size", -1), ("num_heads", 0), ("kv_lora_rank", 0), ("page_size", 0)]
)
def test_a_request_out_of_range_is_refused(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field}={value}"):
        request(**{field: value})


@pytest.mark.usefixtures("_fixed_table")
def test_rows_that_do_not_start_on_16_bytes_are_left_to_the_kernels_that_read_them() -> None:
    call = request(num_heads=128, has_aligned_rows=False)
    assert chosen(call, gpu()) == "triton"
    assert "rows not 16-byte aligned" in describe_request(call)
    assert "rows" not in describe_request(request())
