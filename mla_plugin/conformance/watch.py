"""Monitors a hook: uninitialised memory, inputs, the random state, synchronisations."""

from __future__ import annotations

import functools
import itertools
import os
import random
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mla_plugin import environment
from mla_plugin.conformance.budget import ConformanceError, fail
from mla_plugin.conformance.settings import changed_variables, check_read_often, read_often, settings_kept
from mla_plugin.variables import VARIABLES

_OTHER_VALUES = ("0", "1", "other", None)
"""What variables are set to, or that they are removed."""
_ALLOCATIONS = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)


class PoisonedMemory(TorchDispatchMode):
    """Fills uninitialised floating-point tensors with NaN, so that elements that are never written are detected.

    It also sees writes to inputs and changes of settings that are undone before the call ends.

    ``torch.utils.deterministic.fill_uninitialized_memory`` would do so too, but only together with deterministic
    algorithms, which change what is under test.

    Args:
        inputs: tensors that no operator may write to: another thread may read them.
    """

    def __init__(self, inputs: Mapping[str, torch.Tensor | None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owners, self._settings = _owners(inputs or {}), read_often()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        check_read_often(self._settings)
        for position, name in _written(func):
            x = args[position] if position < len(args) else (kwargs or {}).get(name)
            owner = self._owners.get(_address(x)) if isinstance(x, torch.Tensor) and x.numel() else None
            if owner is not None and not _changes_nothing(func, args):
                fail(f"{owner} is written to by {func}; a backend must leave its inputs as they are")
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _ALLOCATIONS and result.is_floating_point():
            result.fill_(torch.nan)
        if isinstance(result, list):  # one with None, which stands for an undefined tensor, cannot go back
            return [torch.empty(0) if x is None else x for x in result]
        return result


@functools.cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments that an operator of PyTorch writes to; other schemas claim more."""
    if func.namespace != "aten":
        return ()
    arguments = enumerate(func._schema.arguments)
    return tuple((i, x.name) for i, x in arguments if x.alias_info is not None and x.alias_info.is_write)


def _changes_nothing(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a write changes nothing: Triton's interpreter copies every argument of a kernel back."""
    return func.overloadpacket is torch.ops.aten.copy_ and _equal_bits(args[0], args[1])


@contextmanager
def synchronisation_is_an_error(device_type: str) -> Iterator[None]:
    """On a CUDA device, an operator of PyTorch that makes the host wait raises."""
    if device_type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def unmodified(tensors: Mapping[str, torch.Tensor | None]) -> Iterator[None]:
    """Fail if a tensor is replaced in the block, or its memory changes, gaps included."""
    given = {name: x for name, x in tensors.items() if x is not None}
    before = {name: (_memory(x).clone(), _facts(x)) for name, x in given.items()}
    yield
    for name, (memory, facts) in before.items():
        if not torch.equal(memory, _memory(given[name])):
            fail(f"{name} was modified; a backend must leave its inputs as they are")
        for fact, value in _facts(given[name]).items():
            if value != facts[fact]:
                fail(f"{fact} of {name} was {facts[fact]} and is {value}; a backend must leave its inputs as they are")


def _facts(x: torch.Tensor) -> dict[str, Any]:
    return {
        "shape": tuple(x.shape),
        "strides": x.stride(),
        "address": x.data_ptr(),
        "requires_grad": x.requires_grad,
        "grad": None if not x.is_leaf or x.grad is None else "a tensor",
        "hooks": len(x._backward_hooks or ()),
        "attributes": tuple(vars(x)),
    }


def _memory(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.detach().untyped_storage())


@contextmanager
def nothing_changed(*objects: object) -> Iterator[None]:
    """Fail if the block adds an attribute to an object that lives on, such as a plan, or changes a frozen one."""
    before = [dict(vars(each)) for each in objects]
    yield
    for each, values in zip(objects, before, strict=True):
        names = [field.name for field in fields(each)] if is_dataclass(each) else []
        changed = [name for name in names if getattr(each, name) is not values[name]]
        if changed:
            fail(f"the hook changed {', '.join(changed)} of its {type(each).__name__}, which other calls share")
        added = [
            name for name in vars(each) if name not in values and name != "_hash" and not hasattr(type(each), name)
        ]
        if added:
            fail(
                f"the hook added {', '.join(added)} to its {type(each).__name__}, which other calls share; a "
                "hook must not change its arguments"
            )


@contextmanager
def random_state_kept(device_type: str) -> Iterator[None]:
    """Fail when the global random state of PyTorch, Python or NumPy changes inside the block.

    The block starts with a random seed: with a seed that a backend also sets, no change would be visible.
    """
    generators = _generators(device_type)
    outside = {name: read() for name, (read, _, _) in generators.items()}
    seed = secrets.randbits(32)
    for _, _, set_seed in generators.values():
        set_seed(seed)
    try:
        before = {name: _values(read()) for name, (read, _, _) in generators.items()}
        yield
        for name, (read, _, _) in generators.items():
            if _values(read()) != before[name]:
                fail(f"the random state of {name} was changed; use a generator of your own")
    finally:
        for name, (_, restore, _) in generators.items():
            restore(outside[name])


def _generators(device_type: str) -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[int], Any]]]:
    """Name to the ways to read the state, to restore it and to set a seed."""
    found: dict[str, Any] = {
        "torch": (torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed),
        "random": (random.getstate, random.setstate, random.seed),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        found["numpy"] = (numpy.random.get_state, numpy.random.set_state, numpy.random.seed)
    if device_type == "cuda":
        found["torch.cuda"] = (torch.cuda.get_rng_state, torch.cuda.set_rng_state, torch.cuda.manual_seed)
    return found


def _values(state: Any) -> Any:
    """A state as a value that == can compare."""
    if isinstance(state, tuple) and any(hasattr(x, "tolist") for x in state):
        return tuple(map(_values, state))
    return state.tolist() if hasattr(state, "tolist") else state


@contextmanager
def as_the_library(device_type: str, inputs: Mapping[str, torch.Tensor | None], *, is_poisoned: bool) -> Iterator[None]:
    """Around a hook: autograd and autocast off, as in the library, and everything watched."""
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(settings_kept())
        enter(torch.no_grad())
        enter(unmodified(inputs))
        enter(random_state_kept(device_type))
        enter(synchronisation_is_an_error(device_type))
        if is_poisoned:
            enter(PoisonedMemory(inputs))
        enter(torch._C._AutoDispatchBelowAutograd())
        enter(torch._C._DisableAutocast())
        yield
        if torch.is_grad_enabled():
            fail("the hook left grad mode on; the library does autograd, so restore the mode")


class Kept:
    """Results that the caller keeps while other calls run, with copies to compare."""

    def __init__(self, words: str, **tensors: torch.Tensor | None) -> None:
        self._words = words
        self._tensors = {name: x for name, x in tensors.items() if isinstance(x, torch.Tensor)}
        self._before = {name: x.clone() for name, x in self._tensors.items()}

    def check(self) -> None:
        """Fail when one of them is no longer what it was."""
        for name, x in self._tensors.items():
            if not _equal_bits(x, self._before[name]):
                fail(f"{name} {self._words} was changed by a later call; return fresh memory each time")


def _equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())


def check_no_graph(**tensors: torch.Tensor | None) -> None:
    """Check that the results of a hook have no autograd graph."""
    for name, x in tensors.items():
        if isinstance(x, torch.Tensor) and (x.requires_grad or x.grad_fn is not None):
            fail(f"{name} requires a gradient; the library does autograd, so return a detached tensor")


def check_not_shared(results: Mapping[str, torch.Tensor | None], inputs: Mapping[str, torch.Tensor | None]) -> None:
    """Check that no two elements of the results share memory."""
    owners, starts = _owners(inputs), dict[int, str]()
    for name, x in results.items():
        if not isinstance(x, torch.Tensor) or not x.numel():
            continue
        owner = owners.get(_address(x)) or starts.get(x.data_ptr())
        if owner is not None:
            fail(f"{name} shares its memory with {owner}; return a fresh tensor")
        starts[x.data_ptr()] = name
        if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
            fail(f"{name} has strides {x.stride()}, so elements of it share their memory; return a fresh tensor")


def _owners(inputs: Mapping[str, torch.Tensor | None]) -> dict[int, str]:
    """The input that memory belongs to, by its address."""
    return {_address(x): name for name, x in inputs.items() if x is not None and x.numel()}


def _address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def check_same_in_other_environments(ask: Callable[[], object], answer: object) -> None:
    """Ask again with other environment variables: the answer may depend on its arguments alone.

    Each variable that was read is changed by itself. Reads are recorded where Python makes them; so all variables are
    changed together, too.
    """
    with environment.recorded_reads() as read:
        if any(again != answer for again in (ask(), ask())):  # twice: it may read the second time alone
            fail(
                "select_backend answers a request differently the second time; the answer is cached, so it must not "
                "change"
            )
    names = list(dict.fromkeys([*environment.variables(), *(variable.name for variable in VARIABLES)]))
    for name, value in itertools.product(_settable(read), _OTHER_VALUES):
        _check_same_with([name], value, ask, answer)
    for value in _OTHER_VALUES:
        try:
            _check_same_with(names, value, ask, answer)
        except ConformanceError:
            for name in names:
                _check_same_with([name], value, ask, answer)
            raise


def _settable(names: Iterable[Any]) -> list[str]:
    """The names, of those looked up, that a variable can have."""
    decoded = [os.fsdecode(name) for name in names if isinstance(name, str | bytes)]
    return [name for name in dict.fromkeys(decoded) if name and name.isprintable() and "=" not in name]


def _check_same_with(names: list[str], value: str | None, ask: Callable[[], object], answer: object) -> None:
    which = names[0] if len(names) == 1 else "every variable"
    words = f"without {which}" if value is None else f"with {which}={value}"
    problem = "answers differently"
    with changed_variables(names, value):
        try:
            if ask() == answer:
                return
        except ConformanceError:
            raise
        except Exception as error:
            problem = f"raises {error!r}"
    fail(
        f"select_backend {problem} {words} in the environment; the answer is cached, so it must depend on the request "
        "and the platform alone"
    )
