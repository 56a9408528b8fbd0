import logging
from collections.abc import Iterator

import pytest

from mla_plugin import Accepted, AttentionRequest, NoBackendError, Platform, Refused, explain, hookimpl, resolve
from mla_plugin.environment import EnvironmentVariableError
from mla_plugin.hooks.manager import get_manager
from mla_plugin.resolver import survey
from tests.requests import A100, CPU, H100, mla_request


class Backend:
    """Takes everything, or refuses with a reason, or raises; counts how often it is asked."""

    def __init__(self, answer: Accepted | Refused | Exception | str) -> None:
        self.answer = answer
        self.asked = 0

    @hookimpl
    def select_backend(self, request: AttentionRequest, platform: Platform) -> object:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def add() -> Iterator[object]:
    added = []

    def register(name: str, answer: Accepted | Refused | Exception | str) -> Backend:
        backend = Backend(answer)
        get_manager().register(backend, name)
        added.append(name)
        return backend

    yield register
    for name in added:
        get_manager().unregister(name)


def order(decision: object) -> list[str]:
    return [entry.backend for entry in decision.trace]


def test_the_fallback_runs_on_the_cpu() -> None:
    plan = resolve(mla_request(device_type="cpu"))
    assert (plan.forward_backend, plan.backward_backend) == ("sdpa", "sdpa")


def test_priority_places_a_backend_of_another_package(add: object) -> None:
    add("zero", Accepted())
    add("high", Accepted(priority=1))
    add("highest", Accepted(priority=5))
    add("low", Accepted(priority=-1))
    decision = survey(mla_request(device_type="cpu"))
    assert decision.plan.forward_backend == "highest"
    assert order(decision)[:2] == ["highest", "high"]
    assert order(decision)[order(decision).index("zero") :][:3] == ["zero", "sdpa", "low"]


def test_a_refusal_falls_through_and_stands_in_the_trace(add: object) -> None:
    add("picky", Refused(("head_dim_qk=192 > 128",)))
    decision = survey(mla_request(device_type="cpu"))
    assert decision.plan.forward_backend == "sdpa"
    entry = next(entry for entry in decision.trace if entry.backend == "picky")
    assert not entry.accepted
    assert entry.reasons == ("head_dim_qk=192 > 128",)


def test_an_explicit_backend_never_falls_back(add: object) -> None:
    add("picky", Refused(("head_dim_qk=192 > 128",)))
    with pytest.raises(NoBackendError, match="head_dim_qk=192 > 128") as caught:
        resolve(mla_request(device_type="cpu"), backend="picky")
    assert {entry.backend for entry in caught.value.trace} >= {"picky", "sdpa"}


def test_mla_plugin_backend_is_an_explicit_choice(add: object, monkeypatch: pytest.MonkeyPatch) -> None:
    add("picky", Refused(("seven=7",)))
    monkeypatch.setenv("MLA_PLUGIN_BACKEND", "picky")
    with pytest.raises(NoBackendError, match="seven=7"):
        resolve(mla_request(device_type="cpu"))
    assert resolve(mla_request(device_type="cpu"), backend="sdpa").forward_backend == "sdpa"


def test_an_unknown_backend_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"no backend named 'fa9' is registered; registered: .*sdpa"):
        resolve(mla_request(device_type="cpu"), backend="fa9")


def test_a_blocked_backend_is_not_even_asked(add: object, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = add("blocked", Accepted(priority=9))
    monkeypatch.setenv("MLA_PLUGIN_BLOCK", "nothing, blocked")
    decision = survey(mla_request(device_type="cpu"))
    assert decision.plan.forward_backend == "sdpa"
    assert blocked.asked == 0
    entry = next(entry for entry in decision.trace if entry.backend == "blocked")
    assert (entry.layer, entry.reasons) == ("environment", ("excluded by MLA_PLUGIN_BLOCK",))


def test_a_backend_of_another_package_that_raises_is_left_out(add: object, caplog: pytest.LogCaptureFixture) -> None:
    add("broken", RuntimeError("boom"))
    add("odd", "yes")
    with caplog.at_level(logging.WARNING, "mla_plugin"):
        decision = survey(mla_request(device_type="cpu"))
    assert decision.plan.forward_backend == "sdpa"
    reasons = {entry.backend: " ".join(entry.reasons) for entry in decision.trace}
    assert "RuntimeError: boom" in reasons["broken"]
    assert "must return an instance of Accepted or Refused" in reasons["odd"]
    assert "'broken'" in caplog.text


def test_nothing_left_names_every_backend_with_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    with pytest.raises(NoBackendError) as caught:
        resolve(mla_request(device_type="cpu"))
    message = str(caught.value)
    for name in get_manager().backends():
        assert name in message
    assert "NVTE_UNFUSED_ATTN=0" in message
    assert "head dims 192/128" in message


def test_the_backward_may_run_elsewhere(add: object) -> None:
    add("forward_only", Accepted(priority=1, backward_by="sdpa"))
    plan = resolve(mla_request(device_type="cpu", is_training=True))
    assert (plan.forward_backend, plan.backward_backend) == ("forward_only", "sdpa")


def test_a_backward_that_refuses_takes_the_forward_along(add: object) -> None:
    add("inference", Refused(("training",)))
    add("forward_only", Accepted(priority=1, backward_by="inference"))
    assert resolve(mla_request(device_type="cpu", is_training=True)).forward_backend == "sdpa"
    assert resolve(mla_request(device_type="cpu", is_training=False)).forward_backend == "forward_only"


def test_decisions_are_cached_on_request_and_variables(add: object, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = add("counted", Accepted(priority=1))
    request = mla_request(device_type="cpu", batch_size=77)
    assert resolve(request) is resolve(mla_request(device_type="cpu", batch_size=77))
    assert backend.asked == 1
    monkeypatch.setenv("MLA_PLUGIN_BLOCK", "counted")
    assert resolve(request).forward_backend == "sdpa"
    monkeypatch.delenv("MLA_PLUGIN_BLOCK")
    assert resolve(request).forward_backend == "counted"
    assert backend.asked == 1


def test_a_new_plugin_is_seen_at_the_next_call(add: object) -> None:
    request = mla_request(device_type="cpu", batch_size=78)
    assert resolve(request).forward_backend == "sdpa"
    add("late", Accepted(priority=1))
    assert resolve(request).forward_backend == "late"


def test_errors_are_not_cached(add: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_PLUGIN_BACKEND", "late")
    with pytest.raises(ValueError, match="no backend named 'late'"):
        resolve(mla_request(device_type="cpu"))
    add("late", Accepted())
    assert resolve(mla_request(device_type="cpu")).forward_backend == "late"


def test_a_bad_variable_is_an_error_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "true")
    with pytest.raises(ValueError, match=r"NVTE_UNFUSED_ATTN='true'.*integer"):
        resolve(mla_request(device_type="cpu"))


@pytest.mark.parametrize("name", ["NVTE_FLASH_ATTN", "NVTE_FLASH_ATTN_V3", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"])
def test_a_bad_variable_is_an_error_on_the_cpu_too(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='on'"):
        survey(mla_request(device_type="cpu"), platform=CPU, environ={name: "on"})


def test_flash_attention_switched_off_leaves_its_versions_unread() -> None:
    environ = {"NVTE_FLASH_ATTN": "0", "NVTE_FLASH_ATTN_V3": "on"}
    assert survey(mla_request(device_type="cpu"), platform=CPU, environ=environ).plan is not None


def test_transformer_engine_removes_what_its_rules_remove() -> None:
    decision = survey(mla_request(), platform=A100, environ={"NVTE_FUSED_ATTN": "0"})
    cudnn = next(entry for entry in decision.trace if entry.backend == "cudnn")
    assert not cudnn.accepted
    assert decision.cascade is not None
    assert "fused" not in decision.cascade.survivors


def test_the_fallback_fills_where_the_cascade_leaves_nothing_unless_strict() -> None:
    request = mla_request(qkv_format="thd", attn_mask_type="padding_causal", pad_between_seqs=True, is_training=True)
    assert survey(request, platform=A100, environ={}).plan.forward_backend == "triton"
    assert survey(request, platform=A100, environ={"NVTE_MLA_TRITON": "0"}).plan.forward_backend == "sdpa"
    strict = survey(request, platform=A100, environ={"MLA_PLUGIN_STRICT_TE": "1"})
    assert strict.plan is None
    assert "TransformerEngine rule 21" in strict.error
    assert survey(request.replace(host="transformer_engine"), platform=A100, environ={}).plan is None


def test_a_hypothetical_platform_is_not_cached() -> None:
    first = resolve(mla_request(), platform=A100)
    assert first.platform is A100
    assert resolve(mla_request(), platform=H100).platform is H100
    assert resolve(mla_request(device_type="cpu"), platform=CPU).platform is CPU


@pytest.mark.parametrize(("level", "lines"), [("0", 0), ("1", 1), ("2", 2)])
def test_nvte_debug_logs_the_trace(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, level: str, lines: int
) -> None:
    monkeypatch.setenv("NVTE_DEBUG", "1")
    monkeypatch.setenv("NVTE_DEBUG_LEVEL", level)
    logger = logging.getLogger("mla_plugin")
    before = logger.level
    try:
        resolve(mla_request(device_type="cpu", batch_size=90 + int(level)))
    finally:
        logger.setLevel(before)
    assert len(caplog.records) == lines
    if lines:
        assert caplog.records[0].getMessage() == "forward: sdpa"
    if lines == 2:
        assert "cudnn" in caplog.records[1].getMessage()


def test_nvte_debug_reaches_stderr_of_a_program_without_logging(tmp_path: object) -> None:
    import subprocess
    import sys

    code = (
        "import torch, mla_plugin\n"
        "q = torch.randn(1, 3, 2, 24); v = torch.randn(1, 3, 2, 16)\n"
        "mla_plugin.attention(q, q, v)\n"
    )
    env = {"NVTE_DEBUG": "1", "NVTE_DEBUG_LEVEL": "2", "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert "forward: sdpa" in done.stderr
    assert "head dims 24/16" in done.stderr


def test_explain_shows_each_backend_with_its_reasons(add: object) -> None:
    add("picky", Refused(("head_dim_qk=192 > 128", "capability (8, 0) < (9, 0)")))
    text = explain(mla_request(), platform=A100, environ={})
    assert "on cuda sm80" in text
    assert "head_dim_qk=192 > 128; capability (8, 0) < (9, 0)" in text
    assert text.splitlines()[-1] == "=> forward: triton"


@pytest.mark.parametrize(("release", "is_read"), [("2.10", False), ("2.17.1", False), ("2.18", True), ("2.20.2", True)])
@pytest.mark.parametrize("name", ["NVTE_FLASH_ATTN_V2", "NVTE_FLASH_ATTN_V3", "NVTE_FLASH_ATTN_V4"])
def test_inside_transformer_engine_a_variable_that_its_release_does_not_read_is_not_parsed(
    name: str, release: str, is_read: bool
) -> None:
    platform = Platform("cuda", (9, 0), (), (9, 13, 0), "13.0")
    inside = mla_request(host="transformer_engine", device_type="cuda")
    options = {"platform": platform, "environ": {name: "yes"}, "te_release": release}
    if is_read:
        with pytest.raises(EnvironmentVariableError, match=name):
            survey(inside, **options)
    else:
        survey(inside, **options)
    with pytest.raises(EnvironmentVariableError, match=name):
        survey(mla_request(device_type="cuda"), **options)
