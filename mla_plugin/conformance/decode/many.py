"""Thousands of sequences in one call of decode: a few of them over and over, as in attention's ``many``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mla_plugin.arguments.layout import lse_dtype
from mla_plugin.conformance import checks
from mla_plugin.conformance.attention.many import sizes_on
from mla_plugin.conformance.decode.case import DecodeCase, like
from mla_plugin.conformance.decode.oracle import expected
from mla_plugin.hooks.decode import DecodeOutput, DecodePlan, DecodeRequest
from mla_plugin.hooks.types import Accepted

if TYPE_CHECKING:
    from mla_plugin.conformance.decode.suite import DecodeConformance

LENGTHS = (1, 3, 0, 2, 5, 1, 4)
_OF_SEQUENCES = ("q_nope_abs", "q_rope", "page_table", "seqlens_kv")


def check_many_sequences(suite: DecodeConformance, plain: DecodeCase) -> None:
    """They share the pages, or have copies of the same cache."""
    for times, heads in sizes_on(suite.device):
        check_size(suite, plain, times, heads)


def check_size(suite: DecodeConformance, plain: DecodeCase, times: int, heads: int) -> None:
    """The few, repeated so many times."""
    few = replace(plain, lengths=LENGTHS, leftpads=None, rows=None, seqlen_q=1, num_heads=heads, scores="normal")
    if not few.has_seqlens_kv:
        few = replace(few, lengths=(5,) * len(LENGTHS))
    many = replace(few, lengths=few.lengths * times)
    if few._has_one_cache:
        return
    small = few.tensors(suite.device, suite._generator(), suite.padding_poison)

    def repeated(x: torch.Tensor) -> torch.Tensor:
        return x.repeat(times, *(1,) * (x.dim() - 1))

    made: dict[str, Any] = {name: repeated(x) for name in _OF_SEQUENCES if (x := getattr(small, name)) is not None}
    if few.page_size is None:
        whole = repeated(torch.cat([small.c_kv, small.k_rope], -1))
        made["c_kv"], made["k_rope"] = whole.split_with_sizes((few.rank, few.rope), -1)
    tensors = small._replace(**made, lengths=None)
    tensors = tensors._replace(lengths=like(small.lengths, many.lengths, tensors.seqlens_kv))
    request = DecodeRequest.of(tensors)
    if not isinstance(suite._answer(request), Accepted):
        return
    out, lse = expected(small)
    output = suite.run(DecodePlan(request, suite.platform(), suite.backend), tensors)
    try:
        found = checks.worst_copy("out", output.out, out.exact, 0, times, few.dtype)
        of_lse = None
        if few.return_lse:
            of_lse = checks.worst_copy("lse", output.lse, lse.exact, 0, times, lse_dtype(few.dtype))
        suite.check_results(few, DecodeOutput(found, of_lse), (out, lse))
    except checks.ConformanceError as error:
        checks.fail(f"{len(many.lengths)} sequences, {plain.name}: {error}")
