"""The two passes: for each group of heads, expand K and V and run attention on the chosen backend.

A call is split into parts, each one attention call. A plain call has one part. A rank of a context-parallel group has
one for each of its chunks of queries, over the keys that the chunk sees.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.latent import LatentSizes
from mla_plugin.arguments.layout import lse_dtype
from mla_plugin.arguments.options import CallOptions
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, Residuals
from mla_plugin.operations.attention import compute
from mla_plugin.operations.attention.known import Known, known_of
from mla_plugin.operations.latent.expansion import Buffers, Expansion, Heads, groups_of_heads


@dataclass(frozen=True)
class Part:
    """One call of attention that each group of heads makes.

    Attributes:
        request: the call's options, or a request whose number of heads is replaced by that of a group.
        lengths: cu_seqlens_* by name, if any.
        queries: its queries along the tokens of q; None for all. Packed parts take all of q, and their lengths select
            the rows; no two parts have a row in common.
        keys: its keys along the tokens; None for all.
    """

    request: CallOptions | AttentionRequest
    lengths: Mapping[str, torch.Tensor | None] = field(default_factory=dict)
    queries: slice | None = None
    keys: slice | None = None

    def of_heads(self, heads: int) -> CallOptions | AttentionRequest:
        """The request for so many heads."""
        if isinstance(self.request, CallOptions):
            return self.request
        return self.request.replace(num_heads=heads, num_kv_heads=heads)


@dataclass(frozen=True)
class Call:
    """The inputs of a pass except the latents, which may have to be gathered first.

    Attributes:
        q: [..., H, qk_nope_head_dim + qk_rope_head_dim], contiguous in its last dimension.
        w_uk, w_uv: as in ``LatentTensors``.
        softmax_scale: multiplies the scores.
        sizes: of q, the latents and the weights.
        leading: the leading dimensions of the latents, such as (B, S_kv).
        parts: see ``Part``.
    """

    q: torch.Tensor
    w_uk: torch.Tensor
    w_uv: torch.Tensor
    softmax_scale: float
    sizes: LatentSizes
    leading: tuple[int, ...]
    parts: tuple[Part, ...]

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        w_uk: torch.Tensor,
        w_uv: torch.Tensor,
        softmax_scale: float,
        sizes: LatentSizes,
        leading: tuple[int, ...],
        parts: tuple[Part, ...],
    ) -> Call:
        """From a q with any strides."""
        q = q if q.stride(-1) == 1 else q.contiguous()
        return cls(q, w_uk, w_uv, softmax_scale, sizes, leading, parts)

    @property
    def tokens(self) -> int:
        """Number of rows of the latents of all sequences."""
        return math.prod(self.leading)

    def attention_tensors(self, part: Part, heads: Heads, buffers: Buffers) -> AttentionTensors:
        """The tensors of one part and one group of heads, as views."""
        layout, sizes = self.sizes.layout, self.sizes
        q = self.queries_of(part, heads, self.q)
        buffers = buffers.of_heads(sizes, heads.count)
        k, v = (
            _along(layout.tokens, x.view(*self.leading, heads.count, width).movedim(-2, layout.heads), part.keys)
            for x, width in ((buffers.k, sizes.head_dim_qk), (buffers.v, sizes.head_dim_v))
        )
        return AttentionTensors(q, k, v, self.softmax_scale, **part.lengths)

    def queries_of(self, part: Part, heads: Heads, x: torch.Tensor) -> torch.Tensor:
        """A part's queries and a group's heads of a tensor in q's layout."""
        layout = self.sizes.layout
        return _along(layout.tokens, x.narrow(layout.heads, heads.first, heads.count), part.queries)

    def rows_of(self, part: Part, heads: Heads, lse: torch.Tensor) -> torch.Tensor:
        """The same of a tensor in lse's layout."""
        return lse[..., heads.slice, slice(None) if part.queries is None else part.queries]

    def flat(self, x: torch.Tensor) -> torch.Tensor:
        """dK or dV of all the keys as [tokens, heads * width]."""
        return x.movedim(self.sizes.layout.heads, -2).flatten(-2).flatten(0, -2)


def _along(axis: int, x: torch.Tensor, where: slice | None) -> torch.Tensor:
    return x if where is None else x[(slice(None),) * axis + (where,)]


class Decision(NamedTuple):
    """The backends of a call, chosen in the forward and kept for the backward. It holds no tensor."""

    groups: tuple[Heads, ...]
    known: dict[tuple[int, int], Known]
    """By the number of heads and the part."""

    def buffers(self, call: Call) -> Buffers:
        """Memory for K and V of the largest group."""
        return Buffers.of(call.q, call.tokens, call.sizes, max(heads.count for heads in self.groups))


def of_groups(
    requests: Iterable[AttentionRequest], sizes: LatentSizes, tokens: int, dtype: torch.dtype
) -> tuple[AttentionRequest, ...]:
    """The distinct requests of all groups of heads; ``tokens``: number of tokens that are expanded."""
    counts = dict.fromkeys(heads.count for heads in groups_of_heads(sizes, tokens, dtype))
    return tuple(asked.replace(num_heads=count, num_kv_heads=count) for asked in requests for count in counts)


def decide(call: Call, backend: str | None) -> Decision:
    """Check and resolve every part for every group size, before anything runs.

    Raises:
        ValueError, TypeError: an argument is invalid; the message says what was given and what is expected.
        NoBackendError: no backend takes a part; the message lists every backend with every reason.
    """
    decision = Decision(tuple(groups_of_heads(call.sizes, call.tokens, call.q.dtype)), {})
    buffers = decision.buffers(call)
    for heads in {heads.count: heads for heads in decision.groups}.values():
        for index, part in enumerate(call.parts):
            tensors = call.attention_tensors(part, heads, buffers)
            decision.known[heads.count, index] = known_of(tensors, part.of_heads(heads.count), backend)
    return decision


def forward(call: Call, decision: Decision, x: torch.Tensor) -> AttentionOutput:
    """out and lse, as ``attention`` returns them, in new memory.

    Args:
        call: the call.
        decision: its backends.
        x: the latents, [tokens, R + Dr].
    """
    is_whole = len(decision.groups) == len(call.parts) == 1
    q, sizes = call.q, call.sizes
    out = lse = None
    if not is_whole:
        out = q.new_empty(*q.shape[:-1], sizes.head_dim_v)
        lse = q.new_empty(sizes.layout.lse_shape(q.shape), dtype=lse_dtype(q.dtype))
    buffers = decision.buffers(call)
    for heads in decision.groups:
        Expansion(call.w_uk, call.w_uv, sizes, heads).expand(x, buffers.of_heads(sizes, heads.count))
        for index, part in enumerate(call.parts):
            known, tensors = decision.known[heads.count, index], call.attention_tensors(part, heads, buffers)
            vars(tensors)["kept"] = known.kept
            found = compute.forward(known, tensors)
            if out is None or lse is None:
                return found
            _put(call.queries_of(part, heads, out), found.out, part, index)
            rows = call.rows_of(part, heads, lse)
            rows.copy_(torch.maximum(rows, found.lse) if _is_added(part, index) else found.lse)
    assert out is not None
    assert lse is not None
    return AttentionOutput(out, lse)


class Wants(NamedTuple):
    """Which gradients are needed besides dq."""

    latents: bool
    weights: bool


class RowGradients(NamedTuple):
    """The results of a backward: dx [tokens, R + Dr] in float32 (float64), the others with their inputs' dtypes."""

    dq: torch.Tensor
    dx: torch.Tensor | None
    dw_uk: torch.Tensor | None
    dw_uv: torch.Tensor | None


def backward(
    call: Call,
    decision: Decision,
    x: torch.Tensor,
    output: AttentionOutput,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    wants: Wants,
) -> RowGradients:
    """The gradients, with K and V expanded again.

    Args:
        call, decision, x: as of the forward.
        output: of the forward.
        dout: gradient of out.
        dlse: gradient of lse, or None.
        wants: which gradients are needed.
    """
    q, sizes = call.q, call.sizes
    dq = q.new_empty(q.shape)
    dx = x.new_zeros(x.shape, dtype=lse_dtype(x.dtype)) if wants.latents else None
    dw_uk, dw_uv = (w.new_empty(w.shape) if wants.weights else None for w in (call.w_uk, call.w_uv))
    buffers = decision.buffers(call)
    for heads in decision.groups:
        expansion = Expansion(call.w_uk, call.w_uv, sizes, heads)
        expansion.expand(x, buffers.of_heads(sizes, heads.count))
        dk, dv = _backward_of_group(call, decision, heads, buffers, output, dout, dlse, dq)
        if dx is not None:
            expansion.add_latent_gradient(dx, dk, dv)
        if dw_uk is not None and dw_uv is not None:
            dw_uk[heads.slice], dw_uv[heads.slice] = expansion.weight_gradients(x, dk, dv)
    return RowGradients(dq, dx, dw_uk, dw_uv)


def _backward_of_group(
    call: Call,
    decision: Decision,
    heads: Heads,
    buffers: Buffers,
    output: AttentionOutput,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    dq: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dK and dV of a group, [tokens, heads * width], summed over its parts; writes dq."""
    dk = dv = None
    for index, part in enumerate(call.parts):
        known = decision.known[heads.count, index]
        residuals = Residuals(
            call.attention_tensors(part, heads, buffers),
            call.queries_of(part, heads, output.out).contiguous(),
            call.rows_of(part, heads, output.lse).contiguous(),
        )
        found = compute.backward(
            known,
            residuals,
            call.queries_of(part, heads, dout),
            None if dlse is None else call.rows_of(part, heads, dlse),
        )
        _put(call.queries_of(part, heads, dq), found[0], part, index)
        if dk is None or dv is None:
            dk, dv = (_whole(call, x, part) for x in found[1:3])
        else:
            for whole, more in ((dk, found[1]), (dv, found[2])):
                _along(call.sizes.layout.tokens, whole, part.keys).add_(more)
    assert dk is not None
    assert dv is not None
    return call.flat(dk), call.flat(dv)


def _whole(call: Call, x: torch.Tensor, part: Part) -> torch.Tensor:
    """A part's dK or dV, placed among those of all keys."""
    if part.keys is None:
        return x
    layout, sizes = call.sizes.layout, list(x.shape)
    sizes[layout.tokens] = call.leading[call.sizes.tokens_axis]
    whole = x.new_zeros(sizes)
    _along(layout.tokens, whole, part.keys).copy_(x)
    return whole


def _put(into: torch.Tensor, x: torch.Tensor, part: Part, index: int) -> None:
    if _is_added(part, index):
        into.add_(x)
    else:
        into.copy_(x)


def _is_added(part: Part, index: int) -> bool:
    """Whether the part returns all rows, with out 0, lse -inf and dq 0 in those of other parts."""
    return index > 0 and part.queries is None
