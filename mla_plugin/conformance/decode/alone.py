"""``batch_invariant``: a query's bits in a batch, and alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mla_plugin.arguments.decode import DecodeLengths, DecodeTensors
from mla_plugin.conformance import checks
from mla_plugin.conformance.decode.case import DecodeCase
from mla_plugin.hooks.decode import DecodePlan
from mla_plugin.hooks.types import Accepted

if TYPE_CHECKING:
    from mla_plugin.conformance.decode.suite import DecodeConformance

LENGTHS = (700, 3, 0, 64, 257, 1, 256)
"""Around multiples of powers of two, where keys are cut."""
BATCHES = ((1, 1, 16), (8, 1, 256), (16, 8, 64), (24, 2, 40), (48, 4, 64), (64, 1, 256), (128, 1, 256), (128, 8, 6))
"""Heads, query tokens and sequences of the large batches on a CUDA device."""
_AT_MOST = 12


def check_batch_invariance(suite: DecodeConformance) -> None:
    """For the first accepted case with pages, and the first without, of one query token and of several.

    On a CUDA device also for large batches of other heads, in every dtype and in pages of 1, 16 and 64.
    """
    seen = set()
    for case in suite.cases():
        kind = (case.page_size is None, case.seqlen_q > 1, case.kv_cache_format)
        is_plain = case.causal and case.has_seqlens_kv and case.leftpads is None and not case.is_large
        if not is_plain or kind in seen or not suite._accepts(case):
            continue
        seen.add(kind)
        _check_case(suite, replace(case, lengths=LENGTHS, rows=None, return_lse=True))
    if torch.device(suite.device).type == "cuda" and not suite.quick:
        for case in _large_batches():
            if suite._accepts(case):
                _check_case(suite, case)


def _large_batches() -> Iterator[DecodeCase]:
    generator = torch.Generator().manual_seed(0)
    dtypes, page_sizes = itertools.cycle((torch.bfloat16, torch.float16)), itertools.cycle((64, 16, None, 1, 64))
    for (heads, seqlen_q, batch), dtype, page_size in zip(BATCHES, dtypes, page_sizes, strict=False):
        lengths = torch.randint(0, 1500, (batch,), generator=generator).tolist()
        lengths[: len(LENGTHS)] = LENGTHS[:batch]
        of_step: dict[str, Any] = {"seqlen_q": seqlen_q, "num_heads": heads, "has_host_lengths": True}
        yield DecodeCase("", dtype, tuple(lengths), rank=512, page_size=page_size, **of_step)


def _check_case(suite: DecodeConformance, case: DecodeCase) -> None:
    answer = suite._answer(case.request(suite.device).replace(batch_invariant=True))
    if isinstance(answer, Accepted):
        _check(suite, case)
    elif not any("batch_invariant" in reason for reason in answer.reasons):
        checks.fail(f"{suite.backend} refuses batch_invariant=True without naming it: {answer.reasons}")


def _check(suite: DecodeConformance, case: DecodeCase) -> None:
    """Sequences by themselves, each of their queries by itself, and the batch in another order."""
    whole = case.tensors(suite.device, suite._generator(), suite.padding_poison)
    assert whole.seqlens_kv is not None
    out, lse = _run(suite, case, whole, case.lengths)
    for b in {*range(min(len(case.lengths), _AT_MOST)), len(case.lengths) - 1}:
        for i in range(case.seqlen_q):
            seen = max(case.lengths[b] - (case.seqlen_q - 1 - i), 0)
            alone = _run(suite, case, _part(whole, [b], slice(i, i + 1), [seen]), (seen,))
            _same(f"query {i} of sequence {b}", (out[b, i], lse[b, :, i]), (alone[0][0, 0], alone[1][0, :, 0]))
    order = list(range(len(case.lengths)))[::-1]
    turned = _run(suite, case, _part(whole, order, slice(None), [case.lengths[b] for b in order]), case.lengths[::-1])
    _same("a batch in another order", (out, lse), (turned[0].flip(0), turned[1].flip(0)))


def _part(whole: DecodeTensors, sequences: list[int], queries: slice, lengths: list[int]) -> DecodeTensors:
    """Some sequences and queries, with the keys that the last of those queries sees, and a wider page table."""
    device = whole.q_nope_abs.device
    seqlens_kv = torch.tensor(lengths, dtype=torch.int32, device=device)
    paged, page_table = whole.page_table is not None, None
    if whole.page_table is not None:
        given = whole.page_table[sequences]
        page_table = torch.cat([given, torch.full_like(given[:, :3], 2**30)], 1)
    return whole._replace(
        q_nope_abs=whole.q_nope_abs[sequences][:, queries],
        q_rope=whole.q_rope[sequences][:, queries],
        c_kv=whole.c_kv if paged else whole.c_kv[sequences],
        k_rope=whole.k_rope if paged else whole.k_rope[sequences],
        causal=whole.causal and queries == slice(None),
        page_table=page_table,
        seqlens_kv=seqlens_kv,
        lengths=None if whole.lengths is None else DecodeLengths(lengths, seqlens_kv=seqlens_kv),
    )


def _run(
    suite: DecodeConformance, case: DecodeCase, tensors: DecodeTensors, lengths: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    seqlen_q = tensors.q_nope_abs.shape[1]
    request = replace(case, lengths=lengths, seqlen_q=seqlen_q, rows=case.capacity).request(suite.device)
    plan = DecodePlan(request.replace(batch_invariant=True), suite.platform(), suite.backend)
    output = suite.run(plan, tensors)
    assert output.lse is not None
    return output.out, output.lse


def _same(name: str, found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
    for what, x, y in zip(("out", "lse"), found, wanted, strict=True):
        if not torch.equal(x, y):
            checks.fail(f"{what} of {name} has other bits alone than in the batch; refuse batch_invariant=True")
