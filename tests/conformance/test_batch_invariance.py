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
    """In float64 and rounded, so that its own bits do not depend on the batch, and a grain that ``size`` decides."""

    def __init__(self, size: Any, *, says_why: bool = True) -> None:
        self.size, self.says_why = size, says_why
        self.attention, self.decode = (
            module_of(name, EXACT=torch.float64, WEIGHTS=torch.float64) for name in ("plain_attention", "plain_decode")
        )

    @hookimpl
    def select_backend(self, request: Any, platform: Any) -> Accepted | Refused:
        if not self.says_why and request.batch_invariant:
            return Refused(("it does not take this",))
        if request.batch_invariant and request.dtype == torch.float64:
            return Refused(("batch_invariant=True in dtype=torch.float64, which nothing rounds",))
        return Accepted()

    @hookimpl
    def forward(self, plan: Any, tensors: Any) -> Any:
        is_decode = isinstance(plan.request, DecodeRequest)
        found = (self.decode if is_decode else self.attention).forward(plan, tensors)
        grain = self.size(tensors) * 2.0**-6
        if is_decode:
            return DecodeOutput(found.out + grain, found.lse)
        return AttentionOutput(found.out + grain, found.lse)


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


def batch_of(condition: Any) -> Any:
    """The size of the batch where the condition holds, and else nothing."""
    return lambda t: t.q_nope_abs.shape[0] * int(condition(t))


DECODE = {
    "batch": batch_of(lambda t: True),
    "queries": lambda t: t.q_nope_abs.shape[1],
    "page_table": lambda t: 0 if t.page_table is None else t.page_table.shape[1],
    "first_length": lambda t: t.seqlens_kv[0],
    "longest": lambda t: t.seqlens_kv.max(),
    "place_in_the_batch": lambda t: (torch.arange(len(t.q_nope_abs)) % 2).view(-1, 1, 1, 1),
    "rows_of_the_cache": lambda t: 0 if t.page_table is not None else t.c_kv.shape[1],
    "fp16": batch_of(lambda t: t.c_kv.dtype == torch.float16),
    "left_padding": batch_of(lambda t: t.leftpad_kv is not None),
    "all_keys": batch_of(lambda t: not t.causal and t.q_nope_abs.shape[1] > 1),
    "pages_but_of_64": batch_of(lambda t: t.page_table is not None and t.c_kv.shape[1] != 64),
    "without_lse": batch_of(lambda t: not t.return_lse),
    "several_queries": lambda t: max(0, t.q_nope_abs.shape[1] - 2),
}


@pytest.mark.parametrize("size", DECODE.values(), ids=DECODE)
def test_decode(size: Any) -> None:
    with pytest.raises(ConformanceError, match=r"of query \d of sequence \d has other bits alone"):
        decode_suite(Dependent(size)).test_batch_invariance()


PREFILL = {
    "more_than_256_keys": (lambda t: t.q.dim() == 4 and t.k.shape[1] > 256, "out of (queries|sequence) 0"),
    "keys": (lambda t: t.k.shape[1], "out of queries 0 to 1 .* have other bits than in the prefill of the whole batch"),
    "queries": (lambda t: t.q.shape[1] if t.q.dim() == 4 else 0, "out of queries 0 to 1"),
    "batch": (lambda t: t.q.shape[0] if t.q.dim() == 4 and t.q.shape[1] == 190 else 2, "out of sequence 0"),
    "more_than_4_sequences": (lambda t: t.q.dim() == 4 and len(t.q) > 4, "out of (sequence|queries) 0"),
    "packed": (lambda t: t.q.dim() if t.q.dim() == 3 else 0, "out of packed sequences"),
    "packed_tokens": (lambda t: t.q.dim() == 3 and len(t.q) != 380, "out of packed sequences"),
    "packed_longest": (lambda t: t.q.dim() == 3 and t.cu_seqlens_q.diff().max() != 190, "out of packed sequences"),
    "fp16": (lambda t: t.k.shape[1] if t.q.dtype == torch.float16 else 0, "have other bits"),
    "gqa": (lambda t: t.k.shape[1] if t.q.shape[-2] != t.k.shape[-2] else 0, "have other bits"),
    "narrow_heads": (lambda t: t.k.shape[1] if t.q.shape[-1] == 64 else 0, "out of queries 0 to 1"),
}


@pytest.mark.parametrize(("size", "message"), PREFILL.values(), ids=PREFILL)
def test_attention(size: Any, message: str) -> None:
    with pytest.raises(ConformanceError, match=message):
        attention_suite(Dependent(lambda t: int(size(t)))).test_batch_invariance()


@pytest.mark.parametrize("suite", [decode_suite, attention_suite])
def test_the_bits_are_kept(suite: Any) -> None:
    suite(Dependent(lambda t: 0)).test_batch_invariance()


@pytest.mark.parametrize("suite", [decode_suite, attention_suite])
def test_a_refusal_names_it(suite: Any) -> None:
    with pytest.raises(ConformanceError, match="refuses batch_invariant=True without naming it"):
        suite(Dependent(lambda t: 0, says_why=False)).test_batch_invariance()
