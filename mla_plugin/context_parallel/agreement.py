"""Before the first message of a new kind of call, the ranks compare what they are about to run."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from mla_plugin.context_parallel.failure import ContextParallelError, is_capturing
from mla_plugin.context_parallel.group import Group

_MAX_AGREED = 4096

_agreed: WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, None]] = WeakKeyDictionary()


def is_agreed(group: Group, kind: Hashable) -> bool:
    """The ranks have compared this kind of call before; all forget at the same call, for they make the same ones."""
    return kind in _agreed.get(group.process_group, ())


def agree(
    group: Group, kind: Hashable, settings: Mapping[str, Any], error: Exception | None, device: torch.device
) -> None:
    """Compare with the other ranks, which do the same; all ranks raise, or none.

    Args:
        group: of the call.
        kind: what like calls share; they are compared once.
        settings: what must be equal, by its name.
        error: what this rank cannot do, found before any message; it is raised here, and named on the others.
        device: of the tensors.

    Raises:
        ContextParallelError: settings differ, or another rank has an error.
        RuntimeError: a CUDA graph is being captured.
    """
    if is_capturing(device):
        raise RuntimeError(
            "this kind of context-parallel call is captured in a CUDA graph before the ranks have compared it; run the "
            "same call once before the capture"
        )
    said = None if error is None else f"{type(error).__name__}: {error}"
    answers: list[Any] = [None] * group.size
    dist.all_gather_object(answers, (dict(settings), said), group=group.process_group)
    if error is not None:
        raise error
    for rank, (_, text) in enumerate(answers):
        if text is not None:
            raise ContextParallelError(f"context parallelism: rank {rank} of {group.size} cannot run the call: {text}")
    for name in settings:
        values = [answer.get(name) for answer, _ in answers]
        if any(value != values[0] for value in values):
            listed = ", ".join(f"rank {rank} has {value!r}" for rank, value in enumerate(values))
            raise ContextParallelError(
                f"the ranks of cp_group call attention with different {name}: {listed}; it must be the same on all"
            )
    kinds = _agreed.setdefault(group.process_group, {})
    if len(kinds) >= _MAX_AGREED:
        kinds.clear()
    kinds[kind] = None
