"""Latent attention over the ranks of a group against the float64 reference of one process."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import mla_plugin
from mla_plugin.context_parallel import shard
from mla_plugin.operations.latent import expansion
from tests.context_parallel import pool
from tests.context_parallel.case import LIMITS, offsets
from tests.latent_calls import LatentCall, draw, expected


@dataclass(frozen=True)
class LatentCase:
    """One call; lengths are those of whole sequences.

    Attributes:
        way: ``cp_comm_type``.
        size: ranks.
        lengths_q, lengths_kv: true lengths of the sequences; None for keys of the queries' lengths.
        slots_q, slots_kv: lengths with their padding; None for no padding. Dense rows are as long as the longest.
        at_once: heads that are expanded together.
        dims: qk_nope_head_dim, qk_rope_head_dim, head_dim_v, kv_lora_rank.
    """

    way: str = "all_gather"
    size: int = 2
    layout: str = "bshd"
    mask: str = "causal"
    lengths_q: tuple[int, ...] = (24, 24)
    lengths_kv: tuple[int, ...] | None = None
    slots_q: tuple[int, ...] | None = None
    slots_kv: tuple[int, ...] | None = None
    heads: int = 12
    window: tuple[int, int] | None = None
    dtype: torch.dtype = torch.float64
    with_dlse: bool = False
    at_once: int = 2
    tail: int = 0
    needs: tuple[str, ...] = ("q", "c_kv", "k_rope", "weight")
    dims: tuple[int, int, int, int] = (16, 8, 12, 20)

    def __str__(self) -> str:
        """What differs from the defaults."""
        values = ((field.name, getattr(self, field.name), field.default) for field in dataclasses.fields(self))
        return "-".join(f"{value}".replace(" ", "") for _, value, default in values if value != default) or "default"

    def side(self, which: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(lengths, slots) of ``q`` or ``kv``."""
        if which == "kv" and self.lengths_kv is not None:
            return self.lengths_kv, self.slots_kv or self.lengths_kv
        return self.lengths_q, self.slots_q or self.lengths_q

    def tokens(self, which: str) -> int:
        slots = self.side(which)[1]
        return sum(slots) + self.tail if self.layout == "thd" else max(slots)

    def token_dim(self, name: str) -> int:
        """The axis of tokens of q or out, of latents (``c_kv``, ``k_rope``), or of lse."""
        if name == "lse":
            return -1
        if name in ("c_kv", "k_rope"):
            return 1 if self.layout in ("bshd", "bhsd") else 0
        return {"bshd": 1, "sbhd": 0, "bhsd": 2, "thd": 0}[self.layout]

    def whole(self, seed: int) -> LatentCall:
        """Whole sequences, the same on every rank; NaN in padding."""
        torch.manual_seed(seed)
        lengths: dict[str, Any] = {}
        if self.layout == "thd" or "padding" in self.mask:
            lengths["cu_seqlens_q"] = offsets(self.lengths_q)
            if self.lengths_kv is not None:
                lengths["cu_seqlens_kv"] = offsets(self.lengths_kv)
            if self.layout == "thd" and self.slots_q is not None:
                lengths["cu_seqlens_q_padded"] = offsets(self.slots_q)
                if self.lengths_kv is not None:
                    lengths["cu_seqlens_kv_padded"] = offsets(self.side("kv")[1])
        call = draw(
            self.layout,
            batch=len(self.lengths_q),
            heads=self.heads,
            lengths=(self.tokens("q"), self.tokens("kv")),
            dims=self.dims,
            dtype=self.dtype,
            attn_mask_type=self.mask,
            **lengths,
            **({} if self.window is None else {"window_size": self.window}),
        )
        for name in ("q", "c_kv", "k_rope"):
            self._poison(call.tensors[name].detach(), name)
        return call

    def _poison(self, x: torch.Tensor, name: str) -> None:
        padding = self.padding("q" if name == "q" else "kv")
        if padding is None:
            return
        if self.layout == "thd":
            x[padding[0]] = torch.nan
            return
        rows = x.transpose(0, 1) if self.layout == "sbhd" else x.movedim(self.token_dim(name), 1)  # [B, S, ...]
        rows[padding] = torch.nan

    def padding(self, which: str) -> torch.Tensor | None:
        """True for slots that belong to no sequence: [B, S], packed [1, T]."""
        if self.layout != "thd" and "padding" not in self.mask:
            return None
        lengths, slots = self.side(which)
        if self.layout != "thd":
            return torch.arange(self.tokens(which)) >= torch.tensor(lengths)[:, None]
        parts = [torch.arange(slot) >= length for length, slot in zip(lengths, slots, strict=True)]
        return torch.cat([*parts, torch.ones(self.tail, dtype=torch.bool)])[None]

    def local(self, x: torch.Tensor, name: str, rank: int) -> torch.Tensor:
        """A rank's tokens of one tensor."""
        dim = self.token_dim(name)
        if self.layout != "thd":
            return shard(x, self.size, rank, dim=dim)
        slots = self.side("kv" if name in ("c_kv", "k_rope") else "q")[1]
        total = sum(slots)
        x = x.movedim(dim, 0)
        own = shard(x[:total], self.size, rank, dim=0, cu_seqlens_padded=offsets(slots))
        return torch.cat([own, x[total:].chunk(self.size)[rank]]).movedim(0, dim)


def run(case: LatentCase, seed: int = 0, **arguments: Any) -> dict[str, float] | None:
    """In a process of the pool: the call of this rank against the reference; its errors, None outside the group."""
    group = pool.groups[case.size]
    rank = dist.get_rank(group)
    if rank < 0:
        return None
    whole = case.whole(seed)
    own = {name: x if name == "weight" else case.local(x.detach(), name, rank) for name, x in whole.tensors.items()}
    own = {name: _strided(x.detach().to(pool.device)).requires_grad_(name in case.needs) for name, x in own.items()}
    kept = {name: x.detach().cpu().clone() for name, x in own.items()}
    call = LatentCall(own, whole.arguments)
    bytes_per_head = (
        (case.tokens("kv") * (1 if case.layout == "thd" else len(case.lengths_q))) * 36 * case.dtype.itemsize
    )
    expansion.MAX_EXPANDED_BYTES = case.at_once * bytes_per_head
    given = {"cp_group": group, "cp_comm_type": case.way, "return_lse": True, **whole.arguments, **arguments}
    given = {name: x.to(pool.device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    out, lse = mla_plugin.latent_attention(**call.inputs(), **given)
    torch.manual_seed(seed + 1)
    shape = list(out.shape)
    shape[case.token_dim("q")] *= case.size
    dout = torch.randn(shape, dtype=case.dtype)
    lse_shape = [*lse.shape[:-1], lse.shape[-1] * case.size]
    dlse = torch.randn(lse_shape, dtype=lse.dtype) if case.with_dlse else None
    outputs = [out, lse] if case.with_dlse else [out]
    weights = [case.local(dout, "q", rank)] + ([case.local(dlse, "lse", rank)] if case.with_dlse else [])
    weights = [x.to(pool.device) for x in weights]
    gradients = dict(zip(case.needs, torch.autograd.grad(outputs, [own[n] for n in case.needs], weights), strict=True))
    if "weight" in gradients:
        dist.all_reduce(gradients["weight"], group=group)  # as a training loop does
    clean = LatentCall({name: x.detach().nan_to_num() for name, x in whole.tensors.items()}, whole.arguments)
    exact = expected(clean, dout, dlse)
    found = {name: x.detach().cpu() for name, x in {"out": out, "lse": lse, **gradients}.items()}
    unchanged = all(torch.equal(own[name].cpu().nan_to_num(), x.nan_to_num()) for name, x in kept.items())
    assert unchanged, "an input was changed"
    return _judge(case, found, exact, kept, rank)


def _strided(x: torch.Tensor) -> torch.Tensor:
    """The same values as a view with gaps."""
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan)
    wide[..., ::2] = x
    return wide[..., ::2]


def _judge(
    case: LatentCase,
    found: dict[str, torch.Tensor],
    exact: dict[str, torch.Tensor],
    kept: dict[str, torch.Tensor],
    rank: int,
) -> dict[str, float]:
    errors = {}
    for name, x in found.items():
        true = exact[name] if name == "weight" else case.local(exact[name], name, rank)
        assert x.shape == true.shape, f"{name} has shape {tuple(x.shape)}, not {tuple(true.shape)}"
        if name == "lse":
            assert torch.equal(x.isneginf(), true.isneginf()), "rows that see a key"
            x, true = x.masked_fill(x.isneginf(), 0), true.masked_fill(true.isneginf(), 0)
        assert not x.isnan().any(), f"{name} has NaN"
        if name not in ("lse", "weight"):
            padded = kept["q" if name == "out" else name].isnan().all(-1)
            assert not x[padded].any(), f"{name} is not 0 in a padded slot"
        errors[name] = float((x.double() - true).norm() / true.norm().clamp(min=1e-300))
    wrong = {name: value for name, value in errors.items() if value > LIMITS[case.dtype]}
    assert not wrong, f"rank {rank} of {case.size}: {wrong}"
    return errors
