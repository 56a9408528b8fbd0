"""What ranks must have in common in a call, as one number that they can compare, and in words where they differ."""

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
    """What one call has beside what calls of its kind share, as far as the host knows it.

    Attributes:
        named: plain values by the name that a caller knows.
        number: of them.
    """

    named: Mapping[str, Any]
    number: int

    @classmethod
    def of(cls, named: Mapping[str, Any]) -> Values:
        """With their number."""
        return cls(named, _number_of(named))


NO_VALUES = Values({}, 0)


class Kind(NamedTuple):
    """What like calls share.

    Attributes:
        key: of such calls on this rank.
        settings: what must be equal on all ranks, by its name; plain values.
        number: of them.
    """

    key: Hashable
    settings: Mapping[str, Any]
    number: int


class Terms(NamedTuple):
    """A rank's call as the other ranks must make it too. It holds no tensor.

    Attributes:
        what: ``forward``, ``backward`` or ``decode``.
        kind: such calls are compared once at least.
        values: what this call has besides.
        number: at most 62 bits; equal on all ranks where everything is.
    """

    what: str
    kind: Kind
    values: Values
    number: int

    @property
    def text(self) -> str:
        """What the other ranks are told where numbers differ."""
        settings = {"the call": self.what, **self.kind.settings, **self.values.named}
        return json.dumps({name: repr(x) for name, x in settings.items()})


_agreed: WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, Kind]] = WeakKeyDictionary()


def terms_of(
    group: Group, what: str, key: Hashable, settings: Callable[[], Mapping[str, Any]], values: Values = NO_VALUES
) -> Terms:
    """The terms of a call; ``settings`` is asked where calls with this key have not been compared yet."""
    kind = _agreed.get(group.process_group, {}).get(key)
    if kind is None:
        found = settings()
        kind = Kind(key, found, _number_of(found))
    return Terms(what, kind, values, _number_of((what, kind.number, values.number)))


def is_agreed(group: Group, kind: Kind) -> bool:
    """The ranks have compared such calls before; all forget at the same call, for they make the same ones."""
    return kind.key in _agreed.get(group.process_group, ())


def note(group: Group, kind: Kind) -> None:
    """The ranks have compared such a call."""
    kinds = _agreed.setdefault(group.process_group, {})
    if kind.key in kinds:
        return
    if len(kinds) >= _MAX_AGREED:
        kinds.clear()
    kinds[kind.key] = kind


def difference(texts: Sequence[str]) -> str:
    """What is wrong, in words, out of every rank's ``Terms.text``."""
    found = [json.loads(text) for text in texts]
    for name in dict.fromkeys(itertools.chain.from_iterable(found)):
        values = [settings.get(name, "nothing") for settings in found]
        if len(set(values)) > 1:
            listed = ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))
            return f"the ranks of cp_group call with different {name}: {listed}; it must be the same on all"
    return "the ranks of cp_group make different calls"  # in the same words: settings of a kind that has no text


def _number_of(content: Any) -> int:
    """62 bits of the content's text; the same in every process, unlike Python's own hash of a string."""
    digest = hashlib.blake2b(repr(content).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
