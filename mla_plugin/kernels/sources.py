"""Triton's hash of a kernel's sources, by which it finds the kernel in its cache, independent of earlier calls."""

from __future__ import annotations

import dis
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from triton.runtime.jit import JITCallable

_LANGUAGES = ("triton.language", "triton.experimental.gluon.language")
"""Triton does not hash their functions; its own version stands for them."""
_lock = threading.Lock()


def hash_sources(kernel: Any) -> None:
    """Hash a kernel's helpers before the kernel; free once it is hashed.

    Triton 3.6 and 3.7 include a helper's constants in the hash of a kernel only where the helper was hashed earlier. So
    a kernel's hash would depend on which kernels the process has run before, and a process whose calls come in another
    order than those of ``mla-plugin warm-up`` would compile kernels that are in the cache.
    """
    if getattr(kernel, "hash", kernel) is None:  # the interpreter's functions have none
        with _lock:
            _hash(kernel, set())


def _hash(function: JITCallable, entered: set[int]) -> None:
    if function.hash is not None or id(function) in entered:
        return
    entered.add(id(function))
    for helper in _helpers(function):
        _hash(helper, entered)
    function.cache_key  # noqa: B018  (a property that keeps what it computes)


def _helpers(function: JITCallable) -> Iterator[JITCallable]:
    """The functions that it calls, of its own module and of others."""
    code = function.fn.__code__
    # not attributes: ``load_tile``, which calls ``gl.load``, would seem to call a ``load`` of its module that calls it,
    # and which of both is hashed first would decide about the hash
    loaded = {x.argval for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL"}
    names = code.co_names
    for name in (name for name in names if name in loaded):
        found = function.__globals__.get(name)
        if isinstance(found, JITCallable):
            yield found
        elif isinstance(found, ModuleType) and found.__name__ not in _LANGUAGES:
            members = (getattr(found, member, None) for member in names)
            yield from (member for member in members if isinstance(member, JITCallable))
