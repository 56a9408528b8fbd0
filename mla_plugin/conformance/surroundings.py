"""What else there is in a process: PyTorch's settings, other threads, memory that must be given back."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mla_plugin.conformance.budget import fail

Result = TypeVar("Result")

_CUDNN, _CUDA = torch.backends.cudnn, torch.backends.cuda
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], tuple[Any, Any]]] = {
    "torch.get_default_dtype()": (
        torch.get_default_dtype,
        torch.set_default_dtype,
        (torch.float32, torch.bfloat16),
    ),
    "torch.get_float32_matmul_precision()": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        ("highest", "medium"),
    ),
    "torch.get_num_threads()": (torch.get_num_threads, torch.set_num_threads, (2, 3)),
    "torch.are_deterministic_algorithms_enabled()": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        ((False, False), (True, True)),
    ),
    "torch.backends.cuda.flash_sdp_enabled()": (_CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp, (True, False)),
    "torch.is_anomaly_enabled()": (torch.is_anomaly_enabled, torch.set_anomaly_enabled, (False, True)),
    "gc.isenabled()": (gc.isenabled, lambda value: gc.enable() if value else gc.disable(), (True, False)),
    **{
        f"torch.backends.cudnn.{name}": (
            functools.partial(getattr, _CUDNN, name),
            functools.partial(setattr, _CUDNN, name),
            values,
        )
        for name, values in (
            ("benchmark", (False, True)),
            ("deterministic", (False, True)),
            ("allow_tf32", (True, False)),
        )
    },
}
"""Name to how it is read and set, and two values, of which a backend that sets it changes one."""
_PRECISION = "torch.get_float32_matmul_precision()"
_CALLS = 6
_HELD = 2
"""Calls whose tensors may still be held: the last one's, and one that a thread or a cycle has not let go yet."""


@contextmanager
def settings_restored() -> Iterator[None]:
    """Whatever the block sets, every setting is at the end what it was at the start."""
    before = {name: read() for name, (read, _, _) in _SETTINGS.items()}
    try:
        yield
    finally:
        for name, (_, write, _) in _SETTINGS.items():
            write(before[name])


@contextmanager
def unusual_settings() -> Iterator[None]:
    """Inside the block every setting has its second value, but for float32's products, which change results."""
    with settings_restored():
        for name, (_, write, values) in _SETTINGS.items():
            if name != _PRECISION:
                write(values[1])
        yield


def check_settings_are_kept(run: Callable[[], object]) -> None:
    """With the first value of every setting and with the second, each has after ``run`` the value that it had before.

    The filters of warnings are one more.
    """
    for index in range(2):
        with warnings.catch_warnings(), settings_restored():
            for _, write, values in _SETTINGS.values():
                write(values[index])
            warnings.resetwarnings()
            warnings.filterwarnings("ignore", message=".*")
            filters = list(warnings.filters)
            run()
            for name, (read, _, values) in _SETTINGS.items():
                if (now := read()) != values[index]:
                    fail(f"{name} was {values[index]} before the call and is {now} after it; a backend leaves it alone")
            if warnings.filters != filters:
                fail("the call changed the filters of warnings; a backend leaves them alone")


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


def at_the_same_time(runs: Sequence[Callable[[], object]]) -> None:
    """Each of ``runs``, which check their results, a few times in a thread of its own; the first error is raised."""

    def some_times(run: Callable[[], object]) -> None:
        for _ in range(_CALLS):
            run()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(runs)) as pool:
            waiting = [pool.submit(some_times, run) for run in runs]
            for one in waiting:
                one.result()
    finally:
        sys.setswitchinterval(interval)


def check_nothing_is_kept(run: Callable[[], Mapping[str, torch.Tensor | None]]) -> None:
    """Call ``run``, which gives its tensors by name, a few times: at most the last ones' memory is still held.

    Copies count too: with each call there must not be one more tensor in the process.
    """
    kept: dict[str, list[StorageWeakRef]] = {}
    before = 0
    gc.freeze()  # what is there already is neither looked at nor counted, which takes seconds in a large process
    try:
        for index in range(_CALLS):
            for name, x in run().items():
                if x is not None:
                    kept.setdefault(name, []).append(StorageWeakRef(x.untyped_storage()))
            x = None
            if index == 1:
                before = _number_of_tensors()
        more = _number_of_tensors() - before
    finally:
        gc.unfreeze()
    for name, references in kept.items():
        alive = sum(not reference.expired() for reference in references)
        if alive > _HELD:
            fail(f"the memory of {name} is still held after {alive} of {_CALLS} calls; keep no tensor of a call")
    if more > _HELD:
        fail(f"{_CALLS - 2} calls like earlier ones leave {more} tensors behind; keep no tensor of a call, nor a copy")


def _number_of_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())
