"""A call over the ranks of a group against the float64 reference of one process."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import mla_plugin
from mla_plugin import reference
from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.layout import LAYOUTS, lse_dtype
from mla_plugin.context_parallel import shard
from mla_plugin.hooks.attention import AttentionRequest
from tests.context_parallel import pool

LIMITS = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 6e-3}
"""Largest relative error of a tensor, in the Frobenius norm."""


@dataclass(frozen=True)
class Case:
    """One call; lengths are those of whole sequences.

    Attributes:
        way: ``cp_comm_type``.
        size: ranks.
        lengths_q, lengths_kv: true lengths of the sequences; None for keys of the queries' lengths.
        slots_q, slots_kv: lengths with their padding; None for no padding. Dense rows are as long as the longest.
        needs: which of q, k, v require a gradient.
    """

    way: str = "p2p"
    size: int = 2
    layout: str = "bshd"
    mask: str = "causal"
    lengths_q: tuple[int, ...] = (24, 24)
    lengths_kv: tuple[int, ...] | None = None
    slots_q: tuple[int, ...] | None = None
    slots_kv: tuple[int, ...] | None = None
    heads: int = 4
    kv_heads: int = 4
    head_dim_qk: int = 24
    head_dim_v: int = 16
    window: tuple[int, int] | None = None
    dtype: torch.dtype = torch.float64
    with_dlse: bool = False
    has_strides: bool = False
    needs: str = "qkv"
    tail: int = 0
    backend: str | None = None

    def __str__(self) -> str:
        """What differs from the defaults."""
        values = ((field.name, getattr(self, field.name), field.default) for field in dataclasses.fields(self))
        return "-".join(f"{value}".replace(" ", "") for _, value, default in values if value != default) or "default"

    @property
    def is_packed(self) -> bool:
        return self.layout == "thd"

    @property
    def has_lengths(self) -> bool:
        return self.is_packed or "padding" in self.mask

    def side(self, which: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(lengths, slots) of ``q`` or ``kv``."""
        if which == "kv" and self.lengths_kv is not None:
            return self.lengths_kv, self.slots_kv or self.lengths_kv
        return self.lengths_q, self.slots_q or self.lengths_q


def offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


class Whole:
    """Tensors of whole sequences, the same on every rank."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case, layout = case, LAYOUTS[case.layout]
        generator = torch.Generator().manual_seed(seed)

        def draw(which: str, heads: int, width: int) -> torch.Tensor:
            lengths, slots = case.side(which)
            tokens = sum(slots) + case.tail if case.is_packed else max(slots)
            shape = layout.shape(len(lengths), heads, tokens, width)
            x = torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)
            if case.has_lengths:
                self._poison(layout.to_bhsd(x), lengths, slots)
            return x

        self.q, self.dout = draw("q", case.heads, case.head_dim_qk), draw("q", case.heads, case.head_dim_v)
        self.k, self.v = draw("kv", case.kv_heads, case.head_dim_qk), draw("kv", case.kv_heads, case.head_dim_v)
        lse_shape = layout.lse_shape(self.q.shape)
        self.dlse = torch.randn(lse_shape, generator=generator, dtype=torch.float64).to(case.dtype)
        self.options: dict[str, Any] = {"attn_mask_type": case.mask, "qkv_format": case.layout}
        if case.window is not None:
            self.options["window_size"] = case.window
        self.lengths: dict[str, torch.Tensor] = {}
        if case.has_lengths:
            (lengths_q, slots_q), (lengths_kv, slots_kv) = case.side("q"), case.side("kv")
            self.lengths["cu_seqlens_q"] = offsets(lengths_q)
            if case.is_packed and slots_q != lengths_q:
                self.lengths["cu_seqlens_q_padded"] = offsets(slots_q)
            if case.lengths_kv is not None:
                self.lengths["cu_seqlens_kv"] = offsets(lengths_kv)
                if "cu_seqlens_q_padded" in self.lengths:
                    self.lengths["cu_seqlens_kv_padded"] = offsets(slots_kv)

    def _poison(self, x: torch.Tensor, lengths: tuple[int, ...], slots: tuple[int, ...]) -> None:
        """NaN in every padded slot of x [B, H, S, D]."""
        is_true = torch.zeros(x.shape[0], x.shape[2], dtype=torch.bool)
        start = 0
        for row, (length, slot) in enumerate(zip(lengths, slots, strict=True)):
            if self.case.is_packed:
                is_true[0, start : start + length] = True
                start += slot
            else:
                is_true[row, :length] = True
        x.masked_fill_(~is_true[:, None, :, None], torch.nan)

    def expected(self) -> dict[str, torch.Tensor]:
        """out, lse, dq, dk and dv of the reference; the padded rows of all but lse are 0."""
        given = {name: x.nan_to_num() for name, x in (("q", self.q), ("k", self.k), ("v", self.v))}
        lengths = dict(self.lengths)
        if lengths:
            lengths.setdefault("cu_seqlens_kv", lengths["cu_seqlens_q"])
            if "cu_seqlens_q_padded" in lengths:
                lengths.setdefault("cu_seqlens_kv_padded", lengths["cu_seqlens_q_padded"])
        tensors = AttentionTensors(**given, softmax_scale=self.case.head_dim_qk**-0.5, **lengths)
        request = AttentionRequest.of(tensors, **self.options)
        dlse = self.dlse if self.case.with_dlse else None
        output, gradients = reference.attention_with_gradients(request, tensors, self.dout.nan_to_num(), dlse)
        return {"out": output.out, "lse": output.lse, "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}


class Local:
    """Cuts tensors of whole sequences for one rank."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank

    def __call__(self, x: torch.Tensor, which: str = "q", *, is_lse: bool = False) -> torch.Tensor:
        case = self.case
        if not case.is_packed:
            return shard(x, case.size, self.rank, dim=-1 if is_lse else LAYOUTS[case.layout].tokens)
        slots = case.side(which)[1]
        x = x.t() if is_lse else x
        total = sum(slots)
        own = shard(x[:total], case.size, self.rank, dim=0, cu_seqlens_padded=offsets(slots))
        own = torch.cat([own, x[total:].chunk(case.size)[self.rank]]) if case.tail else own
        return own.t() if is_lse else own


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values as a view of a wider tensor, every second head of it, as if q, k and v were slices."""
    wide = x.new_full((*x.shape[:-2], 2 * x.shape[-2], x.shape[-1] + 8), torch.nan)
    wide[..., ::2, 8:] = x
    return wide[..., ::2, 8:]


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-300))


def run(case: Case, seed: int = 0, **arguments: Any) -> dict[str, float] | None:
    """In a process of the pool: the call of this rank against the reference; its errors, None outside the group."""
    group = pool.groups[case.size]
    rank = dist.get_rank(group)
    if rank < 0:
        return None
    whole, local = Whole(case, seed), Local(case, rank)
    inputs = {"q": local(whole.q), "k": local(whole.k, "kv"), "v": local(whole.v, "kv")}
    inputs = {name: x.to(pool.device) for name, x in inputs.items()}
    lengths = {name: x.to(pool.device) for name, x in whole.lengths.items()}
    if case.has_strides:
        inputs = {name: strided(x) for name, x in inputs.items()}
    kept = {name: x.clone() for name, x in inputs.items()}
    for name in case.needs:
        inputs[name].requires_grad_()
    call = {"cp_group": group, "cp_comm_type": case.way, "backend": case.backend, **arguments}
    out, lse = mla_plugin.attention(**inputs, **whole.options, **lengths, return_lse=True, **call)
    weights = [local(whole.dout).to(pool.device)]
    weights += [local(whole.dlse, is_lse=True).to(pool.device)] if case.with_dlse else []
    outputs = [out, lse][: len(weights)]
    gradients = torch.autograd.grad(outputs, [inputs[name] for name in case.needs], weights)
    for name, x in kept.items():
        assert torch.equal(inputs[name].nan_to_num(), x.nan_to_num()), f"{name} was changed"
    found = {"out": out, "lse": lse} | {f"d{name}": x for name, x in zip(case.needs, gradients, strict=True)}
    exact = whole.expected()
    errors = {}
    for name, x in found.items():
        x = x.detach().cpu()
        true = local(exact[name], "kv" if name in ("dk", "dv") else "q", is_lse=name == "lse")
        assert x.shape == true.shape, f"{name} has shape {tuple(x.shape)}, not {tuple(true.shape)}"
        assert x.dtype == (lse_dtype(case.dtype) if name == "lse" else case.dtype)
        if name == "lse":
            assert torch.equal(x.isneginf(), true.isneginf()), "rows that see a key"
            x, true = x.masked_fill(x.isneginf(), 0), true.masked_fill(true.isneginf(), 0)
        assert not x.isnan().any(), f"{name} has NaN"
        if name != "lse":
            given = kept[name[1]] if name in ("dk", "dv") else kept["q"]
            assert not x[given.isnan().all(-1).cpu()].any(), f"{name} is not 0 in a padded slot"
        errors[name] = error(x, true)
    wrong = {
        n: value for n, value in errors.items() if value > LIMITS[lse_dtype(case.dtype) if n == "lse" else case.dtype]
    }
    assert not wrong, f"rank {rank} of {case.size}: {wrong}"
    return errors
