"""Groups sequences of equal lengths into batches: a kernel call costs as much as a short sequence in it.

Reads the lengths, so this is for offsets on the CPU.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.plugins.sdpa.ragged import cu_seqlens, is_ragged


@dataclass(frozen=True)
class Rows:
    """The location of n sequences of one length in the views [N, H, S, ...] of q or k (N is 1 for ``thd``).

    Attributes:
        firsts: packed, each sequence's first token; otherwise its index in N. A range if they are evenly spaced: then
            the sequences are a view, otherwise a copy.
        length: of each sequence.
        is_packed: the sequences follow one another along S.
    """

    firsts: Sequence[int]
    length: int
    is_packed: bool

    def part(self, sequences: slice) -> Rows:
        """Some of the sequences; one alone is a view."""
        return Rows(_evenly(self.firsts[sequences]), self.length, self.is_packed)

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """The sequences in x [N, H, S, ...] as [n, H, length, ...]."""
        firsts = self.firsts
        if isinstance(firsts, range):
            return self._view(x, firsts)
        if not self.is_packed:
            return x[:, :, : self.length].index_select(0, torch.tensor(firsts))
        tokens = x[0].transpose(0, 1).index_select(0, self._tokens())
        return tokens.view(-1, self.length, *tokens.shape[1:]).transpose(1, 2)

    def write(self, x: torch.Tensor, value: torch.Tensor) -> None:
        """The inverse of ``read``: value [n, H, length, ...] into x [N, H, S, ...], in x's dtype."""
        firsts = self.firsts
        if isinstance(firsts, range):
            self._view(x, firsts).copy_(value)
        elif not self.is_packed:
            x[:, :, : self.length].index_copy_(0, torch.tensor(firsts), value.to(x.dtype))
        else:
            tokens = value.to(x.dtype).transpose(1, 2).flatten(0, 1)
            x[0].transpose(0, 1).index_copy_(0, self._tokens(), tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return len(self.firsts) * self.length

    def is_all_of(self, x: torch.Tensor) -> bool:
        """Whether they are all tokens of x [N, H, S, ...], in order."""
        firsts = self.firsts
        if not isinstance(firsts, range) or firsts.start or self.num_tokens != x.shape[0] * x.shape[2]:
            return False
        return firsts.step == (self.length if self.is_packed and len(firsts) > 1 else 1)

    def joined(self, value: torch.Tensor) -> torch.Tensor:
        """[n, H, length, ...] as [N, H, S, ...], if they are all of it; a view where strides allow it."""
        return value.transpose(0, 1).flatten(1, 2).unsqueeze(0) if self.is_packed else value

    def _view(self, x: torch.Tensor, firsts: range) -> torch.Tensor:
        if not self.is_packed:
            if len(firsts) == x.shape[0] and self.length == x.shape[2]:
                return x  # slicing everything would make a new tensor, which takes a microsecond
            return x[firsts.start : firsts.stop : firsts.step, :, : self.length]
        _, head, token, *rest = x.stride()
        return x.as_strided(
            (len(firsts), x.shape[1], self.length, *x.shape[3:]),
            (token * firsts.step, head, token, *rest),
            x.storage_offset() + token * firsts.start,
        )

    def _tokens(self) -> torch.Tensor:
        return (torch.tensor(self.firsts).unsqueeze(1) + torch.arange(self.length)).flatten()


@dataclass(frozen=True)
class Group:
    """Some sequences with the same two lengths, at least one of each, and some of their heads.

    Attributes:
        q, kv: where their queries and keys are.
        heads_q, heads_kv: heads of q, and the heads of k and v that they use; None for all.
    """

    q: Rows
    kv: Rows
    heads_q: slice | None = None
    heads_kv: slice | None = None

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """Their part of x [N, H, S_q, ...] as [n, h, len_q, ...]."""
        return self.q.read(x if self.heads_q is None else x[:, self.heads_q])

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Their part of x [N, H_kv, S_kv, ...] as [n, h_kv, len_kv, ...]."""
        return self.kv.read(x if self.heads_kv is None else x[:, self.heads_kv])

    def write_queries(self, x: torch.Tensor, value: torch.Tensor) -> None:
        """The inverse of ``queries``."""
        self.q.write(x if self.heads_q is None else x[:, self.heads_q], value)

    def write_keys(self, x: torch.Tensor, value: torch.Tensor) -> None:
        """The inverse of ``keys``."""
        self.kv.write(x if self.heads_kv is None else x[:, self.heads_kv], value)

    def by_sequences(self, most: int) -> Iterator[Group]:
        """Split into groups of at most ``most`` sequences, as equal as possible."""
        for part in _cut(len(self.q.firsts), most):
            yield Group(self.q.part(part), self.kv.part(part))

    def by_heads(self, most: int, num_heads: int, num_kv_heads: int) -> Iterator[Group]:
        """Split one sequence into groups of at most ``most`` key-value heads, as equal as possible."""
        ratio = num_heads // num_kv_heads
        for part in _cut(num_kv_heads, most):
            yield Group(self.q, self.kv, slice(part.start * ratio, part.stop * ratio), part)


def _cut(count: int, most: int) -> Iterator[slice]:
    parts = -(-count // max(1, most))
    return (slice(count * i // parts, count * (i + 1) // parts) for i in range(parts))


def groups(request: AttentionRequest, tensors: AttentionTensors) -> Iterator[Group]:
    """All sequences that have queries and keys, grouped by their lengths.

    With a bias only neighbours are grouped, so that their rows of the bias are a view.
    """
    if not is_ragged(request):
        (batch, _, len_q), (_, _, len_kv) = (request.layout.pick(x.shape) for x in (tensors.q, tensors.k))
        yield Group(Rows(range(batch), len_q, is_packed=False), Rows(range(batch), len_kv, is_packed=False))
        return
    cu_q, cu_kv = (x.tolist() for x in cu_seqlens(request, tensors))
    lengths = list(zip(_steps(cu_q), _steps(cu_kv), strict=True))
    firsts_q: Sequence[int] = range(len(lengths))
    firsts_kv = firsts_q
    is_packed = request.layout.is_packed
    if is_packed:
        padded_q, padded_kv = tensors.cu_seqlens_q_padded, tensors.cu_seqlens_kv_padded
        firsts_q = cu_q if padded_q is None else padded_q.tolist()
        firsts_kv = cu_kv if padded_kv is None else padded_kv.tolist()
    for (len_q, len_kv), members in _alike(lengths, neighbours_only=tensors.bias is not None):
        if len_q and len_kv:
            yield Group(
                Rows(_evenly([firsts_q[i] for i in members]), len_q, is_packed),
                Rows(_evenly([firsts_kv[i] for i in members]), len_kv, is_packed),
            )


def _steps(offsets: list[int]) -> list[int]:
    return [after - before for before, after in itertools.pairwise(offsets)]


def _alike(lengths: list[tuple[int, int]], *, neighbours_only: bool) -> Iterator[tuple[tuple[int, int], Sequence[int]]]:
    """The sequences of each pair of lengths, ascending."""
    if len(set(lengths)) == 1:
        yield lengths[0], range(len(lengths))
    elif neighbours_only:
        for pair, run in itertools.groupby(range(len(lengths)), key=lengths.__getitem__):
            yield pair, list(run)
    else:
        members: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, pair in enumerate(lengths):
            members[pair].append(i)
        yield from members.items()


def _evenly(firsts: Sequence[int]) -> Sequence[int]:
    """The same numbers as a range, if they are evenly spaced and ascending."""
    if isinstance(firsts, range):
        return firsts
    step = firsts[1] - firsts[0] if len(firsts) > 1 else 1
    even = range(firsts[0], firsts[-1] + 1, max(1, step))
    return even if list(even) == firsts else firsts
