"""Backends made of a correct one's source by replacing one line."""

from __future__ import annotations

import types
from dataclasses import dataclass
from pathlib import Path

from mla_plugin.hooks.manager import BackendManager

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Broken:
    """One fault.

    Attributes:
        name: what is wrong, in a few words without blanks.
        old, new: a part of the correct source that occurs once, and what stands in its place.
        before: replacements that are made first, each of a part that occurs once: what the correct source needs to have
            the feature that the fault is in.
        caught_by: the test that must catch it, ``test_backward[case]`` or another test's name.
        message: what the error must match.
        refuses_more: than the correct backend does, so no refusal is unexpected.
    """

    name: str
    old: str
    new: str
    caught_by: str = ""
    message: str = ""
    before: tuple[tuple[str, str], ...] = ()
    refuses_more: bool = False

    def __str__(self) -> str:
        return self.name


def module_of(
    source: str, fault: Broken | None = None, before: tuple[tuple[str, str], ...] = (), **constants: object
) -> types.ModuleType:
    """The correct backend's module, with a fault; or without one and with other replacements, as in ``before``."""
    text = (HERE / f"{source}.py").read_text()
    for old, new in before if fault is None else (*fault.before, (fault.old, fault.new)):
        if text.count(old) != 1:
            raise ValueError(f"{fault}: {old!r} occurs {text.count(old)} times in {source}.py, not once")
        text = text.replace(old, new)
    module = types.ModuleType(f"{source}_{fault or 'correct'}")
    exec(compile(text, module.__name__, "exec"), module.__dict__)
    vars(module).update(constants)
    return module


def manager_of(backend: object, name: str = "sample") -> BackendManager:
    """A manager with this backend alone."""
    manager = BackendManager(builtins={}, load_entry_points=False)
    manager.register(backend, name)
    return manager
