"""SGLang's own Python, several releases, on a machine without a GPU and without SGLang's dependencies.

A wheel of SGLang takes 7 to 39 MB. ``folder_of`` fetches one and keeps it in a cache folder; ``use`` makes it the
``sglang`` of a process, with stand-ins for what the tests do not use.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.compat.real_python import StandIns, cache

FETCHED = ("0.5.11", "0.5.23")
"""The ends of the tested range; tests fetch them."""
KEPT = tuple(f"0.5.{patch}" for patch in range(12, 23))
"""Between them: tested where ``python -m tests.compat.sglang.host`` has fetched them."""

NOT_NEEDED = ("IPython", "PIL", "aiohttp", "compressed_tensors", "dill", "einops", "gguf", "huggingface_hub", "orjson")
NOT_NEEDED += ("psutil", "pybase64", "sgl_kernel", "starlette", "torchvision", "transformers", "tvm_ffi", "zmq")
"""Packages that SGLang imports on the way to its attention, and that no test here reaches."""
NOT_USED = ("sglang.srt.configs", "sglang.srt.connector", "sglang.srt.disaggregation", "sglang.srt.entrypoints")
NOT_USED += ("sglang.srt.function_call", "sglang.srt.managers", "sglang.srt.multimodal", "sglang.srt.parser")
NOT_USED += tuple(f"sglang.srt.utils.hf_transformers{end}" for end in ("", "_patches", "_utils"))
"""Modules of SGLang with its models' configurations, which ask for one release of transformers, and its server."""
USED = ("sglang.srt.configs.linear_attn_model_registry", "sglang.srt.configs.hybrid_arch")
"""Of these, the modules that tests use."""

# of the wheels that a release has, one: its Python is the same for all
BUILT_FOR = ("--python-version=3.11", "--implementation=cp", "--abi=cp311", "--platform=manylinux_2_34_x86_64")


def _fetched(requirement: str, folder: Path, *options: str) -> Path:
    """The folder with what a wheel holds, fetched through pip when it is not in the cache."""
    if not folder.is_dir():
        work = folder.with_name(f"{folder.name}.{os.getpid()}")
        work.mkdir(parents=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, *options, "--dest", str(work), requirement], check=True, timeout=300)
        (wheel,) = work.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(work / "kept")
        with contextlib.suppress(OSError):  # another process was faster
            (work / "kept").rename(folder)
        shutil.rmtree(work, ignore_errors=True)
    return folder


def folder_of(version: str) -> Path:
    """The folder with ``sglang/`` of a release."""
    return _fetched(f"sglang=={version}", cache("sglang") / version, *BUILT_FOR)


def use(version: str) -> None:
    """Let ``import sglang`` in this process be that release."""
    folder = folder_of(version)
    sys.path.insert(0, str(folder))
    if importlib.util.find_spec("msgspec") is None:
        sys.path.append(str(_fetched("msgspec", cache("msgspec") / str(sys.implementation.cache_tag))))
    sys.meta_path.insert(0, StandIns((*NOT_NEEDED, *NOT_USED), USED, folder))  # type: ignore[arg-type]
    import sglang

    assert sglang.__version__ == version, sglang.__version__


if __name__ == "__main__":
    for release in sys.argv[1:] or (*FETCHED, *KEPT):
        print(folder_of(release))
