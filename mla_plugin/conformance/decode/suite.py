"""The suite that every backend must pass that computes decode; see docs/conformance.md."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from mla_plugin import reference
from mla_plugin.arguments.decode import DecodeLengths, DecodeTensors
from mla_plugin.conformance import checks
from mla_plugin.conformance.attention.case import PADDING_POISON
from mla_plugin.conformance.decode.case import DecodeCase
from mla_plugin.conformance.decode.cases import decode_cases
from mla_plugin.device import platform
from mla_plugin.hooks.decode import DecodeOutput, DecodePlan
from mla_plugin.hooks.manager import BackendManager, get_manager
from mla_plugin.hooks.types import Accepted, Platform, Refused

if TYPE_CHECKING:
    import pytest


class DecodeConformance:
    """Subclass it in a test file, name the backend and what it refuses; pytest collects the rest.

    The attributes are those of ``BackendConformance``; the tags that ``refuses`` may name are ``DecodeCase.tags``.
    """

    backend: str = ""
    device: str = "cpu"
    refuses: Mapping[str, str] = MappingProxyType({})
    manager: BackendManager | None = None
    seed: int | None = None
    padding_poison: float = PADDING_POISON

    def cases(self) -> tuple[DecodeCase, ...]:
        """The cases to run; override it to add your own."""
        return decode_cases() + (decode_cases(large=True) if torch.device(self.device).type == "cuda" else ())

    def platform(self) -> Platform:
        """The platform that requests are judged for; override it where the backend's library is replaced in a test."""
        device = torch.device(self.device)
        return platform(device.type, device.index)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test for each case."""
        if "decode_case" in metafunc.fixturenames:
            metafunc.parametrize("decode_case", self.cases(), ids=str)

    def test_every_expected_refusal_names_a_case(self) -> None:
        """A key of ``refuses`` that fits no case is a misspelling, or left over."""
        labels = [case.tags | {case.name} for case in self.cases()]
        for key in self.refuses:
            if not any(found.issuperset(key.split()) for found in labels):
                checks.fail(f"refuses names {key!r}, which is neither a case nor tags that one case has together")

    def test_decode(self, decode_case: DecodeCase) -> None:
        """Refuse with reasons, or compute out and lse; a second call gives the same bits, and a CUDA graph follows."""
        plan = self._plan(decode_case)
        if plan is None:
            return
        tensors = decode_case.tensors(self.device, self._generator(), self.padding_poison)
        exact = reference.decode(tensors)
        low = reference.decode(tensors, compute_dtype=decode_case.dtype)
        output = self._forward(plan, tensors)
        _check_output(decode_case, output, exact, low)
        again = self._forward(plan, tensors)
        if not torch.equal(output.out, again.out):
            checks.fail("out differs between two calls with the same tensors")
        if torch.device(self.device).type == "cuda" and decode_case.has_seqlens_kv:
            self._check_captured_graph(plan, decode_case, tensors)

    def _check_captured_graph(self, plan: DecodePlan, decode_case: DecodeCase, tensors: DecodeTensors) -> None:
        """A CUDA graph of a call, replayed with other lengths, pages and numbers in the same memory."""
        generator = self._generator()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self._run(plan, tensors)
        lengths = [torch.randint(0, decode_case.capacity + 1, (1,), generator=generator).item() for _ in tensors[0]]
        for values in (lengths, decode_case.lengths):
            other = _with_lengths(decode_case, tuple(int(value) for value in values))
            _copy(tensors, other.tensors(self.device, generator, self.padding_poison))
            graph.replay()
            exact = reference.decode(tensors)
            low = reference.decode(tensors, compute_dtype=decode_case.dtype)
            _check_output(other, output, exact, low)

    def _plan(self, case: DecodeCase) -> DecodePlan | None:
        """A plan for the case, or None after a refusal that was expected."""
        expected = tuple(text for key, text in self.refuses.items() if _has(case, key))
        request, found = case.request(self.device), self.platform()
        answers = self._manager().caller("select_backend", self.backend)(request=request, platform=found)
        decision = answers[0] if len(answers) == 1 else None
        if isinstance(decision, Accepted):
            if expected:
                checks.fail(f"{self.backend} accepts {case}, but is expected to refuse it with {expected}")
            return DecodePlan(request, found, self.backend)
        if not isinstance(decision, Refused):
            checks.fail(f"select_backend returns Accepted or Refused, not {decision!r}")
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

    def _forward(self, plan: DecodePlan, tensors: DecodeTensors) -> DecodeOutput:
        """Call the hook and watch what it does to memory and, once it has planned, to the host."""
        inputs = {name: x for name, x in tensors._asdict().items() if isinstance(x, torch.Tensor)}
        self._run(plan, tensors)
        with (
            torch.no_grad(),
            checks.unmodified(inputs),
            checks.synchronisation_is_an_error(torch.device(self.device).type),
            checks.PoisonedMemory(),  # type: ignore[no-untyped-call]
        ):
            return self._run(plan, tensors)

    def _run(self, plan: DecodePlan, tensors: DecodeTensors) -> DecodeOutput:
        output = self._manager().caller("forward", self.backend)(plan=plan, tensors=tensors)
        if not isinstance(output, DecodeOutput):
            checks.fail(f"forward returns a DecodeOutput for DecodeTensors, not {type(output).__name__}")
        return output

    def _manager(self) -> BackendManager:
        return get_manager() if self.manager is None else self.manager

    def _generator(self) -> torch.Generator:
        seed = secrets.randbits(31) if self.seed is None else self.seed
        print(f"seed = {seed}")  # pytest shows it when the test fails
        return torch.Generator().manual_seed(seed)


def _has(case: DecodeCase, key: str) -> bool:
    return (case.tags | {case.name}).issuperset(key.split())


def _with_lengths(case: DecodeCase, lengths: tuple[int, ...]) -> DecodeCase:
    """The case with other lengths in a cache of the same size."""
    values = {name: getattr(case, name) for name in case.__dataclass_fields__}
    return DecodeCase(**(values | {"lengths": lengths, "rows": case.capacity}))


def _copy(target: DecodeTensors, source: DecodeTensors) -> None:
    """New contents for the same memory; lengths that the host holds are updated last, as a plan takes all the rest."""
    for name, x in source._asdict().items():
        if isinstance(x, torch.Tensor) and (name != "seqlens_kv" or target.lengths is None):
            getattr(target, name).copy_(x)
    if isinstance(target.lengths, DecodeLengths) and source.lengths is not None:
        target.lengths.update(source.lengths.host)


def _check_output(case: DecodeCase, output: DecodeOutput, exact: DecodeOutput, low: DecodeOutput) -> None:
    """Shapes and dtypes, zeros and -inf where no key is seen, errors in budget."""
    assert exact.lse is not None
    assert low.lse is not None
    sees_no_key = exact.lse.isneginf()
    rows = sees_no_key.transpose(1, 2)[..., None]
    finite_lse = exact.lse.masked_fill(sees_no_key, 0)
    magnitude = checks.magnitude_of(exact.out) * checks.magnitude_of(finite_lse)
    checks.check_tensor("out", output.out, exact.out, case.dtype)
    checks.check_zero("out", output.out, rows)
    checks.check_error(case, "out", output.out, exact.out, low.out, magnitude)
    if not case.return_lse:
        return
    lse_dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    checks.check_tensor("lse", output.lse, exact.lse, lse_dtype)
    assert output.lse is not None
    if not torch.equal(output.lse.isneginf(), sees_no_key):
        checks.fail("lse must be -inf exactly for the queries that see no key")
    lse, low_lse = (x.masked_fill(sees_no_key, 0) for x in (output.lse, low.lse))
    checks.check_error(case, "lse", lse, finite_lse, low_lse, checks.magnitude_of(finite_lse))
