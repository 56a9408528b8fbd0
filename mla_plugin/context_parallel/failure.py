"""A rank that fails must not leave the others waiting: it goes on with its messages, and all ranks raise.

A rank whose backend raises keeps the error, sends and receives to the end (``Watch.attempt``), and says so when one
number is reduced over the group (``Watch.close``). The error's text goes through the group's store.

On the CPU the number is read at once: all ranks raise in the call that failed. On a CUDA device reading it would make
the host wait, so the rank that failed raises at once and the others when their next call or backward on the group
begins, before its first message; ``MLA_PLUGIN_CHECK=1`` makes them wait in the call itself. While a CUDA graph is
captured nothing is reduced.
"""

from __future__ import annotations

import datetime
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from mla_plugin import environment
from mla_plugin.context_parallel.group import Group

_PATIENCE = datetime.timedelta(seconds=30)
"""The text is in the store before the status is reduced, so this is for a store that does not answer."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class ContextParallelError(RuntimeError):
    """A call failed on a rank of its group, or the ranks called with different arguments."""


class _Status(NamedTuple):
    """The reduced number of a call that is over, on its way to the host."""

    number: torch.Tensor
    arrived: torch.cuda.Event
    key: str


@dataclass
class _State:
    """Of one group: how many calls were closed, and statuses that nobody has looked at."""

    closed: int = 0
    unread: list[_Status] = field(default_factory=list)


_states: WeakKeyDictionary[dist.ProcessGroup, _State] = WeakKeyDictionary()


def is_capturing(device: torch.device) -> bool:
    """A CUDA graph is being captured, so the host can neither read nor be told anything."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_left_unread(device: torch.device) -> bool:
    """A call ends without looking at its status: the host would have to wait for the device."""
    return device.type == "cuda" and not environment.is_value_check_requested()


def _on_its_way(number: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
    """A copy of the number on the host, and the event after which it is there."""
    on_host = torch.empty(1, dtype=torch.int32, pin_memory=True)
    on_host.copy_(number, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return on_host, arrived


class Watch:
    """The errors of one call on this rank. Every rank makes one for each call, begins it and closes it.

    Args:
        group: of the call.
        what: the call in a word, for the error's text.
        device: of its tensors.
    """

    def __init__(self, group: Group, what: str, device: torch.device) -> None:
        self._group, self._what, self._device = group, what, device
        self._state = _states.setdefault(group.process_group, _State())
        self.error: Exception | None = None

    def begin(self) -> None:
        """Before the first message, and after everything that needs none: the host may have to wait here.

        Raises:
            ContextParallelError: an earlier call on the group failed on another rank.
        """
        if is_capturing(self._device):
            return
        while self._state.unread:
            status = self._state.unread.pop(0)
            status.arrived.synchronize()
            if failed := int(status.number):
                self._state.unread.clear()
                self._raise(status.key, failed)

    def attempt(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result | None:
        """What the function returns; None if it raises, or if something has raised before: then it does not run."""
        if self.error is not None:
            return None
        try:
            return function(*args, **kwargs)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # the messages that follow may need the memory
            self.error = error
            return None

    def close(self) -> None:
        """Tell the other ranks, after the last message.

        Raises:
            ContextParallelError: something failed, here or on another rank; the text names the rank.
        """
        if is_capturing(self._device):
            if self.error is not None:
                raise self.error
            return
        group, self._state.closed = self._group, self._state.closed + 1
        key = f"mla_plugin/failure/{self._state.closed}"
        if self.error is not None:
            said = f"context parallel {self._what} failed on rank {group.rank} of {group.size}: "
            said += f"{type(self.error).__name__}: {self.error}"
            _store_of(group).set(f"{key}/{group.rank}", said)
        failed = 0 if self.error is None else group.rank + 1
        number = torch.full((1,), failed, dtype=torch.int32, device=self._device)
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=group.process_group)
        if not is_left_unread(self._device):
            failed = int(number)
        elif not failed:
            self._state.unread.append(_Status(*_on_its_way(number), key))
        if failed:
            self._raise(key, failed)

    def _raise(self, key: str, failed: int) -> NoReturn:
        store, key = _store_of(self._group), f"{key}/{failed - 1}"
        try:
            store.wait([key], _PATIENCE)
            said = store.get(key).decode()
        except RuntimeError as error:
            said = f"a context parallel call failed on rank {failed - 1}, whose error is not in the store: {error}"
        raise ContextParallelError(said) from self.error


def _store_of(group: Group) -> torch._C._distributed_c10d.Store:
    """The group's own store: its keys are not those of other groups."""
    return dist.distributed_c10d._get_process_group_store(group.process_group)
