"""The parameters of the scores and weights besides q, k and v."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.mask import Band
from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.plugins.sdpa.groups import Group


@dataclass(frozen=True)
class ScoreTerms:
    """Everything that the scores and weights depend on besides q and k. Tensors belong to the current batch.

    Attributes:
        softmax_scale: multiplies the scores.
        band: causality and window.
        dropout_p: probability of dropping a weight; the others are divided by 1 - dropout_p.
        generator: of the dropout's random numbers; None without dropout.
        hidden: bool, broadcastable to [B, H, S_q, S_kv], True = masked out.
        bias: broadcastable to [B, H, S_q, S_kv].
        dbias: float32 or float64, bias's shape; the backward adds to it. None if it is not needed.
        bias_before_scale: the bias is added before the scaling.
        lens_q, lens_kv: int64 [B], true lengths on the tensors' device; None when every position counts.
    """

    softmax_scale: float
    band: Band
    dropout_p: float = 0.0
    generator: torch.Generator | None = None
    hidden: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    dbias: torch.Tensor | None = None
    bias_before_scale: bool = False
    lens_q: torch.Tensor | None = None
    lens_kv: torch.Tensor | None = None

    @classmethod
    def of(cls, request: AttentionRequest, tensors: AttentionTensors, *, wants_dbias: bool) -> ScoreTerms:
        """The terms of a whole call, masks and bias viewed as [B or 1, H or 1, S_q or 1, S_kv or 1]."""
        bias = None if request.bias_type == "no_bias" else _four_dimensional(tensors.bias)
        dtype = torch.promote_types(request.dtype, torch.float32)
        return cls(
            tensors.softmax_scale,
            request.band,
            request.dropout_p,
            _generator(request, tensors),
            _four_dimensional(tensors.attention_mask) if request.attn_mask_type == "arbitrary" else None,
            bias,
            torch.zeros_like(bias, dtype=dtype) if wants_dbias and bias is not None else None,
            request.bias_type == "pre_scale_bias",
        )

    def of_part(self, part: Group) -> ScoreTerms:
        """The terms with mask and bias limited to a part of a dense batch; dbias stays a view of the whole."""
        if self.hidden is None and self.bias is None:
            return self
        sequences = slice(part.q.firsts[0], part.q.firsts[-1] + 1)
        parts = (sequences, part.heads_q, slice(0, part.q.length), slice(0, part.kv.length))
        hidden, bias, dbias = (window(x, *parts) for x in (self.hidden, self.bias, self.dbias))
        return replace(self, hidden=hidden, bias=bias, dbias=dbias)

    def dbias_like(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        """The accumulated gradient in the caller's shape and dtype; None if it is not needed."""
        return None if self.dbias is None or bias is None else self.dbias.to(bias.dtype).view(bias.shape)


def _generator(request: AttentionRequest, tensors: AttentionTensors) -> torch.Generator | None:
    """A new generator on the tensors' device. The seed is on the CPU, so reading it does not synchronise."""
    if not request.dropout_p:
        return None
    if tensors.dropout_seed is None:
        raise ValueError(
            f"dropout_p={request.dropout_p} without dropout_seed; give an int64 [1] CPU tensor, the same to both passes"
        )
    seed = int(tensors.dropout_seed)
    return torch.Generator(tensors.q.device).manual_seed(seed ^ seed >> 32)  # the CPU's ignores the upper 32 bits


def _four_dimensional(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x[(None,) * (4 - x.dim())]


def window(x: torch.Tensor | None, *parts: slice | None) -> torch.Tensor | None:
    """View of x sliced in each leading dimension; a dimension of size 1 is kept, and None takes all of one."""
    if x is None:
        return None
    for dim, part in enumerate(parts):
        if part is not None and x.shape[dim] > 1:
            x = x.narrow(dim, part.start, part.stop - part.start)
    return x
