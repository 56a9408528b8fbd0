"""``batch_invariant``: a query's bits in a batch, and alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mla_plugin.arguments.cache_format import FP8_DS_MLA, PLAIN, RANK, VALUE_BYTES
from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.conformance import checks
from mla_plugin.conformance.decode.case import DecodeCase, like
from mla_plugin.conformance.interpreted import products_by_row
from mla_plugin.hooks.decode import DecodePlan, DecodeRequest
from mla_plugin.hooks.types import Accepted

if TYPE_CHECKING:
    from mla_plugin.conformance.decode.suite import DecodeConformance

LENGTHS = (700, 3, 0, 64, 257, 1, 256)
"""Around multiples of powers of two, where keys are cut."""
LEFTPADS = (600, 1, 0, 0, 70, 1, 255)
LONG = (1100, 4200, 3)
"""Beyond what one part of a split of any size holds."""
BATCHES = ((1, 1, 16), (8, 1, 256), (16, 8, 64), (24, 2, 40), (48, 4, 64), (64, 1, 256), (128, 1, 256), (128, 8, 6))
"""Heads, query tokens and sequences of the large batches on a CUDA device."""
_AT_MOST = 12


@products_by_row()
def check_batch_invariance(suite: DecodeConformance) -> None:
    """For accepted cases, cheap ones first, until each level of what matters was there; a slow backend gets four.

    On a CUDA device also for large batches of other heads, in every dtype and in pages of 1, 16 and 64.
    """
    seen: set[tuple[str, object]] = set()
    for case in sorted(suite.cases(), key=lambda case: (case.leftpads is not None, case.cost)):
        facts = _facts(case, is_slow=suite.is_slow)
        if not case.has_seqlens_kv or case._has_one_cache or case.is_large or facts <= seen:
            continue
        leftpads = None if case.leftpads is None else LEFTPADS
        of_lengths = replace(case, lengths=LENGTHS, leftpads=leftpads, rows=None)
        if suite._accepts(of_lengths) and _check_case(suite, of_lengths):
            seen |= facts
    if not suite.is_slow:
        _check_long(suite)
    if torch.device(suite.device).type == "cuda" and not suite.quick:
        for case in _large_batches():
            if suite._accepts(case):
                _check_case(suite, case)


def _check_long(suite: DecodeConformance) -> None:
    """The cheapest accepted case with pages and the cheapest without, with many more keys."""
    seen = set()
    for case in sorted(suite.cases(), key=lambda case: (not case.return_lse, case.leftpads is not None, case.cost)):
        if (case.page_size is None) in seen or not case.has_seqlens_kv or case._has_one_cache or case.is_large:
            continue
        long = replace(case, lengths=LONG, leftpads=None, rows=None, seqlen_q=1)
        if suite._accepts(long) and _check_case(suite, long):
            seen.add(case.page_size is None)


def _facts(case: DecodeCase, *, is_slow: bool) -> set[tuple[str, object]]:
    """What a kernel, or the number of parts that it cuts the keys into, may depend on."""
    facts: dict[str, object] = {"kind": (case.page_size is None, case.seqlen_q > 1, case.causal)}
    facts["format"] = (case.kv_cache_format, case.kv_cache_format != PLAIN and not is_slow and case.dtype)
    if not is_slow:
        kind = (case.page_size is None, case.dtype)
        facts |= {"dtype": kind, "page_size": case.page_size, "leftpad": (kind, case.leftpads is not None)}
        facts |= {"queries": min(case.seqlen_q, 5), "heads": (case.num_heads > 16, case.num_heads > 64)}
        facts |= {
            "host": case.has_host_lengths,
            "lse": case.return_lse,
            "packed": case.is_packed,
            "wide": case.rank > 256,
        }
    return set(facts.items())


def _large_batches() -> Iterator[DecodeCase]:
    generator = torch.Generator().manual_seed(0)
    dtypes, page_sizes = itertools.cycle((torch.bfloat16, torch.float16)), itertools.cycle((64, 16, None, 1, 64))
    for (heads, seqlen_q, batch), dtype, page_size in zip(BATCHES, dtypes, page_sizes, strict=False):
        lengths = torch.randint(0, 1500, (batch,), generator=generator).tolist()
        lengths[: len(LENGTHS)] = LENGTHS[:batch]
        of_step: dict[str, Any] = {"seqlen_q": seqlen_q, "num_heads": heads, "has_host_lengths": True}
        yield DecodeCase("", dtype, tuple(lengths), rank=512, page_size=page_size, **of_step)


def _check_case(suite: DecodeConformance, case: DecodeCase) -> bool:
    """Whether the backend takes the case with ``batch_invariant``; then the bits are compared."""
    answer = suite._answer(case.request(suite.device).replace(batch_invariant=True))
    if isinstance(answer, Accepted):
        _check(suite, case)
        return True
    if not any("batch_invariant" in reason for reason in answer.reasons):
        checks.fail(f"{suite.backend} refuses batch_invariant=True without naming it: {answer.reasons}")
    return False


def _check(suite: DecodeConformance, case: DecodeCase) -> None:
    """Sequences by themselves, each of their queries by itself, and the batch in another order."""
    whole = case.tensors(suite.device, suite._generator(), suite.padding_poison)
    out, lse = _run(suite, whole)
    for b in {*range(min(len(case.lengths), _AT_MOST)), len(case.lengths) - 1}:
        for i in range(case.seqlen_q):
            hidden = case.seqlen_q - 1 - i if whole.causal else 0
            alone = _run(suite, _part(whole, [b], slice(i, i + 1), [max(case.lengths[b] - hidden, 0)]))
            _same(case, f"query {i} of sequence {b}", (out[b, i], lse[b, :, i]), (alone[0][0, 0], alone[1][0, :, 0]))
    order = list(range(len(case.lengths)))[::-1]
    turned = _run(suite, _part(whole, order, slice(None), [case.lengths[b] for b in order]))
    _same(case, "a batch in another order", (out, lse), (turned[0].flip(0), turned[1].flip(0)))


def _part(whole: DecodeTensors, sequences: list[int], queries: slice, lengths: list[int]) -> DecodeTensors:
    """Some sequences and queries, with the keys that the last of those queries sees.

    The page table is wider, and a contiguous cache has no more rows than the longest sequence takes.
    """
    device = whole.q_nope_abs.device
    seqlens_kv = torch.tensor(lengths, dtype=torch.int32, device=device)
    cache, page_table = (whole.c_kv, whole.k_rope, whole.kv_scale), None
    if whole.page_table is not None:
        given = whole.page_table[sequences]
        page_table = torch.cat([given, torch.full_like(given[:, :3], 2**30)], 1)
    else:
        cache = _rows(whole, sequences, max(*lengths, 1))
    c_kv, k_rope, kv_scale = cache
    return whole._replace(
        q_nope_abs=whole.q_nope_abs[sequences][:, queries],
        q_rope=whole.q_rope[sequences][:, queries],
        c_kv=c_kv,
        k_rope=k_rope,
        kv_scale=kv_scale,
        causal=whole.causal and queries == slice(None),
        page_table=page_table,
        seqlens_kv=seqlens_kv,
        leftpad_kv=None if whole.leftpad_kv is None else whole.leftpad_kv[sequences],
        lengths=like(whole.lengths, lengths, seqlens_kv),
    )


def _rows(
    whole: DecodeTensors, sequences: list[int], count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """c_kv, k_rope and kv_scale of the first rows of some sequences; a row of ``fp8_ds_mla`` holds its scales."""
    c_kv, k_rope = whole.c_kv, whole.k_rope[sequences][:, :count]
    if whole.kv_cache_format != FP8_DS_MLA:
        return c_kv[sequences][:, :count], k_rope, whole.kv_scale
    rows = c_kv.as_strided((*c_kv.shape[:2], VALUE_BYTES), c_kv.stride())[sequences][:, :count]
    values, scales = rows.split_with_sizes((RANK, VALUE_BYTES - RANK), -1)
    return values, k_rope, scales.view(torch.float32)


def _run(suite: DecodeConformance, tensors: DecodeTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse; zeros where lse is not asked for."""
    request = DecodeRequest.of(tensors, batch_invariant=True)
    output = suite.run(DecodePlan(request, suite.platform(), suite.backend), tensors)
    lse = tensors.q_nope_abs.new_zeros(tensors.lse_shape) if output.lse is None else output.lse
    return output.out, lse


def _same(
    case: DecodeCase,
    name: str,
    found: tuple[torch.Tensor, torch.Tensor],
    wanted: tuple[torch.Tensor, torch.Tensor],
) -> None:
    for what, x, y in zip(("out", "lse"), found, wanted, strict=True):
        if not torch.equal(x, y):
            checks.fail(
                f"{what} of {name} has other bits alone than in the batch, in {case.name or 'a large batch'}; refuse "
                "batch_invariant=True"
            )
