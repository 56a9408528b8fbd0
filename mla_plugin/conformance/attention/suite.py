"""The suite that every backend must pass, ours and those of other packages alike; see docs/conformance.md."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.conformance import checks
from mla_plugin.conformance.attention.case import PADDING_POISON, Case
from mla_plugin.conformance.attention.cases import cases
from mla_plugin.device import platform
from mla_plugin.hooks.attention import AttentionOutput, Plan, Residuals
from mla_plugin.hooks.manager import BackendManager, get_manager
from mla_plugin.hooks.types import Accepted, Refused
from mla_plugin.reference import attention, attention_with_gradients

if TYPE_CHECKING:
    import pytest


class BackendConformance:
    """Subclass it in a test file, name the backend and what it refuses; pytest collects the rest.

    Attributes:
        backend: the name that the backend is registered under.
        device: device that the cases run on; a CUDA device also gets the large cases.
        refuses: what the backend is expected to refuse: from the name of a case, or tags that a case must all have,
            separated by blanks, to a text that one of the reasons contains. A case's tags are ``Case.tags`` and, for
            the request at hand, ``training`` or ``inference``. A refusal that is not expected fails, as does an
            expected one that does not come.
        manager: where the backend is registered; None for the process's manager.
        seed: seed of the random data; None for a fresh one in each test, which is printed.
        padding_poison: factor of padded rows of the inputs; NaN asks for more than the contract does.
    """

    backend: str = ""
    device: str = "cpu"
    refuses: Mapping[str, str] = MappingProxyType({})
    manager: BackendManager | None = None
    seed: int | None = None
    padding_poison: float = PADDING_POISON

    def cases(self) -> tuple[Case, ...]:
        """The cases to run; override it to add your own."""
        return cases() + (cases("large") if torch.device(self.device).type == "cuda" else ())

    def expected_refusals(self, case: Case, *, is_training: bool) -> tuple[str, ...]:
        """Texts that the backend's reasons contain when it must refuse the case; empty when it must accept it."""
        labels = _labels(case, is_training)
        return tuple(text for key, text in self.refuses.items() if labels.issuperset(key.split()))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test for each case."""
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.cases(), ids=str)

    def test_every_expected_refusal_names_a_case(self) -> None:
        """A key of ``refuses`` that fits no case is a misspelling, or left over."""
        labels = [_labels(case, is_training) for case in self.cases() for is_training in (False, True)]
        for key in self.refuses:
            if not any(found.issuperset(key.split()) for found in labels):
                checks.fail(f"refuses names {key!r}, which is neither a case nor tags that one case has together")

    def test_forward(self, case: Case) -> None:
        """Without a backward to follow: refuse with reasons, or compute out and lse."""
        plan = self._plan(case, is_training=False)
        if plan is None:
            return
        tensors = case.tensors(self.device, self._generator(), padding_poison=self.padding_poison)
        output = self._forward(plan, tensors)
        exact = attention(plan.request, tensors)
        low = attention(plan.request, tensors, compute_dtype=case.dtype)
        checks.check_output(case, _by_name(tensors), output, exact, low)

    def test_backward(self, case: Case) -> None:
        """With a backward to follow: refuse with reasons, or compute out, lse and the gradients.

        The backward runs on the forward's own out and lse, and on the oracle's, as if another backend had made them.
        """
        plan = self._plan(case, is_training=True)
        if plan is None:
            return
        generator = self._generator()
        tensors = case.tensors(self.device, generator, padding_poison=self.padding_poison)
        dout, dlse = case.cotangents(self.device, generator, padding_poison=self.padding_poison)
        exact, exact_gradients = attention_with_gradients(plan.request, tensors, dout, dlse)
        low, low_gradients = attention_with_gradients(plan.request, tensors, dout, dlse, compute_dtype=case.dtype)

        inputs = _by_name(tensors)
        output = checks.check_output(case, inputs, self._forward(plan, tensors), exact, low)
        anothers = AttentionOutput(exact.out.to(output.out.dtype), exact.lse.to(output.lse.dtype))
        for origin in (output, anothers):
            gradients = self._backward(plan, Residuals(tensors, origin.out, origin.lse), dout, dlse)
            rounding = checks.delta_rounding(case, exact.out, dout, tensors.softmax_scale)
            checks.check_gradients(case, inputs, gradients, exact.lse, exact_gradients, low_gradients, rounding)
        if case.deterministic:
            checks.check_equal_bits(output, self._forward(plan, tensors))
            again = self._backward(plan, Residuals(tensors, anothers.out, anothers.lse), dout, dlse)
            checks.check_equal_bits(gradients, again)

    def _plan(self, case: Case, *, is_training: bool) -> Plan | None:
        """A plan for the case, or None after a refusal that was expected."""
        request = case.request(self.device, is_training=is_training)
        expected = self.expected_refusals(case, is_training=is_training)
        plan = Plan(request, platform(request.device_type, request.device_index), self.backend, self.backend)
        decision = self._decide(plan)
        if isinstance(decision, Accepted):
            if expected:
                checks.fail(f"{self.backend} accepts {case}, but is expected to refuse it with {expected}")
            return Plan(request, plan.platform, self.backend, decision.backward_by or self.backend)
        checks.check_reasons(decision.reasons)
        if not expected:
            checks.fail(
                f"{self.backend} refuses {case}, which it is expected to compute: {'; '.join(decision.reasons)}. "
                f"If that is meant, add to refuses the case or one of its tags: {', '.join(sorted(case.tags))}"
            )
        for text in expected:
            if not any(text in reason for reason in decision.reasons):
                checks.fail(f"{self.backend} refuses {case}, but {text!r} is in none of its reasons {decision.reasons}")
        return None

    def _decide(self, plan: Plan) -> Accepted | Refused:
        select_backend = self._manager().caller("select_backend", self.backend)
        answers = select_backend(request=plan.request, platform=plan.platform)
        if len(answers) != 1 or not isinstance(answers[0], Accepted | Refused):
            checks.fail(f"select_backend returns Accepted or Refused, not {answers[0] if answers else None!r}")
        if select_backend(request=plan.request, platform=plan.platform) != answers:
            checks.fail("select_backend gives two answers to one request; the answer is cached, so it must not change")
        decision: Accepted | Refused = answers[0]
        return decision

    def _forward(self, plan: Plan, tensors: AttentionTensors) -> Any:
        return self._run("forward", plan.forward_backend, _by_name(tensors), plan=plan, tensors=tensors)

    def _backward(self, plan: Plan, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None) -> Any:
        inputs = _by_name(residuals.tensors) | {"out": residuals.out, "lse": residuals.lse, "dout": dout}
        if dlse is not None:
            inputs["dlse"] = dlse
        return self._run(
            "backward", plan.backward_backend, inputs, plan=plan, residuals=residuals, dout=dout, dlse=dlse
        )

    def _run(self, hook: str, backend: str, inputs: Mapping[str, torch.Tensor], **arguments: Any) -> Any:
        """Call a hook as the library does, outside autograd, and watch what it does to memory and to the host."""
        run = self._manager().caller(hook, backend)
        device_type = torch.device(self.device).type
        with (
            torch.no_grad(),
            checks.unmodified(inputs),
            checks.synchronisation_is_an_error(device_type),
            checks.PoisonedMemory(),  # type: ignore[no-untyped-call]
        ):
            return run(**arguments)

    def _manager(self) -> BackendManager:
        return get_manager() if self.manager is None else self.manager

    def _generator(self) -> torch.Generator:
        seed = secrets.randbits(31) if self.seed is None else self.seed
        print(f"seed = {seed}")  # pytest shows it when the test fails
        return torch.Generator().manual_seed(seed)


def _by_name(tensors: AttentionTensors) -> dict[str, torch.Tensor]:
    return {name: x for name, x in vars(tensors).items() if isinstance(x, torch.Tensor)}


def _labels(case: Case, is_training: bool) -> frozenset[str]:
    return case.tags | {case.name, "training" if is_training else "inference"}
