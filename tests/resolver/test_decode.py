"""Which backend decodes, and why the others do not."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import mla_plugin
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.manager import BUILTIN_BACKENDS, get_manager
from mla_plugin.hooks.types import Accepted, NoBackendError, Platform, Refused
from mla_plugin.resolver import decode_measured, decode_preference, resolve, survey_decode
from mla_plugin.resolver.decode import describe_request
from tests.house.project import ROOT

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


@pytest.mark.parametrize(
    ("sizes", "backend"),
    [
        ((1, 16, 4096), "triton"),
        ((1, 16, 65536), "triton"),
        ((32, 16, 4096), "triton"),
        ((128, 16, 8192), "triton"),
        ((1, 128, 4096), "triton"),
        ((32, 128, 4096), "flashinfer"),
        ((128, 64, 8192), "fa3"),
    ],
)
def test_the_fastest_as_measured_on_hopper(sizes: tuple[int, int, int], backend: str) -> None:
    batch, heads, keys = sizes
    assert chosen(request(batch_size=batch, num_heads=heads, max_seqlen_kv=keys), gpu()) == backend


def test_queries_count_as_heads() -> None:
    assert chosen(request(batch_size=1, seqlen_q=4, causal=True), gpu()) == chosen(
        request(batch_size=1, num_heads=64), gpu()
    )


def test_the_next_in_the_order_where_the_first_cannot() -> None:
    call = request()
    assert chosen(call.replace(has_host_lengths=False), gpu()) == "triton"
    assert chosen(call.replace(num_heads=128, has_host_lengths=False), gpu()) == "fa3"
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
        ({"MLA_PLUGIN_BLOCK": "flashinfer"}, "flashinfer", "MLA_PLUGIN_BLOCK names it"),
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
        for entry in decision.trace:
            reason = "batch_invariant=True, accepted is False: the bits of a row may depend on what is beside it"
            was_taken = next(x.accepted for x in plain.trace if x.backend == entry.backend)
            assert not entry.accepted
            assert (reason in entry.reasons) == was_taken or not was_taken
    assert not plain.request.batch_invariant
    assert survey_decode(request(), platform=gpu(), environ={"MLA_PLUGIN_BATCH_INVARIANT": "yes"}).plan == plain.plan


def test_a_backend_asked_for_by_name_runs_or_raises() -> None:
    assert resolve(request(), backend="sdpa", platform=gpu(), environ={}).forward_backend == "sdpa"
    environ = {"MLA_PLUGIN_BACKEND": "fa3"}
    assert chosen(request(batch_size=1), gpu(), environ) == "fa3"
    with pytest.raises(NoBackendError, match=r"(?s)no decode backend .*pages of 64") as caught:
        resolve(request(kv_lora_rank=384), backend="fa3", platform=gpu(), environ={})
    assert "kv_lora_rank=384, accepted is 256 or 512" in str(caught.value)
    with pytest.raises(ValueError, match="no backend named 'fa9'"):
        resolve(request(), backend="fa9", platform=gpu(), environ={})


def test_nothing_left_names_every_backend() -> None:
    with pytest.raises(NoBackendError) as caught:
        resolve(request(), platform=gpu(packages=()), environ={"NVTE_UNFUSED_ATTN": "0"})
    assert {entry.backend for entry in caught.value.trace} == set(BUILTIN_BACKENDS)
    assert all(entry.reasons for entry in caught.value.trace)


def test_explain_tells_the_whole_decision() -> None:
    text = mla_plugin.explain(request(), platform=gpu(), environ={})
    first, *_, last = text.splitlines()
    assert first == (
        "decode bfloat16, batch 32, lengths 1 x 4096, 16 heads, kv_lora_rank 512, rope 64, pages of 64, "
        "has_seqlens_kv, has_host_lengths  on cuda sm90"
    )
    assert last == "=> decode: triton"
    assert "fa3 kernel" in text
    assert "cudnn       refuses   DecodeRequest, accepted is AttentionRequest" in text
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
        (Accepted(), 3),
        (Accepted(priority=-1), 4),
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
    accepted = [entry.backend for entry in decision.trace if entry.accepted]
    assert ("other" in accepted) == (place is not None)
    if place is not None:
        assert accepted.index("other") == place


def test_the_cpu_falls_to_sdpa_alone() -> None:
    decision = survey_decode(request(device_type="cpu", dtype=torch.float32), environ={})
    assert decision.plan is not None
    assert decision.plan.forward_backend == "sdpa"
    (entry,) = (entry for entry in decision.trace if entry.backend == "triton")
    assert entry.reasons == ("on the CPU it runs when asked for by name",)


def test_every_name_in_the_table_is_a_backend() -> None:
    for order in (decode_measured.BACKENDS, decode_preference.UNMEASURED):
        assert set(order) <= set(BUILTIN_BACKENDS)


def kept_result(name: str) -> list[dict[str, Any]]:
    path = ROOT / "benchmarks" / "results" / f"{name}_NVIDIA_H200.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def test_the_table_is_the_kept_result() -> None:
    kept = {
        (row["B"], row["H"], row["S_kv"], *(round(row["ms"][name], 4) for name in decode_measured.BACKENDS))
        for row in kept_result("decode_preference")
    }
    assert set(decode_measured.MEASURED[9, 0]) == kept
    assert len(kept) == 44


@pytest.mark.parametrize("missing", [(), ("triton",), ("flashinfer",), ("fa3",)], ids=str)
def test_the_choice_is_within_3_percent_of_the_best_that_is_left(missing: tuple[str, ...]) -> None:
    """In a run that the table was not made of."""
    rows = kept_result("decode_backends")
    assert len(rows) == 44
    for row in rows:
        asked = request(batch_size=row["B"], num_heads=row["H"], max_seqlen_kv=row["S_kv"])
        order = decode_preference.measured_order(asked, gpu())
        left = {name: ms for name, ms in row["ms"].items() if name not in missing}
        chosen = next(name for name in order if name in left)
        assert left[chosen] * 0.97 <= min(left.values())
        assert missing or chosen == row["choice"]


@pytest.mark.parametrize(
    ("changes", "nearest"),
    [
        ({"batch_size": 1, "num_heads": 5, "max_seqlen_kv": 100}, (1, 16, 4096)),
        ({"batch_size": 1, "num_heads": 4, "seqlen_q": 4, "max_seqlen_kv": 5000}, (1, 16, 4096)),
        ({"batch_size": 200, "num_heads": 96, "max_seqlen_kv": 9000}, (256, 128, 8192)),
        ({"batch_size": 0, "num_heads": 128, "max_seqlen_kv": 0}, (1, 128, 4096)),
    ],
)
def test_between_the_measured_calls_the_nearest_decides(changes: dict[str, int], nearest: tuple[int, int, int]) -> None:
    row = next(row for row in decode_measured.MEASURED[9, 0] if row[:3] == nearest)
    milliseconds = dict(zip(decode_measured.BACKENDS, row[3:], strict=True))
    fastest_first = tuple(sorted(decode_measured.BACKENDS, key=milliseconds.__getitem__))
    assert decode_preference.measured_order(request(**changes), gpu()) == fastest_first


@pytest.mark.parametrize(
    ("field", "value"), [("batch_size", -1), ("num_heads", 0), ("kv_lora_rank", 0), ("page_size", 0)]
)
def test_a_request_out_of_range_is_refused(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field}={value}"):
        request(**{field: value})


def test_rows_that_do_not_start_on_16_bytes_are_left_to_the_kernels_that_read_them() -> None:
    call = request(num_heads=128, has_aligned_rows=False)
    assert chosen(call, gpu()) == "triton"
    assert "rows not on 16 bytes" in describe_request(call)
    assert "rows" not in describe_request(request())
