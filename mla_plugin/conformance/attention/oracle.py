"""Attention and its gradients in float64, each with the expected rounding error; see ``budget``.

The formulas are explicit, one sequence at a time, so that the backward can get any out and lse: in context parallelism
those of all keys, although it sees only some of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.conformance.budget import Roundings, Yardstick
from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.reference import _of_sequence, _spans, visibility


@dataclass
class _Accumulated:
    """A result that sequences write into: its values and its variance."""

    exact: torch.Tensor
    variance: torch.Tensor

    @classmethod
    def like(cls, x: torch.Tensor, fill: float = 0.0) -> _Accumulated:
        return cls(
            torch.full(x.shape, fill, dtype=torch.float64, device=x.device),
            torch.zeros(x.shape, dtype=torch.float64, device=x.device),
        )

    @property
    def yardstick(self) -> Yardstick:
        return Yardstick(self.exact, self.variance.sqrt())


@dataclass(frozen=True)
class _Sequence:
    """One sequence's part of a call in float64: q [H, S_q, D], k and v of every query head, scores and softmax.

    Attributes:
        row, rows, columns: where it lies in [B, H, S, D].
        weights: softmax of the scores given an lse, [H, S_q, S_kv].
        score_error: standard deviation of a score's error; ``sum_error`` is the accumulator's part of it.
        keep: factor of each weight: 1 without dropout.
    """

    row: int
    rows: slice
    columns: slice
    index: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scores: torch.Tensor
    visible: torch.Tensor
    score_error: torch.Tensor
    sum_error: torch.Tensor
    keep: torch.Tensor

    def weights(self, lse: torch.Tensor) -> torch.Tensor:
        """exp(score - lse) where a key is seen."""
        finite = lse.masked_fill(lse.isneginf(), 0.0)[..., None]
        return (self.scores - finite).exp().masked_fill(~self.visible | lse.isneginf()[..., None], 0.0)


@dataclass(frozen=True)
class Oracle:
    """The expected results of one call.

    Args:
        request: of the call.
        tensors: of the call; padded positions are never read.
        keeps: for each sequence the factors of its weights with dropout, [H, S_q, S_kv]: 0 or 1 / (1 - dropout_p).
    """

    request: AttentionRequest
    tensors: AttentionTensors
    keeps: Sequence[torch.Tensor] | None = None
    _parts: list[_Sequence] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self._parts.extend(self._sequences())

    @property
    def _roundings(self) -> Roundings:
        return Roundings.of(self.request.dtype)

    def _sequences(self) -> Iterator[_Sequence]:
        request, tensors, roundings = self.request, self.tensors, self._roundings
        q, k, v = (request.layout.to_bhsd(x.detach()) for x in (tensors.q, tensors.k, tensors.v))
        spans_q = _spans(request, q.shape[2], tensors.cu_seqlens_q, tensors.cu_seqlens_q_padded)
        spans_kv = _spans(request, k.shape[2], tensors.cu_seqlens_kv, tensors.cu_seqlens_kv_padded)
        group, scale = request.num_heads // request.num_kv_heads, tensors.softmax_scale
        for b, ((start_q, len_q), (start_kv, len_kv)) in enumerate(zip(spans_q, spans_kv, strict=True)):
            row = 0 if request.layout.is_packed else b
            rows, columns = slice(start_q, start_q + len_q), slice(start_kv, start_kv + len_kv)
            q_b, k_b, v_b = q[row, :, rows].double(), k[row, :, columns].double(), v[row, :, columns].double()
            k_b, v_b = k_b.repeat_interleave(group, 0), v_b.repeat_interleave(group, 0)
            visible = visibility(request, len_q, len_kv, device=q.device)
            if tensors.attention_mask is not None:
                visible = visible & ~_of_sequence(tensors.attention_mask, request, q, k, b)[:, :len_q, :len_kv]
            visible = visible.expand(request.num_heads, len_q, len_kv)
            product = q_b @ k_b.mT
            bias = torch.zeros((), dtype=torch.float64, device=q.device)
            if tensors.bias is not None:
                bias = _of_sequence(tensors.bias.detach(), request, q, k, b)[:, :len_q, :len_kv].double()
            inner, outer = (bias, 0.0 * bias) if request.bias_type == "pre_scale_bias" else (0.0 * bias, bias)
            scores = (product + inner) * scale + outer
            sums = roundings.sum * (scale * (q_b.abs() @ k_b.abs().mT) + bias.abs() + scores.abs())
            rounded = roundings.step * ((product * scale).abs() + scores.abs())
            yield _Sequence(
                *(row, rows, columns, b, q_b, k_b, v_b, scores, visible),
                score_error=(rounded.square() + sums.square()).sqrt(),
                sum_error=sums,
                keep=q_b.new_ones(()) if self.keeps is None else self.keeps[b],
            )

    def forward(self) -> tuple[Yardstick, Yardstick]:
        """out in the layout of the request, and lse; rows that see no key are 0 and -inf."""
        request, roundings = self.request, self._roundings
        q, v = self.tensors.q, self.tensors.v
        out = _Accumulated.like(q.new_empty((*q.shape[:-1], v.shape[-1])))
        exact, variance = (request.layout.to_bhsd(x) for x in (out.exact, out.variance))
        lse = _Accumulated.like(request.layout.to_bhsd(q)[..., 0], -torch.inf)
        for part in self._parts:
            masked = part.scores.masked_fill(~part.visible, -torch.inf)
            sees_a_key = part.visible.any(-1)
            part_lse = masked.logsumexp(-1) if masked.shape[-1] else masked.new_full(masked.shape[:-1], -torch.inf)
            p, keep = part.weights(part_lse), part.keep
            kept = p * keep
            part_out = kept @ part.v
            spread = p.square() * part.score_error.square()
            rounded = 2 * roundings.step**2 * kept.square() + roundings.tiny**2 * part.visible.double()
            total = rounded @ part.v.square() + roundings.step**2 * part_out.square()
            total += (spread * keep.square()) @ part.v.square() - 2 * part_out * ((spread * keep) @ part.v)
            total += part_out.square() * (spread.sum(-1, keepdim=True))
            total = total.clamp(min=0) + (roundings.sum_of(p.shape[-1]) * (kept @ part.v.abs())).square()
            finite = part_lse.abs().nan_to_num(posinf=0.0)
            common = (
                roundings.sum * (1 + finite)[..., None]
            )  # of exp(score - lse), when nothing divides by the sum again
            total += (common * part_out).square() + roundings.tiny**2
            exact[part.row, :, part.rows] = part_out
            variance[part.row, :, part.rows] = total * sees_a_key[..., None]
            lse.exact[part.row, :, part.rows] = part_lse
            part_error = (p * part.sum_error).sum(-1) + roundings.sum * (finite + 1)
            lse.variance[part.row, :, part.rows] = part_error.square() * sees_a_key
        whole = lse.yardstick
        if request.layout.is_packed:
            whole = Yardstick(whole.exact.squeeze(0), whole.sigma.squeeze(0))
        return out.yardstick, whole

    def backward(
        self, out: Yardstick, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None
    ) -> dict[str, Yardstick]:
        """dq, dk, dv and, when the request asks for it, dbias, given an out and an lse that need not be the call's."""
        request, tensors = self.request, self.tensors
        layout = request.layout
        views = [layout.to_bhsd(x) for x in (out.exact, out.sigma, dout)]
        if layout.is_packed:
            lse, dlse = lse[None], None if dlse is None else dlse[None]
        found = {name: _Accumulated.like(getattr(tensors, name)) for name in ("q", "k", "v")}
        wants_bias = request.bias_requires_grad and tensors.bias is not None
        if wants_bias:
            found["bias"] = _Accumulated.like(tensors.bias)  # type: ignore[arg-type]
        for part in self._parts:
            at = (part.row, slice(None), part.rows)
            part_out, out_error, part_dout = (x[at].double() for x in views)
            part_lse = lse[at].double()
            part_dlse = torch.zeros_like(part_lse) if dlse is None else dlse[at].double()
            part_dlse = part_dlse.masked_fill(part_lse.isneginf(), 0.0)  # where it may be infinite
            step = _Backward(part, self, part_out, out_error, part_lse, part_dout, part_dlse)
            for name, (exact, variance) in step.gradients().items():
                target, columns = found[name], part.rows if name == "q" else part.columns
                layout.to_bhsd(target.exact)[part.row, :, columns] = exact
                layout.to_bhsd(target.variance)[part.row, :, columns] = variance
            if wants_bias:
                step.add_bias(found["bias"])
        if wants_bias:
            bias = found["bias"]
            bias.variance += (self._roundings.step * bias.exact).square() + self._roundings.tiny**2
        return {f"d{name}": x.yardstick for name, x in found.items()}


class _Backward:
    """The gradients of one sequence and their variances."""

    def __init__(
        self,
        part: _Sequence,
        oracle: Oracle,
        out: torch.Tensor,
        out_error: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor,
    ) -> None:
        self.part, self.roundings = part, oracle._roundings
        self.request, self.scale, self.dout = oracle.request, oracle.tensors.softmax_scale, dout
        r, sums = self.roundings.step, self.roundings.sum
        self.sees = (part.visible & ~lse.isneginf()[..., None]).any(-1, keepdim=True)
        self.p = part.weights(lse)
        self.kept, keep = self.p * part.keep, part.keep
        dp = dout @ part.v.mT * keep
        delta = (dout * out).sum(-1) - dlse
        delta_error = ((dout * out_error).square().sum(-1) + (r * delta).square() + (r * dlse).square()).sqrt()
        delta_error = delta_error + sums * ((dout * out).abs().sum(-1) + dlse.abs())
        self.ds = self.p * (dp - delta[..., None])
        exponent = (
            2 * r**2 + part.score_error.square() + (sums * (1 + lse.abs().nan_to_num(posinf=0.0)[..., None])) ** 2
        )
        tiny = self.roundings.tiny**2 * part.visible.double()
        self.p_variance = self.p.square() * exponent + tiny
        dp_error = (r * dp).square() + (sums * (dout.abs() @ part.v.abs().mT) * keep).square()
        self.own = self.p_variance * (dp - delta[..., None]).square() + self.p.square() * dp_error
        # the score's gradient may be rounded before or after the scale, which near 0 makes a difference
        self.own = self.own + 2 * (r * self.ds).square() + tiny * max(1.0, self.scale**-2)
        self.delta_variance = (delta_error.square())[..., None]
        self.ds_variance = self.own + self.p.square() * self.delta_variance

    def gradients(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Name of the input to its gradient and the variance of that."""
        part, scale = self.part, self.scale
        dq = scale * (self.ds @ part.k)
        variance = scale**2 * (self.own @ part.k.square() + self.delta_variance * (self.p @ part.k).square())
        queries, keys = self.ds.shape[-2:]
        variance = variance + self._of_sums(dq, scale * (self.ds.abs() @ part.k.abs()), keys)
        dk = scale * (self.ds.mT @ part.q)
        dk_variance = scale**2 * (self.ds_variance.mT @ part.q.square())
        dk_variance = dk_variance + self._of_sums(dk, scale * (self.ds.abs().mT @ part.q.abs()), queries)
        dv = self.kept.mT @ self.dout
        dv_variance = (self.p_variance * part.keep.square()).mT @ self.dout.square()
        dv_variance = dv_variance + self._of_sums(dv, self.kept.mT @ self.dout.abs(), queries)
        return {
            "q": (dq, variance * self.sees),
            "k": self._of_groups(dk, dk_variance),
            "v": self._of_groups(dv, dv_variance),
        }

    def _of_sums(self, result: torch.Tensor, terms: torch.Tensor, count: int) -> torch.Tensor:
        roundings = self.roundings
        return 2 * (roundings.step * result).square() + (roundings.sum_of(count) * terms).square() + roundings.tiny**2

    def _of_groups(self, x: torch.Tensor, variance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum over the query heads that share a key-value head."""
        heads = (self.request.num_kv_heads, -1)
        x, variance = x.unflatten(0, heads).sum(1), variance.unflatten(0, heads).sum(1)
        return x, variance + (self.roundings.step * x).square()

    def add_bias(self, bias: _Accumulated) -> None:
        """The gradient of the bias, summed over the dimensions that it is broadcast along."""
        factor = self.scale if self.request.bias_type == "pre_scale_bias" else 1.0
        rows, columns = self.ds.shape[-2:]
        whole = self.ds_variance + (self.roundings.sum * self.ds).square()
        for target, x in ((bias.exact, factor * self.ds), (bias.variance, factor**2 * whole)):
            whole_target = target.view((1,) * (4 - target.dim()) + target.shape)
            sequence = whole_target[min(self.part.index, whole_target.shape[0] - 1)]
            for axis in range(3):
                x = x.sum(axis, keepdim=True) if sequence.shape[axis] == 1 else x
            sequence[:, : min(rows, sequence.shape[1]), : min(columns, sequence.shape[2])] += x
