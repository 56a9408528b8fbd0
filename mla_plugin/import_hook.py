"""Run something as soon as a module has been imported, without importing it."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def when_imported(name: str, callback: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Call back with the module: at once when it has been imported, otherwise right after its code has run.

    Args:
        name: the module's full name.
        callback: it runs once, inside the import.

    Returns:
        a function that stops waiting; calling it after the import does nothing.
    """
    if name in sys.modules:
        callback(importlib.import_module(name))  # waits for another thread that is still importing it
        return lambda: None
    finder = _Finder(name, callback)
    sys.meta_path.insert(0, finder)
    return finder.leave


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as the finders after it do, and adds the callback to its loader."""

    def __init__(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._callback = callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        self.leave()
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                self._tell_after(spec.loader)
                return spec
        return None

    def _tell_after(self, loader: importlib.abc.Loader) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._callback(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]

    def leave(self) -> None:
        """Stop waiting."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
