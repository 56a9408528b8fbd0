"""Repeats the launch of a dense forward without the library's work on the host.

``flash_attn_func`` takes about 80 us on the host. It decides on tiles and schedulers, makes a key of sixty entries and
looks the compiled kernel up; calls of one kind find the same one. So the second call of a kind, when the kernel is
compiled, records what the library does, and later calls repeat the launch alone with their own tensors.

The order of the kernel's arguments differs between releases, so it is found out and not assumed. A call is repeated
only if

- one kernel was called, each of its tensors was q, k, v, out or lse, and each of its numbers was one that the library
  got: not a pointer, a stream or a decision that may change;
- besides that the library only allocated memory and made views, so out and lse are what the kernel writes.

Anything else, such as a split of the keys, a scheduler's counter or a release without the cache, stays with the
library.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mla_plugin.plugins.shared.dense import Run

_MOST_TRIES = 4
"""At most so many calls of a kind are recorded: one with k in the place of v tells nothing about the next."""

_recording = threading.Lock()

_HARMLESS = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
        *(
            "alias",
            "as_strided",
            "detach",
            "permute",
            "select",
            "slice",
            "squeeze",
            "t",
            "transpose",
            "unsqueeze",
            "view",
        ),
    )
)
"""Operators that neither read nor write elements."""


class _Call(NamedTuple):
    """A compiled kernel and the arguments that it was called with."""

    kernel: Callable[..., object]
    arguments: tuple[Any, ...]


class _Operators(TorchDispatchMode):
    """Whether PyTorch's operators that ran were ``_HARMLESS``, but for those of the kernel itself."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.are_harmless, self.is_in_kernel = True, False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.are_harmless &= self.is_in_kernel or func.overloadpacket in _HARMLESS
        return func(*args, **(kwargs or {}))


class _Recorder:
    """Stands in for the library's cache of compiled kernels, and records what one thread calls.

    Args:
        cache: the library's own.
        operators: that are watched meanwhile.
    """

    def __init__(self, cache: Any, operators: _Operators) -> None:
        self._cache, self._operators = cache, operators
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
            self._operators.is_in_kernel = True
            try:
                return kernel(*arguments, **named)
            finally:
                self._operators.is_in_kernel = False

        return recorded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class Repeated:
    """The forward of one kind of calls: the library's, and the launch alone once that is recorded.

    Args:
        library: the module ``flash_attn.cute.interface``.
        run: its forward with all other arguments given; returns out and lse first.
        numbers: those that the library gets as arguments.
    """

    def __init__(self, library: Any, run: Run, numbers: Collection[object]) -> None:
        self._function: Any = getattr(library, "_flash_attn_fwd", None)
        self._run, self._numbers = run, frozenset(numbers)
        self._launch: Run | None = None
        self._tries_left = _MOST_TRIES if hasattr(self._function, "compile_cache") else 0

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Sequence[torch.Tensor]:
        """out and lse."""
        if self._launch is not None:
            try:
                return self._launch(q, k, v)
            except Exception:  # the library's own error says more, or it finds another way
                self._launch, self._tries_left = None, 0
        # one call at a time is recorded; nobody waits, nor after a fork in the middle
        if self._tries_left and _recording.acquire(blocking=False):
            try:
                return self._recorded(q, k, v)
            finally:
                _recording.release()
        return self._run(q, k, v)

    def _recorded(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Sequence[torch.Tensor]:
        self._tries_left -= 1
        function, operators = self._function, _Operators()
        cache = function.compile_cache
        function.compile_cache = recorder = _Recorder(cache, operators)
        try:
            with operators:
                found = self._run(q, k, v)
        finally:
            if function.compile_cache is recorder:
                function.compile_cache = cache
        call = recorder.calls[0] if len(recorder.calls) == 1 else None
        if call is not None and operators.are_harmless:
            sizes = {size for x in (q, k, v) for size in x.shape}
            self._launch = _launch(call, (q, k, v, *found[:2]), self._numbers | sizes)
        return found


def _launch(call: _Call, tensors: Sequence[torch.Tensor], numbers: Collection[object]) -> Run | None:
    """The call with other q, k, v and new results; None if it cannot be repeated.

    Args:
        call: of the compiled kernel.
        tensors: q, k, v, out and lse of that call.
        numbers: that may be among its arguments.
    """
    out, lse = tensors[3:]
    places = [_place(argument, tensors, numbers) for argument in call.arguments]
    if sorted(place for place in places if place >= 0) != [0, 1, 2, 3, 4] or _UNKNOWN in places:
        return None
    if not (out.is_contiguous() and lse.is_contiguous()):
        return None
    kernel, arguments = call.kernel, [x if place < 0 else None for x, place in zip(call.arguments, places, strict=True)]
    at_q, at_k, at_v, at_out, at_lse = (places.index(index) for index in range(5))
    out_shape, lse_shape, dtype, lse_dtype, device = out.shape, lse.shape, out.dtype, lse.dtype, out.device

    def launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Sequence[torch.Tensor]:
        out = torch.empty(out_shape, dtype=dtype, device=device)
        lse = torch.empty(lse_shape, dtype=lse_dtype, device=device)
        given = arguments.copy()
        given[at_q], given[at_k], given[at_v], given[at_out], given[at_lse] = q, k, v, out, lse
        kernel(*given)
        return out, lse

    return launch


_CONSTANT, _UNKNOWN = -1, -2


def _place(argument: object, tensors: Sequence[torch.Tensor], numbers: Collection[object]) -> int:
    """Which of the tensors an argument is; ``_CONSTANT`` if it holds none, ``_UNKNOWN`` if that is not certain."""
    if isinstance(argument, torch.Tensor):
        found = [index for index, x in enumerate(tensors) if _is_same(argument, x)]
        return found[0] if len(found) == 1 else _UNKNOWN
    return _CONSTANT if _is_constant(argument, numbers) else _UNKNOWN


def _is_same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.data_ptr() == y.data_ptr() and x.dtype == y.dtype and x.shape == y.shape and x.stride() == y.stride()


def _is_constant(argument: object, numbers: Collection[object]) -> bool:
    if isinstance(argument, (tuple, list)):
        return all(_is_constant(x, numbers) for x in argument)
    if isinstance(argument, (int, float)) and not isinstance(argument, bool):
        return argument in numbers
    return argument is None or isinstance(argument, (bool, str))
