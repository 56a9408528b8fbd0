"""Shared by the FlashAttention backends: the options of a call, and errors for a missing or broken package."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.hooks.types import Platform
from mla_plugin.plugins.shared.packed import Rows


class Options(NamedTuple):
    """The options that every function of the family takes besides tensors.

    Attributes:
        softmax_scale: multiplies the scores.
        causal: the right side of the window is closed; the diagonal ends at the last query and the last key.
        window_size: (left, right); -1 is unlimited, and stands for every side that hides no key.
        max_seqlen_q, max_seqlen_k: longest sequence.
        cu_seqlens_q, cu_seqlens_k: int32 [B + 1], where each sequence starts in memory; None for dense tensors.
        seqused_q, seqused_k: int32 [B], true lengths; None when every sequence fills its place.
        deterministic: the backward must repeat bit for bit.
    """

    softmax_scale: float
    causal: bool
    window_size: tuple[int, int]
    max_seqlen_q: int
    max_seqlen_k: int
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    seqused_q: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    deterministic: bool = False

    @classmethod
    def of(cls, request: AttentionRequest, softmax_scale: float, rows: Rows) -> Options:
        """The options of a call whose rows are those of ``rows``."""
        q, kv = rows.q, rows.kv
        # FlashAttention 4 subtracts a side from an index with 32 bits, which overflows near 2**31
        longest = request.max_seqlen_q if request.max_seqlen_q > request.max_seqlen_kv else request.max_seqlen_kv
        left, right = request.window_size
        return cls(
            softmax_scale,
            request.is_causal,
            (-1 if left >= longest else left, -1 if right >= longest else right),
            request.max_seqlen_q,
            request.max_seqlen_kv,
            None if q is None else q.starts,
            None if kv is None else kv.starts,
            None if q is None else q.lengths,
            None if kv is None else kv.lengths,
            request.deterministic,
        )

    def named(self, *names: str) -> dict[str, Any]:
        """Some of them as keyword arguments."""
        return {name: getattr(self, name) for name in names}

    @property
    def offsets(self) -> dict[str, Any]:
        """Keyword arguments for packed sequences; none for dense tensors."""
        if self.cu_seqlens_q is None:
            return {}
        return self.named("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def not_installed(platform: Platform, name: str, *distributions: str) -> Iterator[str]:
    """The reason of a backend none of whose packages is installed."""
    if any(platform.version(distribution) is not None for distribution in distributions):
        return
    if len(distributions) == 1:
        yield f"{distributions[0]} is not installed"
    else:
        yield f"{name} is not installed: none of {', '.join(distributions)}"


@contextlib.contextmanager
def _numpy_random_state_kept() -> Iterator[None]:
    """FlashAttention 4 imports JAX where that is installed, one of whose modules draws random numbers when imported."""
    random = sys.modules.get("numpy.random")
    if random is None:
        yield
        return
    state = random.get_state()
    try:
        yield
    finally:
        random.set_state(state)


def imported(found: str, module: str, remedy: str, mark: str | None = None) -> Any:
    """The module of an installed package.

    Args:
        found: the package, as the error names it.
        module: what to import.
        remedy: what to do if that fails.
        mark: a name that the module must have; another package may put a module of the same name in its place.

    Raises:
        RuntimeError: the module cannot be imported, or is another one.
    """
    try:
        with contextlib.nullcontext() if module in sys.modules else _numpy_random_state_kept():
            library = importlib.import_module(module)
    except ImportError as error:
        raise RuntimeError(f"{found} is installed, but {module} cannot be imported ({error}): {remedy}") from error
    if mark is not None and not hasattr(library, mark):
        raise RuntimeError(f"{found} is installed, but {module} is another package's, without {mark}: {remedy}")
    return library


def empty_like(x: torch.Tensor) -> torch.Tensor:
    """Contiguous memory for a result of x's shape; ``new_empty(x.shape)`` takes twice the time on the host."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def below_dispatcher(function: Any) -> Any:
    """The implementation of a ``torch.library.custom_op``; any other function unchanged.

    The operator costs 15 us of host time, more than the launch. It is not needed: tracing and interception see
    mla-plugin's own operator above it.
    """
    return getattr(function, "_init_fn", function)
