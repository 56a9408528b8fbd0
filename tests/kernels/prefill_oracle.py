"""Attention by its definition in float64, one sequence and head after the other: what the prefill kernels must give.

It shares no code with the library. A call is described by lengths; the tensors hold whatever the storage says in rows
that belong to no sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_TO_BSHD = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}


@dataclass(frozen=True)
class Call:
    """A call without its tensors.

    Attributes:
        qkv_format: the layout.
        starts_q, starts_kv: first row of each sequence; all 0 in a dense layout.
        lengths_q, lengths_kv: tokens of each sequence.
        left, right: tokens seen around the diagonal, -1 unlimited.
        bottom_right: the diagonal ends at the last query and key.
        scale: of the scores.
    """

    qkv_format: str
    starts_q: tuple[int, ...]
    starts_kv: tuple[int, ...]
    lengths_q: tuple[int, ...]
    lengths_kv: tuple[int, ...]
    left: int
    right: int
    bottom_right: bool
    scale: float

    def seen(self, sequence: int) -> torch.Tensor:
        """Which query sees which key: bool [length_q, length_kv]."""
        queries, keys = self.lengths_q[sequence], self.lengths_kv[sequence]
        ahead = torch.arange(keys)[None, :] - torch.arange(queries)[:, None]  # keys ahead of the diagonal
        if self.bottom_right:
            ahead = ahead - (keys - queries)
        seen = torch.ones(queries, keys, dtype=torch.bool)
        if self.left >= 0:
            seen &= ahead >= -self.left
        if self.right >= 0:
            seen &= ahead <= self.right
        return seen

    def rows(self, x: torch.Tensor, sequence: int, side: str) -> torch.Tensor:
        """One sequence of x as [H, tokens, D], a view."""
        first = (self.starts_q if side == "q" else self.starts_kv)[sequence]
        count = (self.lengths_q if side == "q" else self.lengths_kv)[sequence]
        if self.qkv_format != "thd":
            x = x.permute(_TO_BSHD[self.qkv_format])[sequence]
        return x[first : first + count].transpose(0, 1)

    def lse_rows(self, lse: torch.Tensor, sequence: int) -> torch.Tensor:
        """One sequence of lse as [H, tokens], a view."""
        if self.qkv_format != "thd":
            return lse[sequence, :, : self.lengths_q[sequence]]
        first = self.starts_q[sequence]
        return lse[:, first : first + self.lengths_q[sequence]]


def attend(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, lse, dq, dk, dv in float64. Rows of no sequence, and queries without a key: 0, and -inf in lse."""
    heads_axis = 1 if call.qkv_format == "bhsd" else -2
    heads, group = q.shape[heads_axis], q.shape[heads_axis] // k.shape[heads_axis]
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64)
    if call.qkv_format == "thd":
        lse = torch.full((heads, q.shape[0]), -torch.inf, dtype=torch.float64)
    else:
        batch, tokens, _, _ = q.permute(_TO_BSHD[call.qkv_format]).shape
        lse = torch.full((batch, heads, tokens), -torch.inf, dtype=torch.float64)
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float64) for x in (q, k, v))
    for b in range(len(call.lengths_q)):
        seen = call.seen(b)
        some = seen.any(1)
        for h in range(heads):
            mine = [call.rows(x, b, side)[i].double() for x, side, i in ((q, "q", h), (k, "kv", h // group))]
            qs, ks = mine
            vs, gs = call.rows(v, b, "kv")[h // group].double(), call.rows(dout, b, "q")[h].double()
            scores = (qs @ ks.T * call.scale)[some].masked_fill(~seen[some], -torch.inf)
            total = torch.logsumexp(scores, 1)
            p = torch.exp(scores - total[:, None])
            call.rows(out, b, "q")[h][some] = p @ vs
            call.lse_rows(lse, b)[h][some] = total
            dp = gs[some] @ vs.T
            delta = (p * dp).sum(1)
            if dlse is not None:
                delta = delta - call.lse_rows(dlse, b)[h][some].double()
            ds = p * (dp - delta[:, None]) * call.scale
            call.rows(dq, b, "q")[h][some] = ds @ ks
            call.rows(dk, b, "kv")[h // group].add_(ds.T @ qs[some])
            call.rows(dv, b, "kv")[h // group].add_(p.T @ gs[some])
    return out, lse, dq, dk, dv
