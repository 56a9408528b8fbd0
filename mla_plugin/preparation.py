"""What a model's first calls load besides compiled kernels, loaded when PyTorch initialises CUDA.

Triton's cache spares a new process the compiler. It does not spare it the import of Triton, of our kernels and of what
PyTorch's first backward imports, nor Triton's hash of its own library (400 MB) and of the kernels' sources.
``mla-plugin warm-up`` notes next to the cached kernels what its calls needed of these. A later process with the same
packages then loads it as soon as CUDA starts. Without the note nothing happens: importing ``mla_plugin`` imports no
kernel library, and a process that does not use CUDA never does.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import logging
import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mla_plugin import environment

KERNELS = "mla_plugin.kernels"
PACKAGES = ("mla_plugin", "torch", "triton")
"""Only their modules are noted: PyTorch holds a lock meanwhile, which others may ask for when they are imported."""

logger = logging.getLogger("mla_plugin")


class Needs(NamedTuple):
    """What calls needed.

    Attributes:
        modules: names of the modules that they imported, in order.
        kernels: (module, name) of the kernels that they compiled or found in Triton's cache.
    """

    modules: tuple[str, ...] = ()
    kernels: tuple[tuple[str, str], ...] = ()


def note_path() -> Path:
    """The note of this Python, this PyTorch and this package; others may share the cache."""
    installed = (sys.prefix, sys.version, torch.__version__, __file__)
    name = hashlib.sha256(repr(installed).encode()).hexdigest()[:16]
    return environment.triton_cache() / f"mla_plugin_{name}.json"


def noted() -> Needs:
    """The note's content; nothing without one, or where it cannot be read."""
    try:
        found = json.loads(note_path().read_text())
        kernels = tuple((str(module), str(name)) for module, name in found["kernels"])
        modules = tuple(str(name) for name in found["modules"] if str(name).partition(".")[0] in PACKAGES)
        return Needs(modules, kernels)
    except Exception:  # it is a cache's file: whatever it holds must not keep CUDA from starting
        return Needs()


def note(before: Iterable[str]) -> None:
    """Add to the note what has been loaded since ``sys.modules`` held the names ``before``.

    Raises:
        OSError: the note cannot be written.
    """
    loaded, old = dict(sys.modules), set(before)
    new = [name for name in loaded if name not in old and _can_be_imported(loaded[name], name)]
    kernels = [(module, name) for module in loaded if module.startswith(KERNELS) for name in _hashed(loaded[module])]
    known, path = noted(), note_path()
    modules = dict.fromkeys((*known.modules, *new))
    content = {"modules": [*modules], "kernels": sorted({*known.kernels, *kernels})}
    path.parent.mkdir(parents=True, exist_ok=True)
    own = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")  # others may write meanwhile, or read
    own.write_text(json.dumps(content))
    own.replace(path)


def _can_be_imported(module: Any, name: str) -> bool:
    """False for other packages' modules, and for those made at run time, such as ``torch.ops``."""
    spec = getattr(module, "__spec__", None)
    is_program = name.endswith("__main__")
    return (
        not is_program
        and name.partition(".")[0] in PACKAGES
        and spec is not None
        and spec.name == name
        and spec.origin is not None
    )


def _hashed(module: Any) -> list[str]:
    """Names of the module's own kernels whose sources Triton has hashed; it hashes a kernel to look it up."""
    found = vars(module).items()
    return [
        name
        for name, kernel in found
        if getattr(kernel, "hash", None) is not None
        and hasattr(kernel, "device_caches")
        and getattr(kernel, "__module__", None) == module.__name__
    ]


def when_cuda_starts() -> None:
    """Load what is noted as soon as PyTorch initialises CUDA, at once if it has."""
    if torch.version.cuda is not None:
        torch.cuda._lazy_call(load)


def load() -> None:
    """Load what is noted; whatever fails is left to the first call, which says so."""
    needs = noted()
    if not needs.modules:
        return
    for name in needs.modules:
        try:
            # parents first, as an import statement takes its locks: another thread may import the same package
            for parent in itertools.accumulate(name.split("."), "{}.{}".format):
                importlib.import_module(parent)
        except (Exception, SystemExit) as error:  # since the note was written a package was removed, or broke
            logger.debug("%s is noted in %s and cannot be imported: %r", name, note_path(), error)
    try:
        if needs.kernels:
            _start_triton(needs.kernels)
    except Exception as error:  # Triton's own names may change
        logger.debug("Triton was not started ahead of the first call: %r", error)


def _start_triton(kernels: Iterable[tuple[str, str]]) -> None:
    """Compute every hash that Triton needs to find these kernels in its cache, and start its driver."""
    from triton.compiler import make_backend
    from triton.runtime import driver
    from triton.runtime.cache import triton_key

    from mla_plugin.kernels.sources import hash_sources

    triton_key()
    make_backend(driver.active.get_current_target()).hash()
    for module, name in kernels:
        kernel = getattr(sys.modules.get(module), name, None)
        if kernel is not None:
            hash_sources(kernel)
