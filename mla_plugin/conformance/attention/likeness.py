"""Calls of one request that differ in all that it does not say: values, lengths, addresses, strides of offsets.

What a backend keeps for a request must not be of the first of them. That one has what a shortcut may be taken for: a
mask that hides nothing, a bias of zeros, full sequences, aligned tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mla_plugin.conformance import checks
from mla_plugin.conformance.attention.case import Case
from mla_plugin.conformance.attention.special import call_of, check_after_forward
from mla_plugin.hooks.attention import Plan

if TYPE_CHECKING:
    from mla_plugin.conformance.attention.suite import BackendConformance


_BLIND = (((20, 0), (12, 16)), ((12, 8), (0, 28)))
"""Lengths of queries and of keys where some queries see no key, and half of the plain ones' queries in all."""


def with_padding(plain: list[Case]) -> Iterator[Case]:
    """Full sequences under a padding mask, and packed ones of one length; their requests are equal to others."""
    for case in plain:
        lengths = (24,) * len(case.seqlens_q)
        both: dict[str, Any] = {"seqlens_q": lengths, "seqlens_kv": lengths}
        if case.is_packed:
            yield replace(case, name=f"{case.name} of one length", max_seqlen="extent", **both)
        else:
            rows: dict[str, Any] = {"rows_q": lengths, "rows_kv": lengths, "attn_mask_type": "padding"}
            yield replace(case, name=f"{case.name} with padding", max_seqlen="extent", **both, **rows)
        unlike: dict[str, Any] = {"seqlens_q": (20, 20), "seqlens_kv": (24, 24), "max_seqlen": "extent"}
        if not case.is_packed:
            unlike |= {"rows_q": (28, 28), "rows_kv": (28, 28)}
        mask = "padding_causal_bottom_right"
        yield replace(case, name=f"{case.name} of more keys than queries", attn_mask_type=mask, **unlike)


def check_like_calls(suite: BackendConformance, case: Case) -> None:
    """Without a backward to follow, and unless the backend is slow with one; they share ``AttentionTensors.kept``."""
    for is_training in (False,) if suite.is_slow else (False, True):
        plan = suite.plan_of(case, is_training=is_training)
        if plan is not None:
            _check(suite, plan, case)


def _check(suite: BackendConformance, plan: Plan, case: Case) -> None:
    hooks = replace(suite.hooks(), kept={})
    for words, each, is_plain in _like_cases(case):
        call = call_of(suite, each, plan.request)
        if is_plain:  # lse is not used either
            call = call.with_mask_of(False).without_dlse()
            if (bias := call.tensors.bias) is not None:
                zeros = torch.zeros_like(bias).requires_grad_(bias.requires_grad)
                call = replace(call, tensors=replace(call.tensors, bias=zeros))
        try:
            check_after_forward(hooks, plan, call, hooks.forward(plan, call))
        except checks.ConformanceError as error:
            checks.fail(f"{case.name} with {words}, one of several calls that differ in values alone: {error}")


def varied(case: Case, index: int) -> Case:
    """A case of the same request, one for each small index: of another scale and, with padding, of other lengths."""
    other = replace(case, softmax_scale=(0.5 + index / 16) * case.head_dim_qk**-0.5)
    if not case.has_padding or case.seqlens_q != case.seqlens_kv:
        return other
    longest = max(case.seqlens_q)
    lengths = tuple(n if n == longest else max(0, n - 1 - index) for n in case.seqlens_q)
    tail = case.tail
    if case.is_packed and case.rows_q is None:  # as many rows in all
        tail += sum(case.seqlens_q) - sum(lengths)
    return replace(other, seqlens_q=lengths, seqlens_kv=lengths, tail=tail)


def _like_cases(case: Case) -> Iterator[tuple[str, Case, bool]]:
    """A name, the case, and whether its bias and mask hide nothing; all cases have the same request."""
    storages: dict[str, Any] = {f"storage_{name}": "offset" for name in "qkv"}
    yield "plain values", case, True
    yield "other values", replace(case.other(), softmax_scale=case.softmax_scale), False
    yield "addresses off 16 bytes", replace(case, bias_storage="offset", offsets_storage="offset", **storages), False
    if case.has_padding or case.bias_type != "no_bias" or case.attn_mask_type == "arbitrary":
        yield "other strides", replace(case, bias_storage="sliced_dims", offsets_storage="strided"), False
    if case.has_padding and case._shares_offsets:
        shorter = tuple(length // (b + 2) for b, length in enumerate(case.seqlens_q))
        given: dict[str, Any] = {"seqlens_q": shorter, "seqlens_kv": shorter}
        if case.is_packed:  # as many rows in all
            given |= {"rows_q": None, "rows_kv": None, "tail": case.tail + sum(case.seqlens_q) - sum(shorter)}
        yield "shorter sequences", replace(case, **given), False
    elif case.has_padding:
        for lengths_q, lengths_kv in _BLIND:
            given = {"seqlens_q": lengths_q, "seqlens_kv": lengths_kv, "tail": 20 if case.is_packed else 0}
            yield "queries that see no key and an empty sequence", replace(case, **given), False
    yield "plain values again", case, True
