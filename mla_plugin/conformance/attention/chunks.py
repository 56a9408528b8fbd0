"""``batch_invariant``: a prefill in chunks, and sequences alone, have the bits of one prefill of the whole batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.layout import LAYOUTS
from mla_plugin.conformance import checks
from mla_plugin.conformance.interpreted import products_by_row
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, Plan
from mla_plugin.hooks.types import Accepted

if TYPE_CHECKING:
    from mla_plugin.conformance.attention.suite import BackendConformance

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ENDS = (1, 38, 64, 190)
"""Where chunks end: one query alone, ends within tiles and on them. One more chunk of a single query is drawn."""
LONG_ENDS = (130, 250, 600, 1100)
"""The same over more keys than any tile or part of a split, for one layout with narrow heads."""


class _Form(NamedTuple):
    """What a prefill is made of.

    ``is_strided``: chunks are slices of the whole batch, and not copied. With ``no_mask`` each chunk sees all keys.
    """

    qkv_format: str
    batch: int
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    window: tuple[int, int] = (-1, -1)
    is_strided: bool = False
    deterministic: bool = False
    mask: str = "causal_bottom_right"

    @property
    def is_causal(self) -> bool:
        """A sequence's first tokens have the same results without the ones behind them."""
        return self.mask != "no_mask"


FORMS = (
    _Form("bshd", 2, (2, 2), (192, 128)),
    _Form("sbhd", 2, (4, 2), (192, 128), window=(70, -1), deterministic=True),
    _Form("bhsd", 2, (2, 1), (64, 64), is_strided=True),
    _Form("bshd", 13, (2, 2), (64, 64)),
)
OTHER_FORMS = (_Form("bshd", 2, (6, 3), (32, 32), mask="no_mask"), _Form("bhsd", 3, (1, 1), (24, 24), mask="causal"))
"""Narrow ones, in float64 too."""


@dataclass(frozen=True)
class _Prefill:
    """A prefill of the whole batch; q, k and v are [B, S, H, D]."""

    form: _Form
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    ends: tuple[int, ...]
    is_training: bool = False

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Packed sequences: the batch's sequence, and how many of its tokens."""
        return ((0, self.ends[-1]), (0, 0), (1, self.ends[-2]), (1, self.ends[-1]))

    def part(self, sequences: slice, queries: slice, keys: int) -> AttentionTensors:
        """Some queries of some sequences over the first keys, in the layout."""
        picked = (self.q[sequences, queries], self.k[sequences, :keys], self.v[sequences, :keys])
        q, k, v = (self._in_layout(x) for x in picked)
        return AttentionTensors(q, k, v, self.q.shape[-1] ** -0.5)

    def _in_layout(self, x: torch.Tensor) -> torch.Tensor:
        x = LAYOUTS[self.form.qkv_format].from_bhsd(x.transpose(1, 2))
        return x if self.form.is_strided else x.contiguous()

    def packed(self, parts: tuple[tuple[int, int], ...], gap: int = 0) -> AttentionTensors:
        """Sequences one after another, with so many rows between them."""
        rows = [length + gap for _, length in parts]
        q, k, v = (
            torch.cat([_filled_up(x[b, :length], length + gap) for b, length in parts])
            for x in (self.q, self.k, self.v)
        )
        offsets, starts = (_offsets(lengths, q.device) for lengths in ([length for _, length in parts], rows))
        given = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
        if gap:
            given |= {"cu_seqlens_q_padded": starts, "cu_seqlens_kv_padded": starts}
        return AttentionTensors(q, k, v, q.shape[-1] ** -0.5, **given)

    def padded(self, lengths: tuple[int, ...]) -> AttentionTensors:
        """The first tokens of the first sequences, in rows for more."""
        rows = max(lengths) + 3
        q, k, v = (
            self._in_layout(torch.stack([_filled_up(x[b, :length], rows) for b, length in enumerate(lengths)]))
            for x in (self.q, self.k, self.v)
        )
        offsets = _offsets(lengths, q.device)
        return AttentionTensors(q, k, v, q.shape[-1] ** -0.5, cu_seqlens_q=offsets, cu_seqlens_kv=offsets)

    @property
    def _padding_mask(self) -> str:
        return f"padding_{self.form.mask}" if self.form.is_causal else "padding"

    def request(self, tensors: AttentionTensors, *, batch_invariant: bool = True) -> AttentionRequest:
        """The request of a part."""
        is_packed, offsets = tensors.q.dim() == 3, tensors.cu_seqlens_q
        longest = int(offsets.diff().max()) if is_packed and offsets is not None else None
        return AttentionRequest.of(
            tensors,
            qkv_format="thd" if is_packed else self.form.qkv_format,
            attn_mask_type=self.form.mask if offsets is None else self._padding_mask,
            window_size=self.form.window,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            return_lse=True,
            is_training=self.is_training,
            deterministic=self.form.deterministic,
            batch_invariant=batch_invariant,
        )


def _filled_up(x: torch.Tensor, rows: int) -> torch.Tensor:
    """The rows, and others behind them that no sequence has."""
    return torch.cat([x, x.new_full((rows - len(x), *x.shape[1:]), 32.0)])


def _offsets(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


@products_by_row()
def check_batch_invariance(suite: BackendConformance) -> None:
    """In each dtype, layout, width and with grouped heads, as far as the backend takes them; in one of each if slow."""
    for whole in _prefills(suite):
        tensors = whole.part(slice(None), slice(None), whole.ends[-1])
        if not suite.takes(whole.request(tensors, batch_invariant=False)):
            continue
        answer = suite._answer(whole.request(tensors))
        if isinstance(answer, Accepted):
            _check(suite, whole)
        elif not any("batch_invariant" in reason for reason in answer.reasons):
            checks.fail(f"{suite.backend} refuses batch_invariant=True without naming it: {answer.reasons}")
        if suite.is_slow:
            return


def _prefills(suite: BackendConformance) -> Iterator[_Prefill]:
    generator = suite._generator()
    first, *rest = itertools.product(DTYPES, FORMS)
    others = () if suite.is_slow else itertools.product((*DTYPES, torch.float64), OTHER_FORMS)
    for dtype, form in (first, *others, *rest):
        whole = _drawn(suite, form, dtype, generator)
        yield whole
        if form == FORMS[0] and not suite.is_slow:
            yield replace(whole, is_training=True)
    for dtype in () if suite.is_slow else DTYPES:
        form = _Form("bshd", 2, (1, 1), (64, 64))
        q, k, v = (torch.randn((2, LONG_ENDS[-1], 1, 64), generator=generator).to(suite.device, dtype) for _ in "qkv")
        yield _Prefill(form, q, k, v, _with_one_query(LONG_ENDS, generator))


def _drawn(suite: BackendConformance, form: _Form, dtype: torch.dtype, generator: torch.Generator) -> _Prefill:
    (heads, kv_heads), (dim_qk, dim_v) = form.heads, form.head_dims
    q, k, v = (
        torch.randn((form.batch, ENDS[-1], *each), generator=generator).to(suite.device, dtype)
        for each in ((heads, dim_qk), (kv_heads, dim_qk), (kv_heads, dim_v))
    )
    return _Prefill(form, q, k, v, _with_one_query(ENDS, generator))


def _with_one_query(ends: tuple[int, ...], generator: torch.Generator) -> tuple[int, ...]:
    """The ends, and between the last two a chunk of one query over many keys."""
    one = int(torch.randint(ends[-2] + 1, ends[-1] - 1, (), generator=generator))
    return (*ends[:-1], one, one + 1, ends[-1])


def _run(suite: BackendConformance, whole: _Prefill, tensors: AttentionTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, S, H, D] and lse [B, S, H], without the first dimension for packed sequences."""
    request = whole.request(tensors)
    plan = Plan(request, suite.platform(), suite.backend, suite.backend)
    output: AttentionOutput = suite._manager().caller("forward", suite.backend)(plan=plan, tensors=tensors)
    if request.layout.is_packed:
        return output.out, output.lse.mT
    return request.layout.to_bhsd(output.out).transpose(1, 2), output.lse.mT


def _check(suite: BackendConformance, whole: _Prefill) -> None:
    everything = slice(None)
    ends = whole.ends
    out, lse = _run(suite, whole, whole.part(everything, everything, ends[-1]))
    for first, last in pairwise((0, *ends)) if whole.form.mask != "causal" else ():
        keys = last if whole.form.is_causal else ends[-1]
        chunk = _run(suite, whole, whole.part(everything, slice(first, last), keys))
        _same(whole, f"queries {first} to {last}", chunk, (out[:, first:last], lse[:, first:last]))
    for b in range(2):
        one = slice(b, b + 1)
        alone = _run(suite, whole, whole.part(one, everything, ends[-1]))
        _same(whole, f"sequence {b}", alone, (out[one], lse[one]))
    of_any_length = (whole.parts, whole.parts[2:3]) if whole.form.is_causal else (((1, ends[-1]),),)
    for parts in (((0, ends[-1]), (1, ends[-1])), *of_any_length):
        packed = whole.packed(parts)
        if suite.takes(whole.request(packed)):
            wanted = [torch.cat([x[b, :length] for b, length in parts]) for x in (out, lse)]
            name = f"packed sequences of lengths {[length for _, length in parts]}"
            _same(whole, name, _run(suite, whole, packed), (wanted[0], wanted[1]))
    _check_rows_behind(suite, whole, (out, lse))


def _check_rows_behind(suite: BackendConformance, whole: _Prefill, wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Rows behind the sequences: packed ones have the bits of the whole batch too, dense ones those of shorter ones."""
    ends, gap = whole.ends, 5
    for length in (ends[1], ends[-1]) if whole.form.is_causal else ends[-1:]:
        packed = whole.packed(((1, length),), gap)
        if suite.takes(whole.request(packed)):
            out, lse = _run(suite, whole, packed)
            prefix = wanted[0][1, :length], wanted[1][1, :length]
            _same(whole, f"a packed sequence of {length} tokens before a gap", (out[:length], lse[:length]), prefix)
    if not whole.form.is_causal:
        return
    dense = [whole.padded(lengths) for lengths in ((ends[1], ends[2]), (ends[-1], ends[-2]))]
    if suite.takes(whole.request(dense[0])):
        short, long = (_run(suite, whole, tensors) for tensors in dense)
        for b, length in enumerate(ends[1:3]):
            found, prefix = ((out[b, :length], lse[b, :length]) for out, lse in (short, long))
            _same(whole, f"a padded sequence of {length} tokens", found, prefix)


def _same(
    whole: _Prefill,
    name: str,
    found: tuple[torch.Tensor, torch.Tensor],
    wanted: tuple[torch.Tensor, torch.Tensor],
) -> None:
    for what, x, y in zip(("out", "lse"), found, wanted, strict=True):
        if not torch.equal(x, y):
            count, kind = int((x != y).sum()), f"{whole.form.qkv_format} and {whole.q.dtype}"
            checks.fail(
                f"{what} of {name} ({kind}): {count} of {x.numel()} elements have other bits than in the prefill of "
                "the whole batch; refuse batch_invariant=True"
            )
