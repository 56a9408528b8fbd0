"""``import mla_plugin`` costs next to nothing over ``import torch`` and takes no kernel library with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.repository.project import ROOT

HEAVY = {"triton", "flashinfer", "flash_attn", "flash_attn_interface"}
HEAVY |= {"transformers", "transformer_engine", "megatron", "vllm", "sglang"}
LIMIT = 0.06
"""Of the processor time that PyTorch's import takes."""


def fresh_python(code: str) -> str:
    """What the code prints in a fresh process that keeps bytecode, as an installed package does."""
    environ = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code]
    environ |= {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environ).stdout


def share_of_torch(statement: str, attempts: int) -> float:
    """Processor time of a statement over that of ``import torch`` before it: the least of several processes.

    A share, because machines differ by more than a slow import would.
    """
    code = (
        "import time; clock = time.process_time; start = clock(); import torch; loaded = clock(); "
        f"{statement}; print((clock() - loaded) / (loaded - start))"
    )
    least = float("inf")
    for _ in range(attempts):
        least = min(least, float(fresh_python(code)))
        if least < LIMIT:
            break
    return least


def test_no_heavy_package_comes_along() -> None:
    code = (
        "import sys, json, torch; before = set(sys.modules); import mla_plugin; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    brought = set(json.loads(fresh_python(code)))
    assert "mla_plugin" in brought
    assert {name.split(".")[0] for name in brought} & HEAVY == set()
    assert not {
        name
        for name in brought
        if name.startswith(("mla_plugin.kernels.", "mla_plugin.compat.", "mla_plugin.context_parallel"))
    }


def test_import_is_fast() -> None:
    """It takes 0.03 to 0.04 of PyTorch's own import."""
    assert share_of_torch("import mla_plugin", attempts=10) < LIMIT


def test_a_slow_import_is_detected() -> None:
    """The clock is that of the processor, and it runs while a module works."""
    assert share_of_torch("sum(range(20_000_000))", attempts=1) > LIMIT
