"""A serving engine's own Python, several releases, on a machine without a GPU and without the engine's dependencies.

The Python of a release lies in a cache folder; ``run`` starts pytest in a process that imports it. Packages and modules
that the engine imports and the tests do not use are stand-ins there: ``StandIns``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from tests.repository.project import ROOT


def cache(host: str) -> Path:
    """Where the releases of a host lie: outside the checkout, so that they outlast it."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "mla_plugin" / host


class _Anything(type):
    """Classes that may be called, subclassed with any options, subscripted, and asked for any attribute."""

    def __getattr__(cls, name: str) -> Any:
        return _anything(name)

    def __getitem__(cls, item: object) -> Any:
        return cls

    def __setitem__(cls, item: object, value: object) -> None:
        pass

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __or__(cls, other: object) -> Any:
        return cls

    __ror__ = __or__


class _Base(metaclass=_Anything):
    def __new__(cls, *given: object, **named: object) -> Any:
        if given and callable(given[0]) and not named:  # it is used as a decorator
            return given[0]
        return object.__new__(cls)

    def __init__(self, *given: object, **named: object) -> None:
        pass

    def __init_subclass__(cls, **options: object) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def _anything(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything(name, (_Base,), {})


class StandIns:
    """Finds every module of the named packages and modules, and of what is in them.

    Args:
        names: of packages and modules.
        real: modules in them that are imported as they are, where ``folder`` has them.
        folder: what the real modules' names start from.
    """

    def __init__(self, names: Iterable[str], real: Iterable[str] = (), folder: Path = Path()) -> None:
        self.names, self.real, self.folder = tuple(f"{name}." for name in names), set(real), folder

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        wanted = f"{fullname}.".startswith(self.names) and fullname not in self.real
        return ModuleSpec(fullname, self, is_package=True) if wanted else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = [str(self.folder.joinpath(*spec.name.split(".")))]
        module.__getattr__ = _anything  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def run(host: str, version: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with these arguments in a process that uses a release; ``host`` is a module with ``use(version)``."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from {host} import use; use({version!r}); "
    code += "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:warnings", "--no-header", "--tb=short"]
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *options, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
