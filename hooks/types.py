"""Types of ``select_backend`` for both operations: the platform, ``Accepted``, ``Refused`` with its reasons."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal


@dataclass(frozen=True)
class Platform:
    """What a decision depends on besides the request: one device and the installed packages.

    Attributes:
        device_type: ``"cpu"`` or ``"cuda"``.
        compute_capability: (major, minor); None on the CPU.
        packages: (distribution name, version) pairs of the installed packages that backends use, sorted by name.
        cudnn_version: cuDNN that PyTorch loads, as (major, minor, patch); None without cuDNN.
        cuda_version: CUDA toolkit that PyTorch was built with, such as ``"13.0"``; None for a CPU build.
        shared_memory_per_block: largest opt-in shared memory of one thread block, in bytes; None on the CPU.
        multi_processor_count: number of SMs; None on the CPU.
        tools: build tools found on the PATH (``nvcc``, ``ninja``); ``triton-interpreter`` when Triton runs on the CPU.
        device_name: the driver's name of the device, such as ``"NVIDIA H200"``; None if unknown.

    Raises:
        TypeError: a version, the packages or the tools have another form.
    """

    device_type: str = "cpu"
    compute_capability: tuple[int, int] | None = None
    packages: tuple[tuple[str, str], ...] = ()
    cudnn_version: tuple[int, int, int] | None = None
    cuda_version: str | None = None
    shared_memory_per_block: int | None = None
    multi_processor_count: int | None = None
    tools: frozenset[str] = field(default_factory=frozenset)
    device_name: str | None = None

    def __post_init__(self) -> None:
        for name, count in (("compute_capability", 2), ("cudnn_version", 3)):
            given = getattr(self, name)
            if given is not None and not _are(given, int, count):
                example = "9, 0" if count == 2 else "9, 8, 0"
                raise TypeError(f"{name}={given!r}; expected {count} ints such as ({example}), or None")
        if not (isinstance(self.packages, tuple) and all(_are(pair, str, 2) for pair in self.packages)):
            raise TypeError(f"packages={self.packages!r}; expected pairs such as (('flash-attn', '2.8.3'),)")
        if not isinstance(self.tools, frozenset):
            raise TypeError(f"tools={self.tools!r}; expected a frozenset such as frozenset({{'nvcc'}})")

    def version(self, distribution: str) -> str | None:
        """Version of an installed distribution, or None."""
        return dict(self.packages).get(distribution)

    def __hash__(self) -> int:
        """The hash of the attributes, computed once: backends look up cached results by platform at every call."""
        value: int | None = self.__dict__.get("_hash")
        if value is None:
            value = hash(tuple(getattr(self, field.name) for field in fields(self)))
            object.__setattr__(self, "_hash", value)
        return value

    def __getstate__(self) -> dict[str, Any]:
        """Only the attributes: the cached hash is invalid in another process, where strings hash differently."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _are(values: object, kind: type, count: int) -> bool:
    return isinstance(values, tuple) and len(values) == count and all(isinstance(x, kind) for x in values)


FORWARD_ONLY = "forward only: "
"""How the note begins that says why a backend that runs the forward does not run the backward."""


@dataclass(frozen=True)
class Accepted:
    """A backend can run the request.

    Attributes:
        priority: for third-party backends. 0 (the default) places the backend after the built-in fused backends and
            before the unfused fallback; a positive number before every built-in, higher numbers first; a negative
            number after everything else. Built-in backends are ordered by the resolver, which ignores their priority.
        backward_by: name of the backend that runs the backward; None for the accepting backend itself. Ignored for
            built-in backends where forward and backward are chosen independently: outside TransformerEngine, without
            dropout, and with no backend requested by name.
        notes: facts worth showing in ``explain``, such as the kernel that will run.
        kv_cache_formats: formats of quantised caches that the backend's decode reads. If the request's format is not
            among them, the acceptance counts as a refusal, so a backend need not know the formats that it cannot read.
        drops_nan: of decode: the row of ``out`` may be 0 where a query has NaN, because the library leaves out parts of
            the keys whose sums are NaN. Otherwise that row must be NaN, see ``forward``.
    """

    priority: int = 0
    backward_by: str | None = None
    notes: tuple[str, ...] = ()
    kv_cache_formats: tuple[str, ...] = ()
    drops_nan: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.priority, int) or isinstance(self.priority, bool):
            raise TypeError(f"priority={self.priority!r}; expected an integer, 0 for the default order")


@dataclass(frozen=True)
class Refused:
    """A backend cannot run the request; every reason gives the value found and the limit."""

    reasons: tuple[str, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.reasons, tuple):
            raise TypeError(f"reasons={self.reasons!r}; expected a tuple of strings: Refused((reason,))")
        if not self.reasons:
            raise ValueError("Refused needs at least one reason: give the value found and what is expected")


@dataclass(frozen=True)
class TraceEntry:
    """One line of a decision: which backend, whether it can run, and why (not)."""

    backend: str
    accepted: bool
    layer: Literal["environment", "cascade", "backend", "host"]
    reasons: tuple[str, ...] = ()


class NoBackendError(RuntimeError):
    """No backend can run the request. ``trace`` holds every backend with every reason."""

    def __init__(self, message: str, trace: tuple[TraceEntry, ...] = ()) -> None:
        super().__init__(message)
        self.trace = trace
