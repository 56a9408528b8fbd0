"""The benchmark of a first call after a warm-up, as far as it runs without a GPU."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from types import FrameType
from typing import Any

import pytest

from benchmarks import warm_call
from tests.repository.project import ROOT


def test_a_call_is_measured_by_cause() -> None:
    environ = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks.warm_call", "--cpu", "--sample", "--backend", "triton", "--case"]
    done = subprocess.run([*command, warm_call.TRAINING], capture_output=True, text=True, check=True, env=environ)
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["first"] > found["second"]
    assert {"import Triton", "import our kernels", "import sympy for PyTorch"} <= set(found["causes"])
    assert sum(found["causes"].values()) == pytest.approx(found["first"], rel=0.2)


def test_the_innermost_known_call_is_the_cause() -> None:
    def frame(function: str, file: str, outer: FrameType | None = None) -> Any:
        code = f"import sys\ndef {function}(name='sympy.core'):\n    return sys._getframe()"
        found: dict[str, Any] = {}
        exec(compile(code, file, "exec"), found)
        inner = found[function]()
        return Chained(inner, outer)

    class Chained:
        def __init__(self, inner: FrameType, outer: Any) -> None:
            self.f_code, self.f_locals, self.f_back = inner.f_code, inner.f_locals, outer

    asking = frame("ask", "/x/mla_plugin/resolver/asking.py")
    assert warm_call.cause_of(asking) == "asking the backends"
    assert warm_call.cause_of(frame("_find_and_load", "<frozen>", asking)) == "import sympy for PyTorch"
    assert warm_call.cause_of(frame("helper", "/x/json.py", asking)) == "asking the backends"
    assert warm_call.cause_of(frame("triton_key", "/x/triton/runtime/cache.py")) == "Triton's hash of itself"
    assert warm_call.cause_of(frame("helper", "/x/json.py")) == "rest"


def test_measured_processes_do_not_import_triton_beforehand() -> None:
    code = "import sys, torch; import benchmarks.warm_call; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "False\n"


def test_the_functions_named_are_tritons() -> None:
    """A name that Triton changes would no longer be found on a stack."""
    places = {
        "triton.runtime.cache": ("triton_key", "FileCacheManager.get_group"),
        "triton.runtime.jit": ("JITCallable.cache_key",),
        "triton.compiler.compiler": ("CompiledKernel._init_handles",),
        "triton.compiler.code_generator": ("ast_to_ttir",),
        "triton.backends.nvidia.compiler": ("get_ptxas_version", "CUDABackend.make_cubin", "CUDABackend.make_ttir"),
    }
    found = {"synchronize"}
    for module, names in places.items():
        for name in names:
            owner: Any = importlib.import_module(module)
            for part in name.split("."):
                owner = getattr(owner, part)
            found.add(name.split(".")[-1])
    assert found == set(warm_call.FUNCTIONS)
