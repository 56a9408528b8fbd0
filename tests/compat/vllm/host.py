"""vLLM's own Python, several releases, on a machine without a GPU and without vLLM's dependencies.

An sdist of vLLM has all of its Python and takes 38 to 47 MB, its wheel 400. ``folder_of`` fetches one and keeps the
Python of it in a cache folder; ``use`` makes it the ``vllm`` of a process, with stand-ins for what is not used here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

from tests.compat.real_python import StandIns, cache

FETCHED = ("0.25.1", "0.33.0")
"""The ends of the supported range; tests fetch them."""
KEPT = ("0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
"""Between them: tested where ``python -m tests.compat.vllm.host`` has fetched them."""

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
    folder = cache("vllm") / version
    if not folder.is_dir():
        work = cache("vllm") / f"{version}.{os.getpid()}"
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


def use(version: str) -> None:
    """Let ``import vllm`` in this process be that release."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    sys.path.insert(0, str(folder_of(version)))
    missing = (name for name in NOT_NEEDED if importlib.util.find_spec(name) is None)
    sys.meta_path.insert(0, StandIns((*missing, NOT_USED)))  # type: ignore[arg-type]
    sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")  # its compiled operators
    import vllm

    assert vllm.__version__ == version, vllm.__version__


if __name__ == "__main__":
    for release in sys.argv[1:] or (*FETCHED, *KEPT):
        print(folder_of(release))
