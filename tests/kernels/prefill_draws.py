"""Random prefill calls: every combination of layout, lengths, mask, heads and storage may come up.

``draw(seed)`` is one of them.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import torch

from mla_plugin.arguments.mask import Band
from mla_plugin.kernels.prefill.packing import Packing
from tests.kernels.prefill_oracle import Call

_LENGTHS = (0, 1, 2, 3, 5, 7, 13, 16, 17, 31, 32, 33, 37, 41)
_WINDOWS = (0, 1, 3, 7, 20, 100, 2**31 - 1)
_HEAD_DIMS = ((8, 8), (24, 16), (48, 24), (16, 48), (96, 64), (32, 80))
_AXES = {"bshd": ("b", "s", "h"), "sbhd": ("s", "b", "h"), "bhsd": ("b", "h", "s"), "thd": ("s", "h")}


@dataclass(frozen=True)
class Draw:
    """One call with its tensors: q, k, v, dout, dlse or None, and how they lie in memory."""

    call: Call
    packing: Packing
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None

    def outside(self, shape: torch.Size, side: str) -> torch.Tensor:
        """Which elements of a tensor of this shape lie in rows that belong to no sequence."""
        found = torch.ones(shape, dtype=torch.bool)
        for b in range(len(self.call.lengths_q)):
            self.call.rows(found, b, side)[...] = False
        return found

    def without_keys(self, shape: torch.Size) -> torch.Tensor:
        """Which elements of q or dout lie in rows of queries that see no key, or of no query at all."""
        found = torch.ones(shape, dtype=torch.bool)
        for b in range(len(self.call.lengths_q)):
            self.call.rows(found, b, "q")[...] = ~self.call.seen(b).any(1)[None, :, None]
        return found

    def outside_lse(self, shape: torch.Size) -> torch.Tensor:
        """The same as ``outside`` for lse."""
        found = torch.ones(shape, dtype=torch.bool)
        for b in range(len(self.call.lengths_q)):
            self.call.lse_rows(found, b)[...] = False
        return found

    def lse_without_keys(self, shape: torch.Size) -> torch.Tensor:
        """The same as ``without_keys`` for lse."""
        found = torch.ones(shape, dtype=torch.bool)
        for b in range(len(self.call.lengths_q)):
            self.call.lse_rows(found, b)[...] = ~self.call.seen(b).any(1)
        return found


def _stored(rng: random.Random, shape: tuple[int, ...], any_last: bool, heads_axis: int) -> torch.Tensor:
    """Random values of this shape, lying in memory in one of many ways."""
    *leading, width = shape
    way = rng.choice(("plain", "plain", "wide", "shifted", "permuted", "gaps", "expanded", "last"))
    generator = torch.Generator().manual_seed(rng.randrange(2**31))

    def values(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    if way == "wide":
        return values(*leading, width + 8)[..., 3 : 3 + width]
    if way == "shifted":
        return values(torch.Size(shape).numel() + 1)[1:].view(shape)
    if way == "permuted":
        order = list(range(len(leading)))
        rng.shuffle(order)
        x = values(*(leading[i] for i in order), width)
        return x.permute(*(order.index(i) for i in range(len(order))), len(order))
    if way == "gaps":
        return values(*(2 * size for size in leading), width)[tuple(slice(None, None, 2) for _ in leading)]
    if way == "expanded" and any_last:
        size = list(shape)
        size[rng.randrange(len(size))] = 1
        return values(*size).expand(shape)
    if way == "expanded":
        size = list(shape)
        size[heads_axis] = 1
        return values(*size).expand(shape)
    if way == "last" and any_last:
        return values(*leading, 2 * width)[..., ::2] if rng.random() < 0.5 else values(width, *leading).movedim(0, -1)
    return values(*shape)


def _offsets(rng: random.Random, values: list[int]) -> torch.Tensor:
    """int32, contiguous or a column of a table whose rows, read in turn, are offsets too."""
    x = torch.tensor(values, dtype=torch.int32)
    return x if rng.random() < 0.5 else torch.stack((x, x), 1)[:, 1]


def _cumulated(lengths: list[int], first: int = 0) -> list[int]:
    return list(itertools.accumulate(lengths, initial=first))


def _side(rng: random.Random, batch: int, layout: str, is_padded: bool) -> tuple[list[int], list[int], int]:
    """(lengths, slots, rows in the tensor)."""
    if layout != "thd":
        rows = rng.choice(_LENGTHS[1:])
        return [rng.choice([n for n in (*_LENGTHS, rows) if n <= rows]) for _ in range(batch)], [], rows
    lengths = [rng.choice(_LENGTHS) for _ in range(batch)]
    return lengths, [n + rng.choice((0, 0, 1, 3, 8)) if is_padded else n for n in lengths], 0


def draw(seed: int) -> Draw:
    """The call of this seed; float32."""
    rng = random.Random(seed)
    layout = rng.choice(("bshd", "sbhd", "bhsd", "thd", "thd"))
    batch, kv_heads, group = rng.choice((1, 2, 3, 5)), rng.choice((1, 2)), rng.choice((1, 2, 3))
    has_lengths, is_padded = layout == "thd" or rng.random() < 0.5, rng.random() < 0.5
    head_dim_qk, head_dim_v = rng.choice(_HEAD_DIMS)
    has_same_lengths = has_lengths and rng.random() < 0.3
    given: dict[str, torch.Tensor] = {}
    rows, lengths, starts, longest = {}, {}, {}, {}
    for side in ("q", "kv"):
        if side == "q" or not has_same_lengths:
            lengths[side], slots, rows[side] = _side(rng, batch, layout, is_padded)
        else:
            lengths[side], rows[side] = lengths["q"], rows["q"]
        if not has_lengths:
            lengths[side] = [rows[side]] * batch
        starts[side] = [0] * batch
        if layout == "thd":
            *starts[side], end = _cumulated(slots, rng.choice((0, 5)) if is_padded else 0)
            rows[side] = end + rng.choice((0, 0, 4, 11))
            if is_padded:
                given[f"cu_seqlens_{side}_padded"] = _offsets(rng, [*starts[side], end])
        if has_lengths:
            given[f"cu_seqlens_{side}"] = _offsets(rng, _cumulated(lengths[side]))
        highest = max(lengths[side])
        longest[side] = rng.choice((highest, highest + 1, 50) if layout == "thd" else (highest, rows[side]))
    left, right = rng.choice((-1, -1, *_WINDOWS)), rng.choice((-1, 0, 0, *_WINDOWS))
    packing = Packing(
        layout,
        longest["q"],
        longest["kv"],
        mask=Band(left, right, rng.random() < 0.5),
        same_lengths=has_same_lengths,
        **given,
    )
    ends = tuple(tuple(values) for values in (starts["q"], starts["kv"], lengths["q"], lengths["kv"]))
    call = Call(layout, *ends, left, right, packing.mask.bottom_right, head_dim_qk**-0.5)

    def tensor(side: str, heads: int, width: int, any_last: bool = False) -> torch.Tensor:
        sizes = {"b": batch, "s": rows[side], "h": heads}
        axes = _AXES[layout]
        return _stored(rng, (*(sizes[axis] for axis in axes), width), any_last, axes.index("h"))

    heads = kv_heads * group
    q, k, v = tensor("q", heads, head_dim_qk), tensor("kv", kv_heads, head_dim_qk), tensor("kv", kv_heads, head_dim_v)
    dout = tensor("q", heads, head_dim_v, any_last=True)
    size = (heads, rows["q"]) if layout == "thd" else (batch, heads, rows["q"])
    dlse = rng.choice((None, torch.randn(size, generator=torch.Generator().manual_seed(seed))))
    if dlse is not None and rng.random() < 0.5:
        dlse = dlse.mT.contiguous().mT
    return Draw(call, packing, q, k, v, dout, dlse)
