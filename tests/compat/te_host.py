"""TransformerEngine's own Python, each released version, on a machine without a GPU.

The wheel ``transformer_engine-<version>-py3-none-any.whl`` holds all of it (about 1 MB). ``folder_of`` fetches one and
unpacks it into a cache folder; ``import_transformer_engine`` imports it, with ``te_extension.py`` in the place of the
compiled extension, on a pretended compute capability. A process imports one version.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import types
import warnings
import zipfile
from pathlib import Path
from unittest.mock import MagicMock

import torch
from torch.overrides import TorchFunctionMode

VERSIONS = ("2.10.0", "2.12.0", "2.14.1", "2.16.1", "2.17.1", "2.19.0", "2.20.2")
ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention"
EXTENSION = Path(__file__).with_name("te_extension.py")


def cache() -> Path:
    """Where the wheels lie: outside the checkout, so that they outlast it."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "mla_plugin" / "transformer_engine"


def folder_of(version: str) -> Path:
    """The unpacked wheel of a version, fetched through pip when it is not in the cache."""
    folder = cache() / version
    if not folder.is_dir():
        work = cache() / f"{version}.{os.getpid()}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", str(work), f"transformer-engine=={version}"], check=True)
        (wheel,) = work.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(work)
        wheel.unlink()
        with contextlib.suppress(OSError):  # another process was faster
            work.rename(folder)
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _stand_in(name: str) -> None:
    """A module that TransformerEngine imports and these tests do not use."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.util.spec_from_loader(name, loader=None)
    module.__getattr__ = lambda attribute: MagicMock(name=attribute)  # type: ignore[method-assign]
    sys.modules[name] = module


class OnDevice(torch.Tensor):
    """A tensor of the CPU that says it is on a CUDA device, as TransformerEngine demands."""

    is_cuda = property(lambda self: True)


class CudaIsCpu(TorchFunctionMode):
    """Inside, tensors that TransformerEngine makes on its CUDA device are made on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") in ("cuda", 0):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def pretend_capability(capability: tuple[int, int]) -> None:
    """Let PyTorch report a device of this compute capability."""
    properties = types.SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=132, name="stub")
    torch.cuda.get_device_properties = lambda *args, **kwargs: properties
    torch.cuda.get_device_capability = lambda *args, **kwargs: capability
    torch.cuda.current_device = lambda: 0


def import_transformer_engine(version: str, capability: tuple[int, int] = (9, 0)) -> types.ModuleType:
    """Import one version and return the module that defines its DotProductAttention."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # skips the search for the compiled libraries
    sys.path.insert(0, str(folder_of(version)))
    for name in ("onnx", "onnxscript", "einops"):
        if importlib.util.find_spec(name) is None:
            _stand_in(name)
    if importlib.util.find_spec("pydantic") is None:
        sys.modules["pydantic"] = types.ModuleType("pydantic")
        sys.modules["pydantic.dataclasses"] = dataclasses
    pretend_capability(capability)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TransformerEngine reports that it found no extension
        common = importlib.import_module("transformer_engine.common")
    common._get_shared_object_file = lambda library: EXTENSION
    importlib.import_module("transformer_engine.pytorch")
    return importlib.import_module(f"{ATTENTION}.dot_product_attention")
