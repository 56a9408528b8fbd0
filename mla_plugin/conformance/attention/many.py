"""Thousands of sequences in one call: a few of them over and over, so that what each must give is computed once.

Schedulers hold a table of sequences, or count programs in a type, that such a batch overflows. The few are an odd
number, so that one sequence never stands for another a power of two behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mla_plugin.arguments.layout import lse_dtype
from mla_plugin.conformance import checks
from mla_plugin.conformance.attention.call import Call
from mla_plugin.conformance.attention.case import Case
from mla_plugin.conformance.attention.special import call_of, step
from mla_plugin.hooks.attention import AttentionOutput, Gradients, Plan

if TYPE_CHECKING:
    from mla_plugin.conformance.attention.suite import BackendConformance

LENGTHS_Q, LENGTHS_KV = (1, 2, 0, 1, 2, 1, 1), (2, 1, 3, 3, 2, 0, 1)
SIZES = ((630, 16),)
"""How often the few are repeated, and heads: 4,410 sequences, which times the heads are 70,560."""
SIZES_ON_A_GPU = (*SIZES, (9_500, 1))
"""66,500 sequences alone too: more than the second or third dimension of a grid holds."""


def check_many_sequences(suite: BackendConformance) -> None:
    """Both passes of calls in the plainest dense layout, and in the plainest packed one.

    Sequences have one length where the backend takes no others.
    """
    for times, heads in sizes_on(suite.device):
        check_size(suite, times, heads)


def sizes_on(device: str) -> tuple[tuple[int, int], ...]:
    """How often the few are repeated, with how many heads."""
    return SIZES_ON_A_GPU if torch.device(device).type == "cuda" else SIZES


def check_size(suite: BackendConformance, times: int, heads: int) -> None:
    """The few, repeated so many times."""
    seen = set()
    for plain in suite.plain_cases():
        for few in () if plain.is_packed in seen else _of_few(plain, heads):
            many = replace(few, seqlens_q=few.seqlens_q * times, seqlens_kv=few.seqlens_kv * times)
            plan, plan_of_few = suite.plan_of(many), suite.plan_of(few)
            if plan is not None and plan_of_few is not None:
                _check(suite, plan, many, call_of(suite, few, plan_of_few.request), times)
                seen.add(plain.is_packed)
                break


def _of_few(plain: Case, heads: int) -> Iterator[Case]:
    """The plain case of a few sequences, of unlike lengths, of one, and of one with the plain case's heads."""
    alone: dict[str, Any] = {"rows_q": None, "rows_kv": None, "lead": 0, "lead_kv": None, "tail": 0}
    alone |= {"return_lse": False, "bias_requires_grad": False, "bias_storage": "contiguous"}
    few, count = replace(plain, name="", scores="normal", **alone), len(LENGTHS_Q)
    narrow = replace(few, num_heads=heads, num_kv_heads=heads)
    unlike = (LENGTHS_Q, LENGTHS_KV) if plain.is_packed else ((2,) * count, (3,) * count)
    yield replace(narrow, seqlens_q=unlike[0], seqlens_kv=unlike[1])
    for one in (narrow, few):
        yield replace(one, seqlens_q=(2,) * count, seqlens_kv=(2,) * count)


def _check(suite: BackendConformance, plan: Plan, many: Case, few: Call, times: int) -> None:
    axis = few.request.layout.tokens if few.request.layout.batch is None else few.request.layout.batch

    def repeated(x: torch.Tensor) -> torch.Tensor:
        return x.repeat([times if index == axis else 1 for index in range(x.dim())])

    def worst(name: str, x: object, exact: torch.Tensor) -> torch.Tensor:
        is_lse = name == "lse"
        dtype = lse_dtype(many.dtype) if is_lse else many.dtype
        return checks.worst_copy(name, x, exact, int(many.is_packed) if is_lse else axis, times, dtype)

    given: dict[str, Any] = {
        name: x.repeat(times, 1, 1, 1)
        for name in ("bias", "attention_mask")
        if (x := getattr(few.tensors, name)) is not None and x.dim() == 4 and len(x) > 1
    }
    for name in ("q", "k", "v"):
        x = getattr(few.tensors, name)
        given[name] = repeated(x.detach()).requires_grad_(x.requires_grad)
    given |= {name: x for name, x in vars(many.tensors(suite.device)).items() if name.startswith("cu_seqlens")}
    call = Call(many, plan.request, replace(few.tensors, **given), repeated(few.dout), None)
    try:
        output, gradients = step(suite, plan, call)  # unwatched, which a loop over sequences takes long in
        out, lse = few.expected()
        of_few = AttentionOutput(worst("out", output.out, out.exact), worst("lse", output.lse, lse.exact))
        checks.check_output(few.case, few.inputs, of_few, (out, lse))
        if gradients is None:
            return
        wanted = few.expected_gradients()
        found = {name: worst(name, getattr(gradients, name), x.exact) for name, x in wanted.items()}
        checks.check_gradients(few.case, few.inputs, Gradients(**found), lse.exact, wanted)
    except checks.ConformanceError as error:
        checks.fail(f"{len(many.seqlens_q)} sequences in {many.qkv_format}: {error}")
