"""Messages between the ranks of a group: a hop of sends and receives, an all-to-all, an all-gather.

Every rank of a group must make the same messages in the same order. Each hop is one batch that is alike on all ranks,
on one communicator: unbatched pairs create communicators one by one, and asymmetric batches can wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from mla_plugin.context_parallel.group import Group

_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Hop(NamedTuple):
    """Tensors of one hop between this rank and two others.

    Attributes:
        to: rank of the group that gets ``send``.
        send: contiguous tensors.
        source: rank of the group that fills ``receive``.
        receive: contiguous tensors; shapes and dtypes are those that ``source`` sends.
    """

    to: int
    send: Sequence[torch.Tensor]
    source: int
    receive: Sequence[torch.Tensor]


class Pending:
    """Messages under way. The tensors may be neither read nor written before ``wait``."""

    def __init__(self, works: Iterable[dist.Work] = ()) -> None:
        self._works = list(works)

    def wait(self) -> None:
        """What is queued after this sees the messages; on a CUDA device the host does not wait."""
        for work in self._works:
            work.wait()
        self._works.clear()


def hop(group: Group, hops: Iterable[Hop]) -> Pending:
    """Start hops, all in one batch: every rank makes as many, with the same distances."""
    process_group = group.process_group
    operations = []
    for to, send, source, receive in hops:
        operations += [dist.P2POp(dist.isend, x, group=process_group, group_peer=to) for x in send]
        operations += [dist.P2POp(dist.irecv, x, group=process_group, group_peer=source) for x in receive]
    return Pending(dist.batch_isend_irecv(operations) if operations else ())


def ring_hop(group: Group, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor]) -> Hop:
    """To the next rank, from the previous one."""
    return Hop((group.rank + 1) % group.size, send, (group.rank - 1) % group.size, receive)


def exchange(group: Group, send: torch.Tensor) -> torch.Tensor:
    """All-to-all: part j of ``send``, [size, ...] and contiguous, goes to rank j; part i of the result is rank i's."""
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group.process_group)
    return received


def gather(group: Group, x: torch.Tensor) -> torch.Tensor:
    """Every rank's x, [size, *x.shape]; x is contiguous."""
    gathered = x.new_empty((group.size * x.numel(),))
    _gather_single(gathered, x.view(-1), group=group.process_group)
    return gathered.view(group.size, *x.shape)


def add_up(group: Group, x: torch.Tensor) -> torch.Tensor:
    """The sum of every rank's x, in its place; the same bits on all ranks."""
    dist.all_reduce(x, group=group.process_group)
    return x
