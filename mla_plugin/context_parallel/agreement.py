"""What must be equal on all ranks in a call, as one number to compare, and as text if the numbers differ."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from mla_plugin.context_parallel.group import Group

_MAX_AGREED = 4096


class Values(NamedTuple):
    """Values of one call that are not part of its ``Kind``, as far as the host knows them.

    Attributes:
        named: plain values by argument name.
        number: hash of them.
    """

    named: Mapping[str, Any]
    number: int

    @classmethod
    def of(cls, named: Mapping[str, Any]) -> Values:
        """The values with their hash."""
        return cls(named, _number_of(named))


NO_VALUES = Values({}, 0)


class Kind(NamedTuple):
    """What calls of one kind have in common.

    Attributes:
        key: identifies the kind on this rank.
        settings: what must be equal on all ranks, by argument name; plain values.
        number: hash of them.
    """

    key: Hashable
    settings: Mapping[str, Any]
    number: int


class Fingerprint(NamedTuple):
    """Everything about a rank's call that must be equal on the other ranks. It holds no tensor.

    Attributes:
        what: ``forward``, ``backward`` or ``decode``.
        kind: the kind of call; each kind is compared at least once.
        values: the other values of this call.
        number: hash of at most 62 bits; equal on all ranks if everything else is.
    """

    what: str
    kind: Kind
    values: Values
    number: int

    @property
    def text(self) -> str:
        """The text sent to the other ranks if the numbers differ."""
        settings = {"the call": self.what, **self.kind.settings, **self.values.named}
        return json.dumps({name: repr(x) for name, x in settings.items()})


_agreed: WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, Kind]] = WeakKeyDictionary()


def fingerprint_of(
    group: Group, what: str, key: Hashable, settings: Callable[[], Mapping[str, Any]], values: Values = NO_VALUES
) -> Fingerprint:
    """The fingerprint of a call; ``settings`` is called only if calls with this key have not been compared yet."""
    kind = _agreed.get(group.process_group, {}).get(key)
    if kind is None:
        found = settings()
        kind = Kind(key, found, _number_of(found))
    return Fingerprint(what, kind, values, _number_of((what, kind.number, values.number)))


def is_agreed(group: Group, kind: Kind) -> bool:
    """Whether the ranks have compared this kind of call. All ranks make the same calls, so they evict it together."""
    return kind.key in _agreed.get(group.process_group, ())


def note(group: Group, kind: Kind) -> None:
    """Record that the ranks have compared this kind of call."""
    kinds = _agreed.setdefault(group.process_group, {})
    if kind.key in kinds:
        return
    if len(kinds) >= _MAX_AGREED:
        kinds.clear()
    kinds[kind.key] = kind


def difference(texts: Sequence[str]) -> str:
    """The error message, from every rank's ``Fingerprint.text``."""
    found = [json.loads(text) for text in texts]
    for name in dict.fromkeys(itertools.chain.from_iterable(found)):
        values = [settings.get(name, "nothing") for settings in found]
        if len(set(values)) > 1:
            listed = ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))
            return f"the ranks of cp_group call with different {name}: {listed}; it must be the same on all"
    return "the ranks of cp_group make different calls"  # with equal texts: settings that have no text differ


def _number_of(content: Any) -> int:
    """62-bit hash of the content's text; the same in every process, unlike Python's hash of a string."""
    digest = hashlib.blake2b(repr(content).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
