"""What else there is in a process: PyTorch's settings, other threads, memory that must be given back."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mla_plugin.conformance.budget import fail

Result = TypeVar("Result")

_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {
    "torch.get_default_dtype()": (torch.get_default_dtype, torch.set_default_dtype, torch.bfloat16),
    "torch.get_float32_matmul_precision()": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        "medium",
    ),
    "torch.get_num_threads()": (torch.get_num_threads, torch.set_num_threads, 3),
    "torch.backends.cudnn.benchmark": (
        lambda: torch.backends.cudnn.benchmark,
        lambda value: setattr(torch.backends.cudnn, "benchmark", value),
        True,
    ),
}
"""Name to how it is read and set, and a value that no backend sets."""
_CALLS = 4


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
def settings_kept() -> Iterator[None]:
    """Every setting has an unusual value inside the block, and must have it still at the end; results may differ."""
    with settings_restored():
        for _, write, other in _SETTINGS.values():
            write(other)
        yield
        for name, (read, _, other) in _SETTINGS.items():
            if (now := read()) != other:
                fail(f"{name} was {other} before the call and is {now} after it; leave the process's settings alone")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What a tensor is made of when nobody says it."""
    with settings_restored():
        torch.set_default_dtype(dtype)
        yield


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


def check_nothing_is_kept(run: Callable[[], Mapping[str, torch.Tensor | None]]) -> None:
    """Call ``run``, which gives its tensors by name, a few times: at most the last ones' memory is still held."""
    kept: dict[str, list[StorageWeakRef]] = {}
    for _ in range(_CALLS):
        for name, x in run().items():
            if x is not None:
                kept.setdefault(name, []).append(StorageWeakRef(x.untyped_storage()))
        x = None
    gc.collect()
    for name, references in kept.items():
        alive = sum(not reference.expired() for reference in references)
        if alive >= _CALLS - 1:
            fail(f"the memory of {name} is still held after {alive} of {_CALLS} calls; keep no tensor of a call")
