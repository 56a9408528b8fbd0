"""The suite asks for batch_invariant, and sees a backend that accepts it and does not keep it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_plugin import Accepted, DecodeOutput, DecodeRequest, Refused, hookimpl
from mla_plugin.conformance import BackendConformance, ConformanceError, DecodeConformance
from mla_plugin.hooks.attention import AttentionOutput
from tests.conformance.mutants import manager_of, module_of


class Dependent:
    """Correct, but for a grain that ``size`` of the call decides; None keeps the bits."""

    def __init__(self, size: Any, *, says_why: bool = True) -> None:
        self.size, self.says_why = size, says_why
        self.attention, self.decode = (module_of(name, EXACT=None) for name in ("plain_attention", "plain_decode"))

    @hookimpl
    def select_backend(self, request: Any, platform: Any) -> Accepted | Refused:
        if not self.says_why and request.batch_invariant:
            return Refused(("it does not take this",))
        return Accepted()

    @hookimpl
    def forward(self, plan: Any, tensors: Any) -> Any:
        is_decode = isinstance(plan.request, DecodeRequest)
        found = (self.decode if is_decode else self.attention).forward(plan, tensors)
        grain = self.size(tensors) * 2.0**-6
        if is_decode:
            return DecodeOutput(found.out + grain, found.lse)
        return AttentionOutput(found.out + grain, found.lse)


class Exact(Dependent):
    """In float64 and rounded: its own bits do not depend on the batch."""

    def __init__(self, size: Any) -> None:
        super().__init__(size)
        self.attention = module_of("plain_attention", EXACT=torch.float64, WEIGHTS=torch.float64)


def decode_suite(backend: Any) -> Any:
    class Given(DecodeConformance):
        manager = manager_of(backend)
        quick = True

        def cases(self) -> Any:
            return tuple(replace(case, rank=16, rope=8, num_heads=2) for case in super().cases())

    given = Given()
    given.backend = "sample"
    return given


def attention_suite(backend: Any) -> Any:
    class Given(BackendConformance):
        manager = manager_of(backend)
        quick = True

    given = Given()
    given.backend = "sample"
    return given


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (lambda t: 0, None),
        (lambda t: t.q_nope_abs.shape[0], "query 0 of sequence 0 has other bits alone"),
        (lambda t: t.q_nope_abs.shape[1], "has other bits alone"),
        (lambda t: 0 if t.page_table is None else t.page_table.shape[1], "has other bits alone"),
        (lambda t: t.seqlens_kv[0], "has other bits alone"),
    ],
)
def test_decode(size: Any, message: str | None) -> None:
    suite = decode_suite(Dependent(size))
    if message is None:
        suite.test_batch_invariance()
        return
    with pytest.raises(ConformanceError, match=message):
        suite.test_batch_invariance()


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (lambda t: t.k.shape[1], "out of queries 0 to 1: .* have other bits than in the prefill of the whole batch"),
        (lambda t: t.q.shape[1] if t.q.dim() == 4 else 0, "out of queries 0 to 1"),
        (lambda t: t.q.shape[0] if t.q.dim() == 4 and t.q.shape[1] == 190 else 2, "out of sequence 0"),
        (lambda t: t.q.dim() if t.q.dim() == 3 else 0, "out of packed sequences"),
    ],
)
def test_attention(size: Any, message: str) -> None:
    with pytest.raises(ConformanceError, match=message):
        attention_suite(Exact(size)).test_batch_invariance()


def test_attention_that_keeps_the_bits() -> None:
    attention_suite(Exact(lambda t: 0)).test_batch_invariance()


@pytest.mark.parametrize("suite", [decode_suite, attention_suite])
def test_a_refusal_names_it(suite: Any) -> None:
    with pytest.raises(ConformanceError, match="refuses batch_invariant=True without naming it"):
        suite(Dependent(lambda t: 0, says_why=False)).test_batch_invariance()
