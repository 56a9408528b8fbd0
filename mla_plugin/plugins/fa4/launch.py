"""Repeats the launch of a dense forward without the library's work on the host.

``flash_attn_func`` takes about 80 us on the host. It decides on tiles and schedulers, makes a key of sixty entries and
looks the compiled kernel up; calls of one kind find the same one. So the first call of a kind records how the kernel is
called, and later calls repeat that with their own tensors.

Nothing is assumed about the order of the kernel's arguments, which differs between releases. A call is repeated only if
one kernel was called, and each of its tensors was q, k, v, out or lse. Anything else, such as a split of the keys or a
scheduler's counter, stays with the library. So do releases without the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from mla_plugin.plugins.shared.dense import Run

_recording = threading.Lock()


class _Call(NamedTuple):
    """A compiled kernel and the arguments that it was called with."""

    kernel: Callable[..., object]
    arguments: tuple[Any, ...]


class _Recorder:
    """Stands in for the library's cache of compiled kernels, and records what one thread calls.

    Args:
        cache: the library's own.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._thread = threading.get_ident()
        self.calls: list[_Call | None] = []

    def __contains__(self, key: object) -> bool:
        return key in self._cache

    def __setitem__(self, key: object, kernel: object) -> None:
        self._cache[key] = kernel

    def __getitem__(self, key: object) -> Any:
        kernel = self._cache[key]
        if threading.get_ident() != self._thread:
            return kernel

        def recorded(*arguments: Any, **named: Any) -> object:
            self.calls.append(None if named else _Call(kernel, arguments))
            return kernel(*arguments, **named)

        return recorded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def recorded(
    library: Any, run: Run, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[Sequence[torch.Tensor], Run]:
    """The results of ``run``, and what computes later calls of the same kind.

    Args:
        library: the module ``flash_attn.cute.interface``.
        run: its forward with all other arguments given; returns out and lse first.
        q, k, v: of this call.
    """
    function: Any = getattr(library, "_flash_attn_fwd", None)
    if not hasattr(function, "compile_cache"):
        return run(q, k, v), run
    with _recording:
        cache = function.compile_cache
        recorder = _Recorder(cache)
        function.compile_cache = recorder
        try:
            found = run(q, k, v)
        finally:
            function.compile_cache = cache
    call = recorder.calls[0] if len(recorder.calls) == 1 else None
    return found, run if call is None else _repeated(call, (q, k, v, *found[:2])) or run


def _repeated(call: _Call, tensors: Sequence[torch.Tensor]) -> Run | None:
    """The call with other q, k, v and new results; None if it cannot be repeated.

    Args:
        call: of the compiled kernel.
        tensors: q, k, v, out and lse of that call.
    """
    out, lse = tensors[3:]
    places = [_place(argument, tensors) for argument in call.arguments]
    if sorted(place for place in places if place >= 0) != [0, 1, 2, 3, 4] or _UNKNOWN in places:
        return None
    if not (out.is_contiguous() and lse.is_contiguous()):
        return None
    kernel, arguments = call.kernel, [x if place < 0 else None for x, place in zip(call.arguments, places, strict=True)]
    at_q, at_k, at_v, at_out, at_lse = (places.index(index) for index in range(5))
    out_shape, lse_shape, dtype, device = out.shape, lse.shape, out.dtype, out.device

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Sequence[torch.Tensor]:
        out = torch.empty(out_shape, dtype=dtype, device=device)
        lse = torch.empty(lse_shape, dtype=torch.float32, device=device)
        given = arguments.copy()
        given[at_q], given[at_k], given[at_v], given[at_out], given[at_lse] = q, k, v, out, lse
        kernel(*given)
        return out, lse

    return run


_CONSTANT, _UNKNOWN = -1, -2


def _place(argument: object, tensors: Sequence[torch.Tensor]) -> int:
    """Which of the tensors an argument is; ``_CONSTANT`` if it holds none, ``_UNKNOWN`` if that is not certain."""
    if isinstance(argument, torch.Tensor):
        found = [index for index, x in enumerate(tensors) if _is_same(argument, x)]
        return found[0] if len(found) == 1 else _UNKNOWN
    return _CONSTANT if _is_constant(argument) else _UNKNOWN


def _is_same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.data_ptr() == y.data_ptr() and x.dtype == y.dtype and x.shape == y.shape and x.stride() == y.stride()


def _is_constant(argument: object) -> bool:
    if isinstance(argument, (tuple, list)):
        return all(map(_is_constant, argument))
    return argument is None or isinstance(argument, (bool, int, float, str))
