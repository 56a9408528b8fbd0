"""The suite passes backends that keep the contract, and fails each of the broken ones for its own reason."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from mla_plugin.conformance import BackendConformance, Case, ConformanceError, cases, checks
from mla_plugin.hooks import hookimpl
from mla_plugin.hooks.types import Accepted
from tests.conformance import broken_backends
from tests.conformance.sample_backends import (
    FLASH_REFUSES,
    FlashBackend,
    ReferenceBackend,
    case_named,
    manager_of,
    suite_of,
)

pytest_plugins = ("pytester",)

BROKEN = [backend for backend in vars(broken_backends).values() if "case" in getattr(backend, "__dict__", {})]


class TestFlashBackend(BackendConformance):
    backend = "sample"
    manager = manager_of(FlashBackend())
    refuses = FLASH_REFUSES


class TestReferenceBackend(BackendConformance):
    """What the other sample refuses, so that between them they run every case."""

    backend = "sample"
    manager = manager_of(ReferenceBackend())

    def cases(self):
        return tuple(case for case in cases() if case.tags & FLASH_REFUSES.keys())


class TestNanInThePadding(BackendConformance):
    backend = "sample"
    manager = manager_of(ReferenceBackend())
    padding_poison = math.nan

    def cases(self):
        return cases("padding_causal", "fp32")


@pytest.mark.parametrize("backend", BROKEN, ids=lambda backend: backend.__name__)
def test_a_broken_backend_fails(backend):
    case = case_named(backend.case)
    with pytest.raises(ConformanceError, match=backend.message):
        suite_of(backend()).test_backward(case)


@pytest.mark.parametrize("backend", BROKEN, ids=lambda backend: backend.__name__)
def test_what_a_broken_backend_is_made_of_passes(backend):
    """Without the fault the same case passes, so it is the fault that fails it."""
    parent = FlashBackend if issubclass(backend, FlashBackend) else ReferenceBackend
    suite_of(parent()).test_backward(case_named(backend.case))


def test_inference_is_checked_without_gradients():
    case = case_named("bshd-causal-bf16")
    with pytest.raises(ConformanceError, match=r"^out: the"):
        suite_of(broken_backends.WrongScale()).test_forward(case)
    suite_of(broken_backends.IgnoresDlse()).test_forward(case_named("lse-bshd-bf16"))


def test_an_accepting_backend_that_raises_fails():
    class Raises(ReferenceBackend):
        def compute(self, request, tensors):
            raise RuntimeError("no kernel image is available")

    with pytest.raises(RuntimeError, match="no kernel image"):
        suite_of(Raises()).test_forward(case_named("bshd-causal-bf16"))


class TestRefusals:
    case = case_named("thd-padding-bf16")

    def test_expected_by_tag_or_by_name(self):
        for key in ("thd", "thd-padding-bf16", "thd bf16 training", "all"):
            suite_of(FlashBackend(), refuses={key: "qkv_format=thd"}).test_backward(self.case)

    def test_every_expected_reason_must_be_given(self):
        refuses = {"thd": "qkv_format=thd", "padding_masks": "head_dim_v=128"}
        with pytest.raises(ConformanceError, match="'head_dim_v=128' is in none of its reasons"):
            suite_of(FlashBackend(), refuses=refuses).test_backward(self.case)

    def test_unexpected_names_the_tags(self):
        with pytest.raises(ConformanceError, match=r"refuses thd-padding-bf16.*qkv_format=thd.*tags: .*thd"):
            suite_of(FlashBackend()).test_backward(self.case)

    def test_training_and_inference_are_told_apart(self):
        suite = suite_of(FlashBackend(), refuses={"thd training": "qkv_format=thd"})
        suite.test_backward(self.case)
        with pytest.raises(ConformanceError, match="expected to compute"):
            suite.test_forward(self.case)

    def test_an_expected_refusal_that_does_not_come(self):
        with pytest.raises(ConformanceError, match="accepts thd-padding-bf16, but is expected to refuse"):
            suite_of(ReferenceBackend(), refuses={"thd": "qkv_format=thd"}).test_forward(self.case)

    @pytest.mark.parametrize("key", ["tdh", "thd bshd", "training inference"])
    def test_a_key_that_fits_no_case(self, key):
        with pytest.raises(ConformanceError, match=f"refuses names '{key}'"):
            suite_of(ReferenceBackend(), refuses={key: "1"}).test_every_expected_refusal_names_a_case()

    def test_a_reason_may_name_a_package_or_an_attribute(self):
        checks.check_reasons(("flash-attn is not installed", "deterministic is not available", "needs 9.0"))


def test_the_backward_of_another_backend_runs():
    class ForwardOnly(ReferenceBackend):
        def decide(self, request):
            return Accepted(backward_by="other")

        def differentiate(self, request, residuals, dout, dlse):
            raise AssertionError("not mine")

    manager = manager_of(ForwardOnly())
    manager.register(ReferenceBackend(), "other")
    case = case_named("bshd-causal-bf16")
    suite_of(None, manager=manager).test_backward(case)
    manager.unregister("other")
    manager.register(broken_backends.WrongScaleInBackward(), "other")
    with pytest.raises(ConformanceError, match=r"^dq"):
        suite_of(None, manager=manager).test_backward(case_named("bshd-causal-fp32"))


def test_hooks_run_without_autograd_and_as_a_request_for_training():
    seen = []

    class Looks(ReferenceBackend):
        def compute(self, request, tensors):
            seen.append((request.is_training, torch.is_grad_enabled(), tensors.q.requires_grad))
            return super().compute(request, tensors)

    suite = suite_of(Looks())
    suite.test_forward(case_named("bshd-causal-bf16"))
    suite.test_backward(case_named("bshd-causal-bf16"))
    assert seen == [(False, False, False), (True, False, False)]


def test_the_seed_decides_the_data(capsys):
    drawn = []

    class Looks(ReferenceBackend):
        def compute(self, request, tensors):
            drawn.append(tensors.q)
            return super().compute(request, tensors)

    for seed in (7, 7, None, None):
        suite_of(Looks(), seed=seed).test_forward(case_named("bshd-causal-bf16"))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[2], drawn[3])
    printed = capsys.readouterr().out.split("\n")
    assert printed[:2] == ["seed = 7", "seed = 7"]
    suite_of(Looks(), seed=int(printed[2].removeprefix("seed = "))).test_forward(case_named("bshd-causal-bf16"))
    assert torch.equal(drawn[2], drawn[4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_way_to_allocate_is_poisoned(dtype):
    like = torch.zeros(3, 2, dtype=dtype)
    with checks.PoisonedMemory():
        poisoned = (
            torch.empty(3, dtype=dtype),
            torch.empty_like(like.T),
            like.new_empty(3),
            torch.empty_strided((3,), (2,), dtype=dtype),
            torch.empty_permuted((2, 3), (1, 0), dtype=dtype),
            like.new_empty_strided((3,), (1,)),
        )
        clean = (torch.zeros(3), torch.empty(3, dtype=torch.int32).fill_(1), like + 1)
    assert all(x.isnan().all() for x in poisoned)
    assert all(x.isfinite().all() for x in clean)


def test_synchronisation_is_an_error_on_cuda_only(monkeypatch):
    modes = ["warn"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def wait_for(device_type: str) -> None:
        with checks.synchronisation_is_an_error(device_type):
            raise RuntimeError(f"mode {modes[-1]}")

    with pytest.raises(RuntimeError, match="mode warn"):
        wait_for("cpu")
    with pytest.raises(RuntimeError, match="mode error"):
        wait_for("cuda")
    assert modes == ["warn", "error", "warn"]


class TestErrorBudget:
    case = Case("budget", dtype=torch.bfloat16)
    exact = torch.tensor([1.0, 0.5], dtype=torch.float64)

    def check(self, error: float, plain: float) -> None:
        low = self.exact + torch.tensor([plain, 0.0], dtype=torch.float64)
        got = self.exact + torch.tensor([error, 0.0], dtype=torch.float64)
        checks.check_error(self.case, "out", got, self.exact, low, 1.0)

    def test_twice_the_error_of_plain_pytorch_and_two_roundings(self):
        two_roundings = torch.finfo(torch.bfloat16).eps
        self.check(0.2 + 0.9 * two_roundings, plain=0.1)
        with pytest.raises(ConformanceError, match=r"out: the largest error 0\.2.* is above 0\.2.* \(0\.1\)"):
            self.check(0.2 + 1.1 * two_roundings, plain=0.1)

    def test_many_small_errors_fail_below_the_largest(self):
        exact = torch.linspace(1, 2, 1000, dtype=torch.float64)
        low = exact.clone()
        low[0] += 0.1
        with pytest.raises(ConformanceError, match="root-mean-square error"):
            checks.check_error(self.case, "out", exact + 0.1, exact, low, 2.0)

    def test_a_single_wrong_element_fails(self):
        exact = torch.ones(100_000, dtype=torch.float64)
        got = exact.clone()
        got[5] = 1.01
        with pytest.raises(ConformanceError, match="largest error"):
            checks.check_error(self.case, "out", got, exact, exact, 1.0)

    def test_float32_may_differ_by_a_few_roundings_only(self):
        case = replace(self.case, dtype=torch.float32)
        checks.check_error(case, "out", self.exact + 3e-6, self.exact, self.exact, 1.0)
        with pytest.raises(ConformanceError, match="largest error 6e-06"):
            checks.check_error(case, "out", self.exact + 6e-6, self.exact, self.exact, 1.0)

    def test_nothing_is_no_error(self):
        nothing = self.exact[:0]
        checks.check_error(self.case, "out", nothing, nothing, nothing, 1.0)


TEST_FILE = """
    from mla_plugin.conformance import BackendConformance, cases
    from tests.conformance.broken_backends import {backend}
    from tests.conformance.sample_backends import manager_of

    class TestMine(BackendConformance):
        backend = "sample"
        manager = manager_of({backend}())
        refuses = {{"thd": "qkv_format=thd"}}

        def cases(self):
            return cases("fp16")
"""


@pytest.mark.parametrize(
    ("backend", "passed", "failed"), [("FlashBackend", 9, 0), ("LseInBaseTwo", 1, 8), ("RefusesEverything", 1, 8)]
)
def test_a_test_file_of_another_package(pytester, backend, passed, failed):
    pytester.makepyfile(TEST_FILE.format(backend=backend))
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=passed, failed=failed)
    if failed:
        result.stdout.fnmatch_lines(["*::test_backward?bshd-causal-fp16?*"])


def test_without_a_name_the_error_lists_the_backends():
    suite = suite_of(ReferenceBackend(), backend="")
    with pytest.raises(ValueError, match="no backend named '' is registered; registered: sample"):
        suite.test_forward(case_named("bshd-causal-bf16"))


def test_hook_wrappers_run():
    calls = []

    class Timer:
        @hookimpl(wrapper=True)
        def forward(self, plan, tensors):
            calls.append(plan.forward_backend)
            return (yield)

    manager = manager_of(ReferenceBackend())
    manager.register(Timer(), "timer")
    suite_of(None, manager=manager).test_forward(case_named("bshd-causal-bf16"))
    assert calls == ["sample"]


def test_importing_it_loads_no_kernel_library():
    heavy = ("triton", "flashinfer", "flash_attn", "transformers", "transformer_engine")
    code = f"import sys, mla_plugin.conformance; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
