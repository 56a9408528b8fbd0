"""``batch_invariant``: a prefill in chunks, and sequences alone, have the bits of one prefill of the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

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
FORMS = (
    ("bshd", 2, (2, 2), (192, 128), (-1, -1)),
    ("sbhd", 2, (4, 2), (192, 128), (70, -1)),
    ("bhsd", 2, (2, 1), (64, 64), (-1, -1)),
    ("bshd", 13, (2, 2), (64, 64), (-1, -1)),
)
"""Layout, sequences, heads, head dims and window."""
ENDS = (1, 38, 64, 101, 190)
"""Where chunks end: one query alone, ends within tiles and on them."""
LONG_ENDS = (130, 250, 600, 1100)
"""The same over more keys than any tile or part of a split, for one layout with narrow heads."""


@dataclass(frozen=True)
class _Prefill:
    """A prefill of the whole batch; q, k and v are [B, S, H, D]."""

    qkv_format: str
    window: tuple[int, int]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    ends: tuple[int, ...] = ENDS
    is_training: bool = False

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Packed sequences: the batch's sequence, and how many of its tokens."""
        return ((0, self.ends[-1]), (0, 0), (1, self.ends[-2]), (1, self.ends[-1]))

    def part(self, sequences: slice, queries: slice, keys: int) -> AttentionTensors:
        """Some queries of some sequences over the first keys, in the layout."""
        layout = LAYOUTS[self.qkv_format]
        picked = (self.q[sequences, queries], self.k[sequences, :keys], self.v[sequences, :keys])
        q, k, v = (layout.from_bhsd(x.transpose(1, 2)).contiguous() for x in picked)
        return AttentionTensors(q, k, v, self.q.shape[-1] ** -0.5)

    def packed(self, parts: tuple[tuple[int, int], ...]) -> AttentionTensors:
        """Sequences one after another."""
        q, k, v = (torch.cat([x[b, :length] for b, length in parts]) for x in (self.q, self.k, self.v))
        ends = [0, *accumulate(length for _, length in parts)]
        offsets = torch.tensor(ends, dtype=torch.int32, device=q.device)
        return AttentionTensors(q, k, v, q.shape[-1] ** -0.5, cu_seqlens_q=offsets, cu_seqlens_kv=offsets)

    def request(self, tensors: AttentionTensors, *, batch_invariant: bool = True) -> AttentionRequest:
        """The request of a part."""
        is_packed = tensors.cu_seqlens_q is not None
        longest = None if tensors.cu_seqlens_q is None else int(tensors.cu_seqlens_q.diff().max())
        return AttentionRequest.of(
            tensors,
            qkv_format="thd" if is_packed else self.qkv_format,
            attn_mask_type="padding_causal_bottom_right" if is_packed else "causal_bottom_right",
            window_size=self.window,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            return_lse=True,
            is_training=self.is_training,
            batch_invariant=batch_invariant,
        )


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
    for dtype in DTYPES:
        for qkv_format, batch, (heads, kv_heads), (dim_qk, dim_v), window in FORMS:
            q, k, v = (
                torch.randn((batch, ENDS[-1], *each), generator=generator).to(suite.device, dtype)
                for each in ((heads, dim_qk), (kv_heads, dim_qk), (kv_heads, dim_v))
            )
            yield _Prefill(qkv_format, window, q, k, v)
            if qkv_format == "bshd" and batch == 2 and not suite.is_slow:
                yield _Prefill(qkv_format, window, q, k, v, is_training=True)
        if not suite.is_slow:
            q, k, v = (
                torch.randn((2, LONG_ENDS[-1], 1, 64), generator=generator).to(suite.device, dtype) for _ in "qkv"
            )
            yield _Prefill("bshd", (-1, -1), q, k, v, LONG_ENDS)


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
    for first, last in pairwise((0, *ends)):
        chunk = _run(suite, whole, whole.part(everything, slice(first, last), last))
        _same(whole, f"queries {first} to {last}", chunk, (out[:, first:last], lse[:, first:last]))
    for b in range(2):
        one = slice(b, b + 1)
        alone = _run(suite, whole, whole.part(one, everything, ends[-1]))
        _same(whole, f"sequence {b}", alone, (out[one], lse[one]))
    for parts in (((0, ends[-1]), (1, ends[-1])), whole.parts, whole.parts[2:3]):
        packed = whole.packed(parts)
        if suite.takes(whole.request(packed)):
            wanted = [torch.cat([x[b, :length] for b, length in parts]) for x in (out, lse)]
            name = f"packed sequences of lengths {[length for _, length in parts]}"
            _same(whole, name, _run(suite, whole, packed), (wanted[0], wanted[1]))


def _same(
    whole: _Prefill,
    name: str,
    found: tuple[torch.Tensor, torch.Tensor],
    wanted: tuple[torch.Tensor, torch.Tensor],
) -> None:
    for what, x, y in zip(("out", "lse"), found, wanted, strict=True):
        if not torch.equal(x, y):
            count, kind = int((x != y).sum()), f"{whole.qkv_format} and {whole.q.dtype}"
            checks.fail(
                f"{what} of {name} ({kind}): {count} of {x.numel()} elements have other bits than in the prefill of "
                "the whole batch; refuse batch_invariant=True"
            )
