"""The suite passes backends that keep the contract, and fails each of the broken ones."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import subprocess
import sys
import unittest

import pytest
import torch

from mla_plugin import Accepted, DecodeRequest, Refused, hookimpl
from mla_plugin.conformance import BackendConformance, ConformanceError, DecodeConformance, cases, checks, decode_cases
from mla_plugin.conformance.attention import chunks
from mla_plugin.conformance.budget import Roundings, Yardstick, check_error
from mla_plugin.conformance.checks import check_lse
from mla_plugin.conformance.selection import Catalogue
from mla_plugin.conformance.watch import PoisonedMemory, random_state_kept, synchronisation_is_an_error
from tests.conformance.many_seeds import FEATURES
from tests.conformance.mutants import Broken, manager_of, module_of
from tests.conformance.whole_table import CAUGHT, CORRECT, FAULTS, runs_of, suite_of

pytest_plugins = ("pytester",)

TABLE = [(operation, fault) for operation, faults in FAULTS.items() for fault in faults]
KNOWN = json.loads(CAUGHT.read_text())
TRIES = 40
"""Runs of the case that the table names, until one fails. The data are fresh: a dozen faults show in a quarter to half
of all runs, and with six runs one of them was missed now and then."""


class TestPlainAttention(BackendConformance):
    backend = "sample"
    manager = manager_of(module_of("plain_attention"))
    quick = True


class TestExactAttention(BackendConformance):
    """Every tenth case: a result without roundings is the easy one."""

    backend = "sample"
    quick = True
    manager = manager_of(module_of("plain_attention", **CORRECT["attention"]["exact"]))

    def cases(self):
        return cases()[::10]


class TestPlainDecode(DecodeConformance):
    backend = "sample"
    manager = manager_of(module_of("plain_decode"))
    quick = True


class TestNanInThePadding(BackendConformance):
    backend = "sample"
    quick = True
    manager = manager_of(module_of("plain_attention"))
    padding_poison = math.nan

    def cases(self):
        return cases("padding_causal", "fp32")


def test_there_are_enough_broken_backends():
    assert len(TABLE) >= 120
    assert len({(operation, fault.name) for operation, fault in TABLE}) == len(TABLE)


@pytest.mark.parametrize(("operation", "fault"), TABLE, ids=lambda x: x if isinstance(x, str) else x.name)
def test_a_broken_backend_fails(operation: str, fault: Broken) -> None:
    """The case that the table names; ``python -m tests.conformance.whole_table`` finds another one where it is gone."""
    wanted = KNOWN[operation].get(fault.name)
    assert wanted, f"nothing is known to catch {fault.name}; run python -m tests.conformance.whole_table"
    run = dict(runs_of(operation, suite_of(operation, fault), fault.name)).get(wanted)
    assert run, f"{wanted} is no test any more; run python -m tests.conformance.whole_table {fault.name}"
    for _ in range(TRIES):
        try:
            run()
        except Exception as error:
            if isinstance(error, SyntaxError | NameError | unittest.SkipTest):
                raise
            return
    pytest.fail(f"{wanted} does not catch {fault.name}")


def test_the_correct_backends_pass_what_catches_the_broken_ones() -> None:
    """So it is the fault that fails; a sample, ``many_seeds`` runs them all."""
    for operation in ("attention", "decode"):
        tests = dict(runs_of(operation, suite_of(operation, None), "correct"))
        for name in sorted(set(KNOWN[operation].values()))[::8]:
            with contextlib.suppress(unittest.SkipTest):  # for lack of memory; the others still run
                tests[name]()


FEATURED = [(operation, name) for operation, backends in CORRECT.items() for name in backends if name in FEATURES]


@pytest.mark.parametrize(("operation", "name"), FEATURED, ids=str)
def test_a_feature_that_the_plain_backend_refuses_passes(operation, name, monkeypatch):
    """In one dtype where there are chunks of a prefill, which take 8 seconds each; ``many_seeds`` runs them all."""
    monkeypatch.setattr(chunks, "DTYPES", chunks.DTYPES[:1])
    getattr(suite_of(operation, None, constants=CORRECT[operation][name]), FEATURES[name])()


def case_named(name):
    return next(case for case in cases() if case.name == name)


class NoThd:
    """The correct backend, without packed sequences."""

    def __init__(self):
        self.correct = module_of("plain_attention")

    @hookimpl
    def select_backend(self, request, platform):
        if not isinstance(request, DecodeRequest) and request.qkv_format == "thd":
            return Refused(("qkv_format=thd, expected dense layouts",))
        return self.correct.select_backend(request, platform)

    @hookimpl
    def forward(self, plan, tensors):
        return self.correct.forward(plan, tensors)

    @hookimpl
    def backward(self, plan, residuals, dout, dlse):
        return self.correct.backward(plan, residuals, dout, dlse)


def no_thd(**attributes):
    members = {"backend": "sample", "manager": manager_of(NoThd()), **attributes}
    return type("TestNoThd", (BackendConformance,), members)()


class TestRefusals:
    case = case_named("thd-tail-fp32") if any(c.name == "thd-tail-fp32" for c in cases()) else cases("thd", "tail")[0]

    def test_expected_by_tag_or_by_name(self):
        for key in ("thd", self.case.name, "thd tail training", "all"):
            no_thd(refuses={key: "qkv_format=thd"}).test_backward(self.case)

    def test_every_expected_reason_must_be_given(self):
        refuses = {"thd": "qkv_format=thd", "padding_masks": "head_dim_v=128"}
        with pytest.raises(ConformanceError, match="'head_dim_v=128' is in none of its reasons"):
            no_thd(refuses=refuses).test_backward(self.case)

    def test_unexpected_names_the_tags(self):
        with pytest.raises(ConformanceError, match=r"refuses thd-tail.*qkv_format=thd.*tags: .*thd"):
            no_thd().test_backward(self.case)

    def test_nothing_is_expected_where_refuses_is_none(self):
        no_thd(refuses=None).test_backward(self.case)

    def test_training_and_inference_are_told_apart(self):
        suite = no_thd(refuses={"thd training": "qkv_format=thd"})
        suite.test_backward(self.case)
        with pytest.raises(ConformanceError, match="expected to compute"):
            suite.test_forward(self.case)

    def test_an_expected_refusal_that_does_not_come(self):
        with pytest.raises(ConformanceError, match=r"accepts bshd-causal-fp32, but is expected to refuse"):
            no_thd(refuses={"bshd": "qkv_format"}).test_forward(case_named("bshd-causal-fp32"))

    def test_a_misspelt_tag_is_answered_with_the_list(self):
        with pytest.raises(ConformanceError, match=r"'causl' is no tag; did you mean 'causal'.*Tags: .*bshd.*thd"):
            no_thd(refuses={"causl": "1"}, cases=lambda _: cases()).test_every_expected_refusal_names_a_case()

    def test_tags_that_no_case_has_together(self):
        with pytest.raises(ConformanceError, match="no case has them all"):
            no_thd(refuses={"thd bshd": "1"}, cases=lambda _: cases()).test_every_expected_refusal_names_a_case()

    def test_a_reason_may_name_a_package_or_an_attribute(self):
        checks.check_reasons(("flash-attn is not installed", "deterministic is not available", "needs 9.0"))

    @pytest.mark.parametrize(
        "reason",
        ["head_dim_qk=320 > 256", "qkv_format='thd', expected 'sbhd'", "window_size=(7, 0); deterministic=True"],
    )
    def test_a_reason_does_not_give_another_requests_value(self, reason):
        request = case_named("bshd-causal-fp32").request()
        given = request.replace(head_dim_qk=320, qkv_format="thd", window_size=(7, 0), deterministic=True)
        checks.check_reasons((reason,), given)
        with pytest.raises(ConformanceError, match="does not fit its request"):
            checks.check_reasons((reason,), request)

    @pytest.mark.parametrize(
        "reason", ["expected head_dim_qk=320", "it needs window_size=(-1, 7)", "head_dim_v=80 only"]
    )
    def test_a_reason_may_say_what_the_backend_takes(self, reason):
        checks.check_reasons((reason,), case_named("bshd-causal-fp32").request())


ANEW = Broken(
    "softmax_anew",
    "        weights = (scores - lse_b.masked_fill(lse_b.isneginf(), torch.inf)[..., None]).exp()\n",
    "        weights = scores.softmax(-1).nan_to_num(0.0)\n",
)


class TestPartial:
    """A backward that takes its softmax anew is right but for requests with ``partial=True``."""

    case = cases("deterministic")[0]

    def suite(self, refuses, *, is_refused):
        module = module_of("plain_attention", ANEW)
        if is_refused:
            answer = module.select_backend

            def select_backend(request, platform):
                if getattr(request, "partial", False):
                    return Refused(("partial=True, expected False",))
                return answer(request, platform)

            module.select_backend = hookimpl(select_backend)
        members = {"backend": "sample", "manager": manager_of(module), "refuses": refuses}
        return type("TestAnew", (BackendConformance,), members)()

    def test_it_is_caught(self):
        with pytest.raises(ConformanceError):
            self.suite({}, is_refused=False).test_backward(self.case)

    @pytest.mark.parametrize("refuses", [{"partial": "partial=True"}, None])
    def test_it_may_refuse(self, refuses):
        suite = self.suite(refuses, is_refused=True)
        suite.test_backward(self.case)
        suite.test_every_expected_refusal_names_a_case()
        assert isinstance(suite.decision, Accepted)

    def test_an_unexpected_refusal(self):
        with pytest.raises(ConformanceError, match="with partial=True, which it is expected to compute"):
            self.suite({}, is_refused=True).test_backward(self.case)


def test_cases_are_made_for_what_a_backend_accepts():
    """What it refuses costs it no pair of what it accepts."""
    suite = no_thd(refuses=None)
    own, refused = suite.cases(), [case for case in suite.cases() if case.qkv_format == "thd"]
    assert [case.name for case in refused if case.name.startswith("pairs")] == [
        "pairs-without-qkv_format-thd",
        *(f"pairs-without-gaps-{level}" for level in ("between", "lead", "tail", "all")),
        "pairs-without-max_seqlen-extent",
        "pairs-without-offsets-strided",
    ]
    assert sum(case.qkv_format == "sbhd" for case in own) > sum(case.qkv_format == "sbhd" for case in cases())


class Noted(NoThd):
    """It notes what it is asked."""

    def __init__(self):
        super().__init__()
        self.asked = []

    @hookimpl
    def select_backend(self, request, platform):
        self.asked.append(request)
        return super().select_backend(request, platform)


def test_suites_of_one_backend_share_its_cases_unless_they_judge_for_themselves():
    backend = Noted()
    manager = manager_of(backend)

    def suite(**members):
        members = {"backend": "sample", "manager": manager, "refuses": None} | members
        return type("TestNoted", (BackendConformance,), members)()

    own = suite().cases()
    assert len(backend.asked) == len(set(backend.asked)) > 100
    backend.asked.clear()
    assert len(suite(quick=True).cases()) < len(suite(is_slow=True).cases()) < len(own)
    assert backend.asked == []
    assert suite(_manager=lambda self: manager).cases() == own
    assert len(backend.asked) > 100
    takes_all = suite(takes=lambda self, request: True).cases()
    assert [case.name for case in takes_all] == [case.name for case in cases()]


def test_the_selections_of_a_catalogue():
    @dataclasses.dataclass(frozen=True)
    class Stub:
        number: int
        cost: float = 1.0

    edges, others = (Stub(0), Stub(1, cost=6.0)), tuple(map(Stub, range(12)))
    catalogue = Catalogue(edges, others, others, others)
    assert len(catalogue.all()) == len(catalogue.selected(is_quick=False, is_slow=False)) == 38
    assert len(catalogue.selected(is_quick=False, is_slow=True)) == 2 + 12 + 3 + 3
    assert [case.number for case in catalogue.selected(is_quick=True, is_slow=False)] == [0, 0, 4, 8, 0, 6, 0, 6]


def test_every_pair_is_covered():
    """Of what matters most, by the cases' own tags."""
    features = ("thd", "sbhd", "bhsd", "window", "gqa", "return_lse", "bf16", "fp16", "causal_masks", "padding_masks")
    features += (
        "unequal_lengths",
        "deterministic",
        "scores_large",
        "some_gradients",
        "non_contiguous",
        "softmax_scale",
    )
    pairs = [case.tags for case in cases() if case.name.startswith("pairs")]
    exclusive = [{"thd", "sbhd"}, {"thd", "bhsd"}, {"sbhd", "bhsd"}, {"bf16", "fp16"}]
    for first in features:
        for second in features:
            assert {first, second} in exclusive or any({first, second} <= tags for tags in pairs), (first, second)
    for layout in ("bshd", "sbhd", "bhsd", "thd"):
        assert any({layout, "window", "gqa"} <= tags for tags in pairs)
    assert any({"window", "pad_between_seqs", "gqa"} <= tags for tags in pairs)
    assert any({"return_lse", "pad_between_seqs"} <= tags for tags in pairs)
    assert any({"bias", "window", "fp16"} <= tags for tags in pairs)


def test_a_seed_that_is_set_anew_is_seen_where_it_was_set_before():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    with pytest.raises(ConformanceError, match="random state of torch"), random_state_kept("cpu"):
        torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_seed_decides_the_data(capsys):
    drawn = []

    class Looks(NoThd):
        @hookimpl
        def forward(self, plan, tensors):
            drawn.append(tensors.q.clone())
            return super().forward(plan, tensors)

    for seed in (7, 7, None, None):
        no_thd(seed=seed, manager=manager_of(Looks())).test_forward(case_named("bshd-causal-bf16"))
    first, again, fresh, other = (drawn[run * len(drawn) // 4] for run in range(4))
    assert torch.equal(first, again)
    assert not torch.equal(fresh, other)
    printed = capsys.readouterr().out.split("\n")
    assert printed[:2] == ["seed = 7", "seed = 7"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_way_to_allocate_is_poisoned(dtype):
    like = torch.zeros(3, 2, dtype=dtype)
    with PoisonedMemory():
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
        with synchronisation_is_an_error(device_type):
            raise RuntimeError(f"mode {modes[-1]}")

    with pytest.raises(RuntimeError, match="mode warn"):
        wait_for("cpu")
    with pytest.raises(RuntimeError, match="mode error"):
        wait_for("cuda")
    assert modes == ["warn", "error", "warn"]


class TestBudget:
    exact = torch.randn(64, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    step = Roundings.of(torch.bfloat16).step

    def yardstick(self):
        return Yardstick(self.exact, 2 * self.step * self.exact.abs())

    def test_roundings_pass(self):
        check_error("out", self.exact.bfloat16(), self.yardstick())

    @pytest.mark.parametrize("factor", [0.995, 1.005])
    def test_a_factor_of_half_a_percent_is_seen(self, factor):
        with pytest.raises(ConformanceError, match="exact result times"):
            check_error("out", (self.exact * factor).bfloat16(), self.yardstick())

    def test_float32_may_be_off_everywhere_by_a_few_of_its_units(self):
        """As an approximate exp is; with tens of thousands of rows chance alone explains less than that."""
        check_error("out", (self.exact * (1 + 6e-7)).float(), Yardstick(self.exact, 4e-7 * self.exact.abs()))

    def test_a_log_sum_exp_may_be_cut_off_everywhere_by_little(self):
        """Hopper's matrix units leave lse off by 3e-6 in every row."""
        lse = 140 + self.exact
        expected = Yardstick(lse, 2e-6 * lse)
        check_lse((lse * (1 - 3e-6)).float(), expected)
        with pytest.raises(ConformanceError, match="root-mean-square"):
            check_lse((lse * (1 - 5e-6)).float(), expected)

    def test_rows_that_are_alike_are_rounded_alike(self):
        """One key outweighs all others, so that each row is nearly its value."""
        exact = 96.0625 - 2e-2 - 1e-4 * self.exact.abs().repeat(64, 1)
        yardstick = Yardstick(exact, Roundings.of(torch.float16).step * exact)
        check_error("out", exact.half(), yardstick)
        with pytest.raises(ConformanceError, match="roundings explain"):
            check_error("out", (exact * 1.001).half(), yardstick)

    def test_a_single_wrong_element_fails(self):
        got = self.exact.bfloat16()
        got[3, 5] += 0.5
        with pytest.raises(ConformanceError, match=r"of the element \(3, 5\)"):
            check_error("out", got, self.yardstick())

    def test_many_small_errors_fail(self):
        noise = torch.randn(64, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        with pytest.raises(ConformanceError, match="root-mean-square"):
            check_error("out", self.exact + 7 * self.step * self.exact.abs() * noise.clamp(-2, 2), self.yardstick())

    def test_where_nothing_may_be_wrong_nothing_is(self):
        zero = Yardstick(torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64))
        check_error("out", torch.zeros(3), zero)
        with pytest.raises(ConformanceError, match="must be exactly 0"):
            check_error("out", torch.tensor([0.0, 1e-30, 0.0]), zero)

    @pytest.mark.parametrize("unbounded", [math.nan, math.inf])
    def test_a_bound_that_nothing_exceeds_is_an_error(self, unbounded):
        exact, sigma = self.exact.clone(), self.yardstick().sigma
        for yardstick in (Yardstick(exact, sigma.clone()), Yardstick(exact.clone(), sigma)):
            (yardstick.sigma if yardstick.exact is exact else yardstick.exact)[1, 2] = unbounded
            with pytest.raises(ConformanceError, match="the suite's own mistake"):
                check_error("out", self.exact.bfloat16(), yardstick)

    def test_nothing_is_no_error(self):
        nothing = torch.zeros(0, dtype=torch.float64)
        check_error("out", nothing, Yardstick(nothing, nothing))


TEST_FILE = """
    from mla_plugin.conformance import BackendConformance, cases
    from tests.conformance.mutants import manager_of, module_of
    from tests.conformance.broken_attention import BROKEN

    class TestMine(BackendConformance):
        backend = "sample"
        manager = manager_of(module_of("plain_attention", {{fault.name: fault for fault in BROKEN}}.get("{fault}")))

        def cases(self):
            return cases("fp64")[:3]
"""


@pytest.mark.parametrize(("fault", "failed"), [("", 0), ("lse_base_two", 6), ("refuses_everything", 7)])
def test_a_test_file_of_another_package(pytester, fault, failed):
    pytester.makepyfile(TEST_FILE.format(fault=fault))
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", "test_forward or test_backward or something")
    result.assert_outcomes(passed=7 - failed, failed=failed, deselected=17)


class TestCommand:
    """``python -m mla_plugin.conformance`` is ``pytest --pyargs mla_plugin.conformance`` with other words."""

    def run(self, *arguments):
        command = [sys.executable, "-m", "mla_plugin.conformance", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def test_a_backend_that_refuses_everything_does_not_pass(self, tmp_path):
        done = self.run("cudnn", "--quick", "--json", str(tmp_path / "m.json"), "--markdown", str(tmp_path / "m.md"))
        assert done.returncode == 1, done.stdout
        assert "cudnn computed nothing, so it has not passed" in done.stdout
        assert re.search(r"attention +bshd +refused .* device_type='cpu', expected 'cuda'", done.stdout)
        found = json.loads((tmp_path / "m.json").read_text())
        assert found["features"]["attention bshd"]["outcome"] == "refused"
        assert "| attention | `bshd` | refused | 0 of" in (tmp_path / "m.md").read_text()

    def test_an_unknown_backend_is_answered_with_the_list(self):
        done = self.run("sdap")
        assert done.returncode != 0
        assert "no backend named 'sdap' is registered" in done.stdout + done.stderr


def test_the_plugin_reads_the_options_of_the_environment(pytester, monkeypatch):
    monkeypatch.setenv(
        "PYTEST_ADDOPTS", "--pyargs mla_plugin.conformance --backend sdpa --quick -k attention_is_answered"
    )
    done = pytester.runpytest_subprocess("-p", "mla_plugin_pytest")
    done.assert_outcomes(passed=1, deselected=done.parseoutcomes()["deselected"])


def test_the_cases_of_a_slow_backend_are_its_own():
    suite = no_thd(refuses=None)
    fast = suite.cases()
    type(suite).is_slow = True
    assert len(suite.cases()) < len(fast)


def test_the_plugin_adds_no_option_to_other_runs(pytester):
    pytester.makeconftest("def pytest_addoption(parser): parser.addoption('--backend'); parser.addoption('--device')")
    pytester.makepyfile("def test_it(): pass")
    result = pytester.runpytest_inprocess("-p", "mla_plugin_pytest", "--backend", "x", "--device", "y")
    result.assert_outcomes(passed=1)


def test_hook_wrappers_run():
    calls = []

    class Timer:
        @hookimpl(wrapper=True)
        def forward(self, plan, tensors):
            calls.append(plan.forward_backend)
            return (yield)

    manager = manager_of(module_of("plain_attention"))
    manager.register(Timer(), "timer")
    no_thd(manager=manager).test_forward(case_named("bshd-causal-bf16"))
    assert calls == ["sample"] * 3  # two calls, and one in the memory of the first


def test_the_backward_of_another_backend_runs():
    class ForwardOnly(NoThd):
        @hookimpl
        def select_backend(self, request, platform):
            return Accepted(backward_by="other")

        @hookimpl
        def backward(self, plan, residuals, dout, dlse):
            raise AssertionError("not mine")

    manager = manager_of(ForwardOnly())
    manager.register(module_of("plain_attention"), "other")
    no_thd(manager=manager).test_backward(case_named("bshd-causal-bf16"))


def test_decode_cases_are_the_requests_that_the_library_makes():
    for case in decode_cases():
        made = DecodeRequest.of(case.tensors("cpu", torch.Generator().manual_seed(0), 32.0))
        assert made == case.request("cpu"), case


def test_importing_it_loads_no_kernel_library():
    heavy = ("triton", "flashinfer", "flash_attn", "transformers", "transformer_engine", "pytest")
    code = f"import sys, mla_plugin.conformance; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
