"""vLLM's own Python, several releases, on a machine without a GPU and without vLLM's dependencies.

An sdist of vLLM has all of its Python and takes 38 to 47 MB, its wheel 400. ``folder_of`` fetches one and keeps the
Python of it in a cache folder; ``run`` starts pytest in a process where ``import vllm`` is that release. Packages that
vLLM imports and these tests do not use are stand-ins there, see ``use``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from tests.repository.project import ROOT

FETCHED = ("0.25.1", "0.33.0")
"""The ends of the supported range; tests fetch them."""
KEPT = ("0.28.0", "0.31.0")
"""Between them, where vLLM's interface changed: tested where ``python -m tests.compat.vllm.host`` has fetched them."""

NOT_NEEDED = (
    *(
        "PIL",
        "aiohttp",
        "cachetools",
        "cbor2",
        "cpuinfo",
        "einops",
        "openai",
        "openai_harmony",
        "psutil",
        "pybase64",
        "uvloop",
    ),
    "zmq",
)
"""Packages that vLLM imports on the way to its attention, and that no test here reaches."""
NOT_USED = "vllm.distributed.kv_transfer"
"""vLLM's transfer of caches between machines, which would import its server."""


def cache() -> Path:
    """Where the Python lies: outside the checkout, so that it outlasts it."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "mla_plugin" / "vllm"


BUILD_BACKEND = '''
"""In the place of setuptools, which pip asks for the name and the version of an sdist before it hands it over.

vLLM's answer needs torch and a compiler. This one is in the sdist; and it keeps the Python while it is unpacked.
"""
import os, pathlib, shutil

def prepare_metadata_for_build_wheel(directory, config_settings=None):
    kept = pathlib.Path(os.environ["KEPT"])
    for path in pathlib.Path("vllm").rglob("*.py"):
        (kept / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, kept / path)
    information = pathlib.Path(directory, "vllm.dist-info")
    information.mkdir()
    shutil.copyfile("PKG-INFO", information / "METADATA")
    return information.name

def build_wheel(*arguments, **keywords):
    raise RuntimeError("vLLM is not built")
'''


def folder_of(version: str) -> Path:
    """The folder with ``vllm/`` of a release, fetched through pip when it is not in the cache."""
    folder = cache() / version
    if not folder.is_dir():
        work = cache() / f"{version}.{os.getpid()}"
        backend = work / "backend" / "setuptools"
        backend.mkdir(parents=True)
        (backend / "__init__.py").touch()
        (backend / "build_meta.py").write_text(BUILD_BACKEND)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:"]
        command += ["--no-build-isolation", "--no-cache-dir", "--dest", str(work), f"vllm=={version}"]
        environ = {**os.environ, "PYTHONPATH": str(backend.parent), "KEPT": str(work / "kept")}
        subprocess.run(command, check=True, timeout=300, env=environ)
        with contextlib.suppress(OSError):  # another process was faster
            (work / "kept").rename(folder)
        shutil.rmtree(work, ignore_errors=True)
    return folder


class _Anything(type):
    """Classes that may be called, subclassed with any options, subscripted, and asked for any attribute."""

    def __getattr__(cls, name: str) -> Any:
        return _anything(name)

    def __getitem__(cls, item: object) -> Any:
        return cls

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


def _anything(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything(name, (_Base,), {})


class _StandIns:
    """Finds every module of the packages that are not needed and not installed."""

    def __init__(self) -> None:
        self.names = {name for name in NOT_NEEDED if importlib.util.find_spec(name) is None}

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        wanted = fullname.split(".")[0] in self.names or f"{fullname}.".startswith(f"{NOT_USED}.")
        return ModuleSpec(fullname, self, is_package=True) if wanted else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = _anything  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def use(version: str) -> None:
    """Let ``import vllm`` in this process be that release."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    sys.path.insert(0, str(folder_of(version)))
    sys.meta_path.insert(0, _StandIns())  # type: ignore[arg-type]
    sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")  # its compiled operators
    import vllm

    assert vllm.__version__ == version, vllm.__version__


def run(version: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with these arguments in a process that uses the release."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.compat.vllm import host; host.use({version!r}); "
    code += "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:warnings", "--no-header", "--tb=short"]
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *options, *arguments],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


if __name__ == "__main__":
    for release in sys.argv[1:] or (*FETCHED, *KEPT):
        print(folder_of(release))
