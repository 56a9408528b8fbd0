"""Random calls that the Hopper kernels take: ``draw(seed)`` is one of them.

Lengths lie around the tiles' 64 and 128 rows; rows of no sequence hold NaN; the tensors lie in memory in many ways.
With head dimensions 576/512 v is in k.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import torch

from mla_plugin.arguments.mask import Band
from mla_plugin.kernels.hopper.rule import LATENT, TILES
from mla_plugin.kernels.prefill.packing import Packing, is_in
from tests.kernels.prefill_oracle import Call

_LENGTHS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129, 191, 255, 256, 257, 300, 385, 513)
_WINDOWS = (0, 1, 17, 63, 64, 128, 200, 2**31 - 1)
_AXES = {"bshd": ("b", "s", "h"), "sbhd": ("s", "b", "h"), "bhsd": ("b", "h", "s"), "thd": ("s", "h")}


@dataclass(frozen=True)
class Draw:
    """One call with its tensors, on the CPU."""

    call: Call
    packing: Packing
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None

    def on(self, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float, Packing]:
        """The arguments of ``forward``, the tensors lying in memory as here."""
        names = [f"cu_seqlens_{side}{end}" for side in ("q", "kv") for end in ("", "_padded")]
        offsets = {name: getattr(self.packing, name) for name in names}
        offsets = {name: x if x is None else x.to(device) for name, x in offsets.items()}
        plain = ("qkv_format", "max_seqlen_q", "max_seqlen_kv", "mask", "same_lengths")
        packing = Packing(**{name: getattr(self.packing, name) for name in plain}, **offsets)
        q, k = _moved(self.q, device), _moved(self.k, device)
        v = k[..., : self.v.shape[-1]] if is_in(self.v, self.k) else _moved(self.v, device)
        return q, k, v, self.call.scale, packing

    def gradients_on(self, device: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The gradients of out and lse."""
        return _moved(self.dout, device), None if self.dlse is None else self.dlse.to(device)


def _moved(x: torch.Tensor, device: str) -> torch.Tensor:
    base = x if x._base is None else x._base
    return base.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def _stored(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    *leading, width = shape
    way = rng.choice(("plain", "plain", "wide", "shifted", "permuted", "gaps"))
    generator = torch.Generator().manual_seed(rng.randrange(2**31))

    def values(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    if way == "wide":
        return values(*leading, width + 16)[..., 8 : 8 + width]
    if way == "shifted":
        return values(torch.Size(shape).numel() + 8)[8:].view(shape)
    if way == "permuted":
        order = list(range(len(leading)))
        rng.shuffle(order)
        x = values(*(leading[i] for i in order), width)
        return x.permute(*(order.index(i) for i in range(len(order))), len(order))
    if way == "gaps":
        return values(*(2 * size for size in leading), width)[tuple(slice(None, None, 2) for _ in leading)]
    return values(*shape)


def _cumulated(values: list[int], first: int = 0) -> torch.Tensor:
    return torch.tensor(list(itertools.accumulate(values, initial=first)), dtype=torch.int32)


def draw(seed: int, layout: str | None = None, **fixed: object) -> Draw:
    """The call of this seed. ``fixed``: head_dims, dtype, left, right, bottom_right instead of random ones.

    Over latents there is no left window unless it is fixed.
    """
    rng = random.Random(seed)
    drawn = rng.choice(("bshd", "sbhd", "bhsd", "thd", "thd"))
    layout = layout or drawn
    batch, kv_heads, group = rng.choice((1, 2, 3, 7)), rng.choice((1, 2)), rng.choice((1, 2, 3))
    has_lengths, is_padded = layout == "thd" or rng.random() < 0.5, rng.random() < 0.5
    values = {
        "head_dims": rng.choice([*TILES, (192, 128), (192, 128)]),
        "dtype": rng.choice((torch.bfloat16, torch.float16)),
        "left": rng.choice((-1, -1, *_WINDOWS)),
        "right": rng.choice((-1, 0, 0, 0, *_WINDOWS)),
        "bottom_right": rng.random() < 0.5,
        **fixed,
    }
    if values["head_dims"] == LATENT:
        values["left"] = fixed.get("left", -1)
    same = rng.random() < 0.4
    lengths: dict[str, list[int]] = {}
    starts: dict[str, list[int]] = {}
    rows: dict[str, int] = {}
    given: dict[str, torch.Tensor] = {}
    for side in ("q", "kv"):
        rows[side] = rows["q"] if side == "kv" and same and layout != "thd" else rng.choice(_LENGTHS[1:])
        limit = None if layout == "thd" else rows[side]
        found = [rng.choice([n for n in _LENGTHS if limit is None or n <= limit]) for _ in range(batch)]
        lengths[side] = lengths["q"] if side == "kv" and same else found if has_lengths else [rows[side]] * batch
        starts[side] = [0] * batch
        if layout == "thd":
            slots = [n + rng.choice((0, 0, 1, 3, 130)) if is_padded else n for n in lengths[side]]
            offsets = _cumulated(slots, rng.choice((0, 5)) if is_padded else 0)
            starts[side] = offsets.tolist()[:-1]
            rows[side] = max(1, int(offsets[-1]) + rng.choice((0, 0, 4, 11)))
            if is_padded:
                given[f"cu_seqlens_{side}_padded"] = offsets
        if has_lengths:
            given[f"cu_seqlens_{side}"] = _cumulated(lengths[side])
    longest = [max(lengths[side]) if layout == "thd" else rows[side] for side in ("q", "kv")]
    packing = Packing(
        layout,
        *longest,
        mask=Band(values["left"], values["right"], values["bottom_right"]),
        same_lengths=lengths["q"] == lengths["kv"],
        **given,
    )
    head_dim_qk, head_dim_v = values["head_dims"]
    ends = tuple(tuple(x) for x in (starts["q"], starts["kv"], lengths["q"], lengths["kv"]))
    call = Call(layout, *ends, *packing.mask, head_dim_qk**-0.5)

    def tensor(side: str, heads: int, width: int) -> torch.Tensor:
        sizes = {"b": batch, "s": rows[side], "h": heads}
        x = _stored(rng, (*(sizes[axis] for axis in _AXES[layout]), width), values["dtype"])
        outside = torch.ones(x.shape, dtype=torch.bool)
        for b in range(batch):
            call.rows(outside, b, side)[...] = False
        return x.masked_fill_(outside, torch.nan)

    q, k = tensor("q", kv_heads * group, head_dim_qk), tensor("kv", kv_heads, head_dim_qk)
    is_latent = (head_dim_qk, head_dim_v) == LATENT
    v = k[..., :head_dim_v] if is_latent else tensor("kv", kv_heads, head_dim_v)
    dout = tensor("q", kv_heads * group, head_dim_v)
    lse_shape = packing.layout.lse_shape(q.shape)
    dlse = torch.randn(lse_shape, generator=torch.Generator().manual_seed(seed)) if rng.random() < 0.5 else None
    return Draw(call, packing, q, k, v, dout, dlse)
