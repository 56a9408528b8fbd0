"""A rank that fails must not leave the others waiting: it completes its messages, and all ranks raise.

A rank whose backend raises keeps the error, sends and receives to the end (``Watch.attempt``), and reports the failure
when one number is reduced over the group (``Watch.close``). The error's text goes through the group's store.

Ranks that make different calls are found in the same way: the call's fingerprint (``agreement``) is reduced with the
status. It is also reduced before the call, if the host may synchronise or this kind of call has not been compared yet.

On the CPU the numbers are read at once, and all ranks raise in the call that failed. On a CUDA device reading them
would synchronise, so the failing rank raises at once and the others at the start of their next call or backward on the
group, before its first message; ``MLA_PLUGIN_CHECK=1`` makes them wait in the call itself. While a CUDA graph is
captured nothing is reduced.
"""

from __future__ import annotations

import datetime
import functools
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from mla_plugin import environment
from mla_plugin.context_parallel.agreement import Fingerprint, difference, is_agreed, note
from mla_plugin.context_parallel.group import Group

_PATIENCE = datetime.timedelta(seconds=30)
"""The text is stored before the status is reduced, so this only limits the wait for a store that does not answer."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class ContextParallelError(RuntimeError):
    """A call failed on a rank of its group, or the ranks called with different arguments."""


class _Status(NamedTuple):
    """The reduced numbers of a finished call, being copied to the host."""

    numbers: torch.Tensor
    arrived: torch.cuda.Event
    key: str
    fingerprint: Fingerprint


@dataclass
class _State:
    """State of one group: the count of reductions, and the statuses that have not been read."""

    reduced: int = 0
    unread: list[_Status] = field(default_factory=list)


_states: WeakKeyDictionary[dist.ProcessGroup, _State] = WeakKeyDictionary()


def is_capturing(device: torch.device) -> bool:
    """A CUDA graph is being captured, so the host cannot read results."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_left_unread(device: torch.device) -> bool:
    """A call ends without reading its status, because that would synchronise with the device."""
    return device.type == "cuda" and not environment.is_value_check_requested()


def _on_its_way(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
    """A copy of the numbers on the host, and the event that completes it."""
    on_host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
    on_host.copy_(numbers, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return on_host, arrived


@functools.lru_cache(maxsize=64)
def _signs(device: torch.device) -> torch.Tensor:
    """Multiplied by a number, this gives what is max-reduced: 0 (no failure), the number and minus the number."""
    with torch.inference_mode(False):
        return torch.tensor([0, 1, -1], device=device)


class Watch:
    """The errors of one call on this rank. Every rank creates one per call, begins it and closes it.

    Args:
        group: of the call.
        device: of its tensors.
        fingerprint: what this rank is about to run.
    """

    def __init__(self, group: Group, device: torch.device, fingerprint: Fingerprint) -> None:
        self._group, self._device, self._fingerprint = group, device, fingerprint
        self._state = _states.setdefault(group.process_group, _State())
        self.error: Exception | None = None
        self._refusal: Exception | None = None

    def prepare(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result | None:
        """``attempt`` to find out how to run the call; on this rank ``begin`` raises its error as it is."""
        result = self.attempt(function, *args, **kwargs)
        self._refusal = self.error
        return result

    def begin(self) -> None:
        """Call this right before the first message; the host may wait until the group's previous call is complete.

        Raises:
            ContextParallelError: the ranks are about to run different calls, one of them cannot run its call, or an
                earlier call on the group failed on another rank.
            RuntimeError: a CUDA graph is being captured, and the ranks have not compared this kind of call.
        """
        fingerprint = self._fingerprint
        is_new = not is_agreed(self._group, fingerprint.kind)
        if is_capturing(self._device):
            if is_new:
                raise RuntimeError(
                    "this kind of context-parallel call is captured in a CUDA graph before the ranks have compared it; "
                    "run the same call once before the capture"
                )
            return
        self._read()
        if is_new or not is_left_unread(self._device):
            key, numbers = self._reduced(fingerprint, "before")
            if self._refusal is not None:
                raise self._refusal
            self._check(numbers, key, fingerprint)
        note(self._group, fingerprint.kind)

    def _read(self) -> None:
        """Read the statuses of earlier calls."""
        while self._state.unread:
            status = self._state.unread.pop(0)
            status.arrived.synchronize()
            try:
                self._check(status.numbers, status.key, status.fingerprint)
            except ContextParallelError:
                self._state.unread.clear()
                raise

    def attempt(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result | None:
        """The function's result; None if it raises, and without running it if something has raised before."""
        if self.error is not None:
            return None
        try:
            return function(*args, **kwargs)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # the messages that follow may need the memory
            self.error = error
            return None

    def close(self) -> None:
        """Exchange the status with the other ranks, after the last message.

        Raises:
            ContextParallelError: the call failed on a rank, which the text names, or the ranks ran different calls.
        """
        if is_capturing(self._device):
            if self.error is not None:
                raise self.error
            return
        key, numbers = self._reduced(self._fingerprint, "at the end of")
        if not is_left_unread(self._device):
            self._check(numbers, key, self._fingerprint)
        elif self.error is None:
            self._state.unread.append(_Status(*_on_its_way(numbers), key, self._fingerprint))
        else:
            self._raise_failure(key, self._group.rank)

    def _reduced(self, fingerprint: Fingerprint, when: str) -> tuple[str, torch.Tensor]:
        """Reduce this rank's status over the group, after storing its error, if any.

        Returns:
            the key of the store's entry; int64 [3] with the highest rank that failed + 1, the largest number of a
            fingerprint, and minus the smallest.
        """
        group, self._state.reduced = self._group, self._state.reduced + 1
        key, numbers = f"mla_plugin/call/{self._state.reduced}", _signs(self._device) * fingerprint.number
        if self.error is not None:
            said = f"context parallel {fingerprint.what} failed on rank {group.rank} of {group.size}: "
            said += f"{type(self.error).__name__}: {self.error}"
            _store_of(group).set(f"{key}/failure/{group.rank}", said)
            numbers[0] = group.rank + 1
        try:
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group.process_group)
        except RuntimeError as error:  # gloo, when the group's timeout is over
            raise ContextParallelError(
                f"rank {group.rank} of {group.size} waited for the other ranks {when} a context parallel "
                f"{fingerprint.what}; a rank has exited or makes fewer calls. This call is {fingerprint.text}. {error}"
            ) from error
        return key, numbers

    def _check(self, numbers: torch.Tensor, key: str, fingerprint: Fingerprint) -> None:
        """Raise if the reduced numbers show a failure; all ranks raise, or none."""
        failed, largest, minus_smallest = numbers.tolist()
        if failed:
            self._raise_failure(key, failed - 1)
        if largest != -minus_smallest:
            self._raise_difference(key, fingerprint)

    def _raise_failure(self, key: str, rank: int) -> NoReturn:
        try:
            (said,) = self._told([f"{key}/failure/{rank}"])
        except RuntimeError as error:
            said = f"a context parallel call failed on rank {rank}, whose error is not in the store: {error}"
        raise ContextParallelError(said) from self.error

    def _raise_difference(self, key: str, fingerprint: Fingerprint) -> NoReturn:
        group = self._group
        try:
            _store_of(group).set(f"{key}/calls/{group.rank}", fingerprint.text)
            said = difference(self._told([f"{key}/calls/{rank}" for rank in range(group.size)]))
        except RuntimeError as error:
            said = f"the ranks of cp_group make different calls, and not all are in the store: {error}; rank "
            said += f"{group.rank} has {fingerprint.text}"
        raise ContextParallelError(said)

    def _told(self, keys: list[str]) -> list[str]:
        """The texts under these keys in the group's store."""
        store = _store_of(self._group)
        store.wait(keys, _PATIENCE)
        return [store.get(key).decode() for key in keys]


def _store_of(group: Group) -> torch._C._distributed_c10d.Store:
    """The group's own store: its keys are not those of other groups."""
    return dist.distributed_c10d._get_process_group_store(group.process_group)
