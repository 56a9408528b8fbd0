"""Messages between the ranks of a group: a hop of sends and receives, an all-to-all, an all-gather.

Every rank of a group must make the same messages in the same order. Each hop is one batch that is alike on all ranks,
on one communicator: asymmetric batches can wait for each other.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mla_plugin import environment
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
    """Messages in flight. Their tensors must be neither read nor written before ``wait``."""

    def __init__(self, works: Iterable[dist.Work] = ()) -> None:
        self._works = list(works)

    def wait(self) -> None:
        """Make later work wait for the messages; on a CUDA device the host does not block."""
        for work in self._works:
            work.wait()
        self._works.clear()


class Mark:
    """Messages started in this context wait only for work that was queued before its creation.

    So work that needs no message can be queued before the ranks have agreed to send. On a CPU it does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = None
        if device.type == "cuda":
            self._stream = _side_stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def __enter__(self) -> None:
        self._context = torch.cuda.stream(self._stream)
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)  # a captured graph must join it


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream without kernels, on which messages are queued."""
    return torch.cuda.Stream(device)


def is_batched(group: Group, device: torch.device) -> bool:
    """Whether each hop is one batch, not single sends and receives (NVTE_BATCH_MHA_P2P_COMM=0).

    TransformerEngine sends one by one by default, but never between two ranks before compute capability
    10.0. One by one each pair of ranks gets a separate communicator when they first meet, which may be in the middle
    of a step; so here a batch is the default.

    Raises:
        EnvironmentVariableError: the variable is no integer.
    """
    if environment.is_p2p_batch_allowed():
        return True
    return group.size == 2 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (10, 0)


def hop(group: Group, hops: Iterable[Hop], *, batched: bool = True) -> Pending:
    """Start hops: every rank makes as many, with the same distances, and all ranks in one batch or none."""
    process_group = group.process_group
    operations: list[tuple[Any, torch.Tensor, int]] = []
    for to, send, source, receive in hops:
        sends = [(dist.isend, x, to) for x in send]
        receives = [(dist.irecv, x, source) for x in receive]
        # between two ranks one must send first: unbatched messages share one queue
        operations += sends + receives if batched or group.rank < to else receives + sends
    if not batched:
        return Pending([_alone(process_group, *operation) for operation in operations])
    if not operations:
        return Pending()
    batch = [dist.P2POp(start, x, group=process_group, group_peer=peer) for start, x, peer in operations]
    return Pending(dist.batch_isend_irecv(batch))


def _alone(process_group: dist.ProcessGroup, start: Any, x: torch.Tensor, peer: int) -> dist.Work:
    work = start(x, group=process_group, **{"group_dst" if start is dist.isend else "group_src": peer})
    assert work is not None  # this process is in the group
    return work  # type: ignore[no-any-return]


def ring_hop(group: Group, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor]) -> Hop:
    """A hop that sends to the next rank and receives from the previous one."""
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
    """All-reduce x in place; the result has the same bits on all ranks."""
    dist.all_reduce(x, group=group.process_group)
    return x
