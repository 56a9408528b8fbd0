"""Other versions of Megatron-Core: their wheels unpacked in a cache folder, and a process that imports one of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.repository.project import ROOT


def folder_of(version: str) -> Path:
    """The unpacked wheel of a version, fetched through pip when it is not in the cache.

    Releases since 0.17 ask for Python 3.12; what is tested of their Python runs on older ones, too.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "mla_plugin" / "megatron_core" / version
    if not folder.is_dir():
        work = folder.with_name(f"{version}.{os.getpid()}")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        target = ["--python-version", "3.12", "--dest", str(work), f"megatron-core=={version}"]
        subprocess.run([*command, *target], check=True, timeout=300)
        (wheel,) = work.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(work)
        wheel.unlink()
        with contextlib.suppress(OSError):  # another process was faster
            work.rename(folder)
        shutil.rmtree(work, ignore_errors=True)
    return folder


def run(version: str, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process where ``import megatron.core`` is that version."""
    search = f"import sys; sys.path[:0] = [{str(folder_of(version))!r}, {str(ROOT)!r}]; "
    check = f"import megatron.core; assert megatron.core.__version__ == {version!r}, megatron.core.__file__; "
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", search + check + code, *arguments],
        cwd=ROOT,
        env={**os.environ, "TORCHDYNAMO_DISABLE": "1"},  # Megatron compiles small functions, for half a minute
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
