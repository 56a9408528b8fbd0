"""Attention on the CPU: sequences of equal lengths run as one batch, so neither padding nor a padding mask is needed.

TransformerEngine's unfused attention unpacks ``thd`` to a padded batch and builds the full mask instead.

A batch is computed in parts, because the kernel needs float32 copies of its inputs with one head dim for Q, K and V.
Parts are small compared with the call, so that memory stays close to that of PyTorch's SDPA, and fit a CPU cache, but
are large enough that the overhead per part does not matter.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.layout import empty_output, lse_dtype
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, Gradients, Residuals
from mla_plugin.plugins.sdpa import blocked, flash, small, tiles
from mla_plugin.plugins.sdpa.groups import Group, groups
from mla_plugin.plugins.sdpa.ragged import is_ragged
from mla_plugin.plugins.sdpa.terms import ScoreTerms

_T = torch.Tensor
Inputs: TypeAlias = tuple[_T, _T, _T, _T, _T, _T, _T | None]
"""q, k, v, out, lse, dout and dlse of a part."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of the parts of a call.

    Attributes:
        count: number of parts, within the bounds.
        least, most: bounds of the elements of a part's largest tensor; a single sequence or head may have more.
    """

    count: int
    least: int
    most: int


COPIED = Sizes(16, 1 << 16, 1 << 18)
"""For 16-bit inputs, which are converted to float32, and unequal head dims, which are padded."""
AS_GIVEN = Sizes(8, 1 << 19, 1 << 19)
"""For other inputs, of which only the queries are copied."""
TINY = 1 << 19
"""A call whose largest tensor has no more elements is one part; its copies are at most 2 MB each. Split up, the forward
takes 1.6 times as long at 64 tokens of 8 heads, 192/128, and 1.15 times at 2 x 128."""
SHARE_OF_CALL = 16
"""A part below 1/16 of the call takes less than half of the memory of PyTorch's SDPA."""
ROWS_PER_THREAD = 256
"""The flash kernel's forward is parallel over heads and blocks of at most so many queries, its backward over heads."""


def _sizes_of(request: AttentionRequest) -> Sizes:
    """The sizes of the parts of a request."""
    is_copied = request.dtype.itemsize < 4 or request.head_dim_qk != request.head_dim_v
    return COPIED if is_copied else AS_GIVEN


@functools.lru_cache(maxsize=4096)
def _terms_of_tiny(request: AttentionRequest, softmax_scale: float) -> ScoreTerms | None:
    """The terms if the whole call is one part for ``small`` or the flash kernel; else None.

    Skips finding the groups, which takes as long as the kernel of such a small call.
    """
    if is_ragged(request):
        return None
    tokens_q, tokens_kv = request.max_seqlen_q * request.num_heads, request.max_seqlen_kv * request.num_kv_heads
    of_keys = tokens_kv * max(request.head_dim_qk, request.head_dim_v)
    largest = request.batch_size * max(tokens_q * request.head_dim_qk, of_keys)
    is_one = largest <= TINY or small.takes(request)
    return ScoreTerms(softmax_scale, request.band) if is_one else None


def _parts(
    request: AttentionRequest, tensors: AttentionTensors, whole: list[Group], *, use_kernel: bool, is_backward: bool
) -> Iterator[Group]:
    """The groups split into parts; with ``blocked`` the same in both passes, because dropout is drawn per part."""
    num_heads, num_kv_heads = request.num_heads, request.num_kv_heads
    limit = _limit(request, tensors)
    for group in whole:
        len_q = group.q.length
        elements = _elements(request, group)
        if elements * len(group.q.firsts) <= limit:
            yield group
        elif not use_kernel or elements <= limit:
            yield from group.by_sequences(limit // elements)
        else:
            busy = num_heads // num_kv_heads * (1 if is_backward else -(-len_q // ROWS_PER_THREAD))
            heads = max(limit * num_kv_heads // elements, -(-torch.get_num_threads() // busy))
            for sequences in group.by_sequences(heads // num_kv_heads):
                if len(sequences.q.firsts) > 1:
                    yield sequences
                else:
                    yield from sequences.by_heads(heads, num_heads, num_kv_heads)


def _limit(request: AttentionRequest, tensors: AttentionTensors) -> int:
    """Most elements of a part's largest tensor, unless a single sequence or head has more."""
    sizes = _sizes_of(request)
    return min(max(_largest(tensors) // sizes.count, sizes.least), sizes.most)


def _most_at_once(request: AttentionRequest, tensors: AttentionTensors) -> int:
    """A part with more elements is computed in tiles: its copies would be large compared with the call."""
    return max(_limit(request, tensors), _largest(tensors) // SHARE_OF_CALL)


def _largest(tensors: AttentionTensors) -> int:
    return max(tensors.q.numel(), tensors.k.numel(), tensors.v.numel())


def _elements(request: AttentionRequest, group: Group) -> int:
    """Elements of one sequence of a group in its largest tensor."""
    heads_q = range(request.num_heads)[group.heads_q or slice(None)]
    heads_kv = range(request.num_kv_heads)[group.heads_kv or slice(None)]
    tokens = max(group.q.length * len(heads_q), group.kv.length * len(heads_kv))
    return tokens * max(request.head_dim_qk, request.head_dim_v)


def _as_given(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """A result in the dtype of the inputs, contiguous."""
    return x.contiguous() if x.dtype == q.dtype else x.to(dtype=q.dtype, memory_format=torch.contiguous_format)


def _is_one(parts: list[Group], q: torch.Tensor, k: torch.Tensor) -> bool:
    """The only part is the whole call, so its results are the call's."""
    return len(parts) == 1 and parts[0].q.is_all_of(q) and parts[0].kv.is_all_of(k)


def _have_all(whole: list[Group], q: torch.Tensor, k: torch.Tensor) -> bool:
    """The groups contain every query and every key."""
    return (
        sum(group.q.num_tokens for group in whole) == q.shape[0] * q.shape[2]
        and sum(group.kv.num_tokens for group in whole) == k.shape[0] * k.shape[2]
    )


def _small_forward(request: AttentionRequest, tensors: AttentionTensors, terms: ScoreTerms) -> AttentionOutput:
    layout = request.layout
    q, k, v = layout.to_bhsd(tensors.q), layout.to_bhsd(tensors.k), layout.to_bhsd(tensors.v)
    if q.shape[2] == 1:
        row, lse = small.forward_of_one(q, k, v, terms.softmax_scale)
        return AttentionOutput(_as_given(layout.from_bhsd(row), q), lse)
    out = empty_output(tensors.q, v.shape[3])
    rows = layout.to_bhsd(out)
    if not (parts := small.parts(q)):
        return AttentionOutput(out, small.forward(q, k, v, terms, rows))
    lse = q.new_empty(q.shape[:3], dtype=lse_dtype(q.dtype))
    for part in parts:
        lse[part] = small.forward(q[part], k[part], v[part], terms, rows[part])
    return AttentionOutput(out, lse)


def _small_backward(
    request: AttentionRequest, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None, terms: ScoreTerms
) -> Gradients:
    """``dout`` is [n, H, S_q, head_dim_v]."""
    tensors, layout = residuals.tensors, request.layout
    inputs = (tensors.q, tensors.k, tensors.v)
    q, k, v, out = (layout.to_bhsd(x) for x in (*inputs, residuals.out))
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs)
    rows_q, rows_k, rows_v = layout.to_bhsd(dq), layout.to_bhsd(dk), layout.to_bhsd(dv)
    lse = residuals.lse
    parts = small.parts(q)
    if not parts:
        small.backward(q, k, v, out, lse, dout, dlse, terms, rows_q, rows_k, rows_v)
    for part in parts:
        given = (q[part], k[part], v[part], out[part], lse[part], dout[part], None if dlse is None else dlse[part])
        small.backward(*given, terms, rows_q[part], rows_k[part], rows_v[part])
    return Gradients(dq, dk, dv)


def forward(request: AttentionRequest, tensors: AttentionTensors, *, use_kernel: bool) -> AttentionOutput:
    """Attention of every sequence, by the flash kernel or by blocked mathematics."""
    layout = request.layout
    q, k, v = layout.to_bhsd(tensors.q), layout.to_bhsd(tensors.k), layout.to_bhsd(tensors.v)
    terms = _terms_of_tiny(request, tensors.softmax_scale) if use_kernel else None
    if terms is not None and small.takes(request):
        return _small_forward(request, tensors, terms)
    if terms is not None:
        wide, lse = flash.wide_forward(q, k, v, terms)
        out = layout.from_bhsd(wide)
        if (head_dim_v := v.shape[3]) < wide.shape[3]:
            out = torch.narrow_copy(out, -1, 0, head_dim_v)  # in half the time of a slice made contiguous
        return AttentionOutput(_as_given(out, q), lse.contiguous())
    terms = ScoreTerms.of(request, tensors, wants_dbias=False)
    route = flash.forward if use_kernel else blocked.forward
    whole = list(groups(request, tensors))
    parts = list(_parts(request, tensors, whole, use_kernel=use_kernel, is_backward=False))
    most = _most_at_once(request, tensors) if use_kernel else sys.maxsize
    if _is_one(parts, q, k) and _elements(request, parts[0]) <= most:
        part_out, part_lse = route(parts[0].queries(q), parts[0].keys(k), parts[0].keys(v), terms)
        out = _as_given(layout.from_bhsd(parts[0].q.joined(part_out)), q)
        lse = parts[0].q.joined(part_lse).contiguous()
    else:
        out, lse = empty_output(tensors.q, v.shape[-1]), q.new_empty(q.shape[:-1], dtype=lse_dtype(q.dtype))
        if not _have_all(whole, q, k):
            out.zero_()
            lse.fill_(-torch.inf)
        out_rows = layout.to_bhsd(out)
        for part in parts:
            if _elements(request, part) > most:
                inputs = (part.queries(q), part.keys(k), part.keys(v))
                tiles.forward(*inputs, terms, part.queries(out_rows), part.queries(lse))
                continue
            results = route(part.queries(q), part.keys(k), part.keys(v), terms.of_part(part))
            part.write_queries(out_rows, results[0])
            part.write_queries(lse, results[1])
            del results  # before the next part allocates its own
    return AttentionOutput(out, lse.squeeze(0) if layout.is_packed else lse)


def backward(
    request: AttentionRequest, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None, *, use_kernel: bool
) -> Gradients:
    """Gradients of every sequence, by the flash kernel or by blocked mathematics."""
    tensors, layout = residuals.tensors, request.layout
    inputs = (tensors.q, tensors.k, tensors.v)
    q, k, v, out, dout = [layout.to_bhsd(x) for x in (*inputs, residuals.out, dout)]
    tiny = _terms_of_tiny(request, tensors.softmax_scale) if use_kernel else None
    if tiny is not None:
        if small.takes(request):
            return _small_backward(request, residuals, dout, dlse, tiny)
        results = flash.backward(q, k, v, out, residuals.lse, dout, dlse, tiny)
        return Gradients(*[_as_given(layout.from_bhsd(x), q) for x in results])
    lse = residuals.lse.unsqueeze(0) if layout.is_packed else residuals.lse
    dlse = dlse.unsqueeze(0) if layout.is_packed and dlse is not None else dlse
    terms = ScoreTerms.of(request, tensors, wants_dbias=request.bias_requires_grad)
    whole = list(groups(request, tensors))
    parts = list(_parts(request, tensors, whole, use_kernel=use_kernel, is_backward=True))

    route = flash.backward if use_kernel else blocked.backward

    def inputs_of(part: Group) -> Inputs:
        of_keys, of_q = (part.keys(k), part.keys(v)), (part.queries(out), part.queries(lse), part.queries(dout))
        return (part.queries(q), *of_keys, *of_q, None if dlse is None else part.queries(dlse))

    most = _most_at_once(request, tensors) if use_kernel else sys.maxsize
    if _is_one(parts, q, k) and _elements(request, parts[0]) <= most:
        results = route(*inputs_of(parts[0]), terms.of_part(parts[0]))
        places = (parts[0].q, parts[0].kv, parts[0].kv)
        found = [_as_given(layout.from_bhsd(p.joined(x)), q) for p, x in zip(places, results, strict=True)]
    else:
        make = torch.empty_like if _have_all(whole, q, k) else torch.zeros_like
        found = [make(x, memory_format=torch.contiguous_format) for x in inputs]
        dq, dk, dv = (layout.to_bhsd(x) for x in found)
        for part in parts:
            if _elements(request, part) > most:
                tiles.backward(*inputs_of(part), terms, (part.queries(dq), part.keys(dk), part.keys(dv)))
                continue
            results = route(*inputs_of(part), terms.of_part(part))
            part.write_queries(dq, results[0])
            part.write_keys(dk, results[1])
            part.write_keys(dv, results[2])
            del results
    return Gradients(found[0], found[1], found[2], dbias=terms.dbias_like(tensors.bias))
