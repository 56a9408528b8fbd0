"""The suite that every backend must pass, ours and those of other packages alike; see docs/conformance.md."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mla_plugin.conformance import checks, spoilt
from mla_plugin.conformance.attention import beyond, chunks, drawn, dropout, library, many, mixed, special, values
from mla_plugin.conformance.attention.call import Call, Hooks
from mla_plugin.conformance.attention.case import Case
from mla_plugin.conformance.attention.cases import cases, catalogue_for, whole_catalogue
from mla_plugin.conformance.base import Suite
from mla_plugin.conformance.budget import Yardstick
from mla_plugin.conformance.memory import check_memory, not_run_without_memory
from mla_plugin.conformance.watch import Kept
from mla_plugin.hooks.attention import AttentionOutput, Plan
from mla_plugin.hooks.types import Accepted

if TYPE_CHECKING:
    import pytest


class BackendConformance(Suite):
    """Subclass it in a test file, name the backend and what it refuses; pytest collects the rest.

    Attributes:
        backend: the name that the backend is registered under.
        device: device that the cases run on; a CUDA device also gets the large cases.
        refuses: what the backend is expected to refuse: from the name of a case, or tags that a case must all have,
            separated by blanks, to a text that one of the reasons contains. A case's tags are ``Case.tags`` and, for
            the request at hand, ``training`` or ``inference``. A refusal that is not expected fails, as does an
            expected one that does not come. None expects nothing: every refusal with reasons passes.
        manager: where the backend is registered; None for the process's manager.
        seed: seed of the random data; None for a fresh one in each test, which is printed.
        padding_poison: factor of padded rows of the inputs; NaN asks for more than the contract does.
        quick: run a selection of the cases that takes less than a minute on a CPU.
        is_slow: for emulations and interpreters: one case in four makes the second call and the library's.
    """

    def cases(self) -> tuple[Case, ...]:
        """The cases to run, made for what the backend accepts; override it to add your own."""
        made = self._once(lambda: catalogue_for(self._accepts), whole_catalogue)
        small = made.selected(is_quick=self.quick, is_slow=self.is_slow)
        return small + (cases("large") if torch.device(self.device).type == "cuda" and not self.quick else ())

    def _accepts(self, case: Case) -> bool:
        """Whether the backend takes the case, without any check of its answer."""
        return any(self.takes(case.request(self.device, is_training=way)) for way in (True, False))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test for each case."""
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.cases(), ids=str)

    def test_every_expected_refusal_names_a_case(self) -> None:
        """A key of ``refuses`` that fits no case is a misspelling, or left over."""
        ways = ({"training"}, {"training", "partial"}, {"inference"})
        self.check_keys([case.tags | {case.name} | way for case in self.cases() for way in ways])

    def test_something_is_computed(self) -> None:
        """A backend that refuses every case has shown nothing."""
        given = self.cases()
        if self.refuses is not None and not any(map(self._accepts, given)):
            checks.fail(f"{self.backend} refuses all {len(given)} cases, so nothing of it was tested")

    def test_forward(self, case: Case) -> None:
        """Without a backward to follow: refuse with reasons, or compute out and lse, for other data too.

        They lie elsewhere, and then in the first call's memory; its results are kept while the next ones run. The last
        time one query has NaN, unless the request is deterministic. All share ``AttentionTensors.kept``, because they
        differ in values and addresses alone.
        """
        plan = self._plan(case, is_training=False)
        if plan is None:
            return
        hooks, generator = replace(self._hooks(), kept={}), self._generator()
        calls = self._two_calls(case, replace(case.other(), softmax_scale=case.softmax_scale), plan, generator)
        first = hooks.forward(plan, calls[0])
        kept = Kept("of one call", **_results(first))
        outputs = [first]
        if self._repeats(case.name):
            outputs.append(hooks.forward(plan, calls[1], is_poisoned=False))
        kept.check()
        for call, output in zip(calls, outputs, strict=False):
            checks.check_output(call.case, call.inputs, output, call.expected())
        again = calls[1].in_memory_of(calls[0]) if len(outputs) == 2 else None
        if again is not None:
            self._check_spoilt(hooks, plan, again, calls[1].expected(), generator)
            kept.check()
        if case.deterministic:
            last = calls[0] if again is None else again
            checks.check_equal_bits(hooks.forward(plan, last), hooks.forward(plan, last))
        self._check_decision_again(plan)

    def test_backward(self, case: Case) -> None:
        """With a backward to follow: refuse with reasons, or compute out, lse and the gradients.

        The backward runs on the forward's own out and lse, and for a second call on the same numbers with other
        strides, as another backend's forward leaves them. Of the same request with ``partial=True``, which may be
        refused (tag ``partial``), it runs on those that context parallelism would give it: over more keys than it sees.
        """
        plan = self._plan(case, is_training=True)
        if plan is None:
            return
        hooks, generator = self._hooks(), self._generator()
        first, second = self._two_calls(case, case.other(), plan, generator)
        output = checks.check_output(case, first.inputs, hooks.forward(plan, first), first.expected())
        kept_output = Kept("of one call", **vars(output))
        runs: list[tuple[Call, AttentionOutput, AttentionOutput | None]] = []
        if self._repeats(case.name):
            result = hooks.forward(plan, second, is_poisoned=False)
            result = checks.check_output(second.case, second.inputs, result, second.expected())
            result = second.as_of_another(result, generator)
            runs.append((second.without_dlse(), result, None))  # autograd gives None where lse is not used
        kept_output.check()
        kept = []
        runs.append((first, output, None))
        last: tuple[Plan, Call, AttentionOutput] = (plan, first, output)
        if (partial_plan := self._partial_plan(case, plan)) is not None:
            if case.return_lse:  # outputs over some of the keys are merged by it
                result = hooks.forward(partial_plan, first, is_poisoned=False)
                checks.check_output(case, first.inputs, result, first.expected())
            last = (partial_plan, *first.partial(generator))
            runs.append((last[1], last[2], last[2]))
        for call, residuals, others in runs:
            asked = plan if others is None else last[0]
            gradients = hooks.backward(asked, call, residuals, is_poisoned=call is first and others is None)
            checks.check_gradients(
                call.case,
                {**call.inputs, "out": residuals.out, "lse": residuals.lse, "dout": call.dout, "dlse": call.dlse},
                gradients,
                call.expected()[1].exact,
                call.expected_gradients(others),
            )
            kept.append(Kept("of one call", **vars(gradients)))
        for results in (kept_output, *kept):
            results.check()
        if case.deterministic:
            for _ in range(2):  # a fault may come at every second call
                checks.check_equal_bits(output, hooks.forward(plan, first))
                checks.check_equal_bits(gradients, hooks.backward(*last))
        if self._repeats(case.name):
            if self._goes_through_the_library():
                library.check(self, plan, first)
            self._check_in_the_same_memory(plan, first, second)
        self._check_decision_again(plan)

    def _check_spoilt(
        self, hooks: Hooks, plan: Plan, call: Call, expected: tuple[Yardstick, Yardstick], generator: torch.Generator
    ) -> None:
        """The forward of a call one of whose queries gets NaN, if that is possible."""
        layout, place = plan.request.layout, None
        if not call.case.deterministic:
            place = spoilt.spoil(call.tensors.q, expected[1].exact, layout, generator)
        output = hooks.forward(plan, call)
        if place is not None:
            spoilt.repair(place, output.out, output.lse, expected, layout)
        checks.check_output(call.case, call.inputs, output, expected)

    def _two_calls(self, case: Case, other: Case, plan: Plan, generator: torch.Generator) -> tuple[Call, Call]:
        """Two calls of one request with different data; only the first one's tensors lie between guards."""
        first, second = (
            Call.of(x, plan.request, self.device, generator, self.padding_poison, is_guarded=x is case)
            for x in (case, other)
        )
        return first, second

    def _check_in_the_same_memory(self, plan: Plan, first: Call, second: Call) -> None:
        """The second call's data where the first one's was, as the next step of a training has it.

        Of a call whose lse is used ``dout`` is 0, as if nothing else were.
        """
        if second.dlse is not None:
            second = replace(second, dout=torch.zeros_like(second.dout))
        call = second.in_memory_of(first)
        if call is None:
            return
        output = self._hooks().forward(plan, call)
        gradients = self._hooks().backward(plan, call, output)
        lse, expected = second.expected()[1].exact, second.expected_gradients()
        checks.check_gradients(call.case, call.inputs, gradients, lse, expected)

    def test_unusual_values(self) -> None:
        """Zeros, gradients that are tiny or large, scores far below zero, NaN, an infinite gradient of lse."""
        values.check_values(self)

    def test_residuals_of_another_backend(self) -> None:
        """The backward of a forward that ran elsewhere."""
        values.check_backward_alone(self)

    def test_surroundings(self) -> None:
        """Other settings of PyTorch, another thread, inference mode; memory is given back."""
        values.check_surroundings(self)

    def test_unlike_calls(self) -> None:
        """Calls of other sizes, layouts and dtypes between a forward and its backward, and after them."""
        values.check_unlike_calls(self)

    def test_at_the_same_time(self) -> None:
        """Two threads that compute the same kind of call."""
        if not self.is_slow:
            values.check_at_the_same_time(self)

    def test_sizes_beside_features(self) -> None:
        """Long, wide and many beside everything else, each once."""
        mixed.check(self)

    def test_every_size(self) -> None:
        """One call of each width and of each number of heads, sequences and tokens, beside options of this run."""
        if not self.is_slow:
            values.check_every_size(self)

    def test_drawn_calls(self) -> None:
        """Sizes and options of this run alone; what the backend refuses is drawn again."""
        drawn.check_drawn_calls(self)

    def test_compiled(self) -> None:
        """A call through ``torch.compile``; one of each layout where the command line names the backend."""
        if self._goes_through_the_library() and not self.is_slow:
            special.check_compiled(self, most=1 if self.refuses is not None else 4)

    def test_dropout(self) -> None:
        """Dropout is refused, or drops as many weights as asked for, by the seed, in both passes alike."""
        dropout.check_dropout(self)

    def test_batch_invariance(self) -> None:
        """Asked for ``batch_invariant``, refuse, or give chunks of a prefill the bits of one prefill."""
        chunks.check_batch_invariance(self)

    def test_what_no_tensors_go_with_is_refused(self) -> None:
        """Requests that say more than a hook is given tensors for cannot be computed, so they are refused."""
        special.check_hopeless(self)

    def test_cuda(self) -> None:
        """On a CUDA device: a second stream, a graph that is replayed."""
        if torch.device(self.device).type == "cuda":
            special.check_cuda(self)

    def test_second_device(self) -> None:
        """Tensors on a second CUDA device while the first is the current one; skipped where there is one device."""
        if torch.device(self.device).type == "cuda":
            special.check_second_device(self)

    def test_more_than_two_billion_elements(self) -> None:
        """With 48 GiB of free memory q and k beyond what 32 bits count; on a CPU, with 8, their strides."""
        if self.quick:
            return
        if torch.device(self.device).type == "cuda":
            check_memory(self.device)
            with not_run_without_memory():
                beyond.check(self)
            torch.cuda.empty_cache()  # other processes may share the device
        elif not self.is_slow:
            check_memory(self.device, 8 << 30)
            beyond.check_far_sequences(self)

    def test_many_sequences(self) -> None:
        """Thousands of sequences in one call."""
        if not self.quick and not self.is_slow:
            many.check_many_sequences(self)

    def plain_cases(self) -> list[Case]:
        """Accepted cases, at most one of each layout, as plain as there are: without a mask or a bias if possible."""

        def not_plain(case: Case) -> tuple[bool, int, str]:
            return bool({"arbitrary", "bias"} & case.tags), len(case.tags), case.name

        found: dict[str, Case] = {}
        for case in sorted(self.cases(), key=not_plain):
            if (
                case.qkv_format not in found
                and not {"large", "no_tokens", "dropout"} & case.tags
                and self._accepts(case)
            ):
                found[case.qkv_format] = case
        return list(found.values())

    def plan_of(self, case: Case, *, is_training: bool | None = None) -> Plan | None:
        """A plan for a case, or None where it is refused, whether expected or not.

        ``is_training`` None: for training, or for inference where training is refused.
        """
        for way in (True, False) if is_training is None else (is_training,):
            request = case.request(self.device, is_training=way)
            decision = self._answer(request)
            if isinstance(decision, Accepted):
                return Plan(request, self.platform(), self.backend, decision.backward_by or self.backend)
        return None

    def hooks(self) -> Hooks:
        """The backend's hooks, called as the library calls them and watched."""
        return self._hooks()

    def _hooks(self) -> Hooks:
        return Hooks(self._manager(), torch.device(self.device).type)

    def _plan(self, case: Case, *, is_training: bool) -> Plan | None:
        """A plan for the case, or None after a refusal that was expected."""
        request = case.request(self.device, is_training=is_training)
        labels = case.tags | {case.name, "training" if is_training else "inference"}
        decision = self.decide(request, str(case), labels)
        if decision is None:
            return None
        return Plan(request, self.platform(), self.backend, decision.backward_by or self.backend)

    def _partial_plan(self, case: Case, plan: Plan) -> Plan | None:
        """A plan for the request over some of the keys that its queries see, or None after a refusal."""
        of_all, request = self.decision, plan.request.replace(partial=True)
        labels = case.tags | {case.name, "training", "partial"}
        decision = self.decide(request, f"{case} with partial=True", labels)
        self.decision = of_all
        if decision is None:
            return None
        return Plan(request, plan.platform, self.backend, decision.backward_by or self.backend)

    def expected_refusals(self, case: Case, *, is_training: bool) -> tuple[str, ...]:
        """Texts that the backend's reasons contain when it must refuse the case; empty when it must accept it."""
        return self.expected(case.tags | {case.name, "training" if is_training else "inference"})

    def _check_decision_again(self, plan: Plan) -> None:
        if not isinstance(self._answer(plan.request), Accepted):
            checks.fail(
                "select_backend answers a request differently after the call; the answer is cached and must not change"
            )


def _results(output: Any) -> dict[str, Any]:
    return vars(output) if hasattr(output, "__dict__") else {}
