"""Checks of the rest of a process: other threads, other calls, and resources that must be released."""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mla_plugin.conformance.budget import fail
from mla_plugin.conformance.watch import Kept

Result = TypeVar("Result")

_CALLS = 6
_MANY = 24
"""Number of calls whose results are kept: more than any ring of buffers holds."""
_OPEN = Path("/proc/self/fd")
_SLACK = 2
"""How many more objects there may be after some calls: of the last one, and in a reference cycle."""


def in_another_thread(run: Callable[[], Result]) -> Result:
    """The result of ``run`` in a new thread, as autograd runs a backward on CUDA; its error, if it has one."""
    found: list[Result] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            found.append(run())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


def at_the_same_time(runs: Sequence[Callable[[], Result]]) -> list[list[Result]]:
    """Each of ``runs`` a few times in a separate thread, and what each gives; the first error is raised.

    The threads switch before each PyTorch operator, so that shared state is detected.
    """

    def some_times(run: Callable[[], Result]) -> list[Result]:
        with _turns():
            return [run() for _ in range(_CALLS)]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(runs)) as pool:
            waiting = [pool.submit(some_times, run) for run in runs]
            return [one.result() for one in waiting]
    finally:
        sys.setswitchinterval(interval)


@contextlib.contextmanager
def _turns() -> Iterator[None]:
    """Lets other threads run before each call of a function written in C, which PyTorch's operators are.

    Not by a dispatch mode: in one, an operator that returns an undefined tensor in a list fails, as FlashAttention 3's.
    """

    def seen(frame: object, event: str, argument: object) -> None:
        if event == "c_call":
            time.sleep(0)

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        yield
    finally:
        sys.setprofile(before)


def check_many_calls(run: Callable[[], Mapping[str, torch.Tensor | None]]) -> None:
    """Call ``run``, which checks its results and gives them by name, many times: no call changes an earlier one's."""
    for kept in [Kept("of an earlier call", **run()) for _ in range(_MANY)]:
        kept.check()


def check_nothing_is_kept(run: Callable[[], Mapping[str, torch.Tensor | None]]) -> None:
    """Call ``run``, which returns its tensors by name, a few times: none of them may still be alive.

    Copies count too: with each call there must not be one more tensor in the process, nor a thread, an open file or a
    function that runs at its end.
    """
    kept: dict[str, list[StorageWeakRef]] = {}
    before: dict[str, int] = {}
    gc.freeze()  # existing objects are neither inspected nor counted, which takes seconds in a large process
    try:
        for index in range(_CALLS):
            for name, x in run().items():
                if x is not None:
                    kept.setdefault(name, []).append(StorageWeakRef(x.untyped_storage()))
            x = None
            if index == 1:
                before = _counted()
        now = _counted()
    finally:
        gc.unfreeze()
    for name, references in kept.items():
        alive = sum(not reference.expired() for reference in references)
        if alive:
            fail(f"the memory of {name} is still held after {alive} of {_CALLS} calls; keep no tensor of a call")
    for what, count in now.items():
        if (more := count - before[what]) > _SLACK:
            fail(f"{_CALLS - 2} repeated calls leave {more} {what} behind; keep nothing of a call")


def _counted() -> dict[str, int]:
    gc.collect()
    return {
        "tensors, perhaps copies,": sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()),
        "threads": threading.active_count(),
        "open files": len(list(_OPEN.iterdir())) if _OPEN.is_dir() else 0,
        "functions of atexit": atexit._ncallbacks(),
    }
