"""``import mla_plugin`` costs next to nothing over ``import torch`` and takes no kernel library with it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"triton", "flashinfer", "flash_attn", "flash_attn_interface", "transformers", "transformer_engine", "vllm"}
LIMIT_MS, ATTEMPTS = 50, 8


def fresh_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environ, timeout=300)


def own_milliseconds(importtime: str, package: str = "mla_plugin") -> float:
    """Cumulative time of the package's import in the report of ``-X importtime``."""
    (microseconds,) = re.findall(rf"^import time:\s*\d+ \|\s*(\d+) \|\s*{package}$", importtime, re.M)
    return int(microseconds) / 1000


def test_no_heavy_package_comes_along() -> None:
    code = (
        "import sys, json, torch; before = set(sys.modules); import mla_plugin; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    brought = set(json.loads(fresh_python("-c", code).stdout))
    assert "mla_plugin" in brought
    assert {name.split(".")[0] for name in brought} & HEAVY == set()
    assert not {name for name in brought if name.startswith(("mla_plugin.kernels.", "mla_plugin.compat."))}


def test_import_is_fast() -> None:
    """The least of several runs, since a busy machine only ever adds time."""
    fastest = float("inf")
    for _ in range(ATTEMPTS):
        report = fresh_python("-X", "importtime", "-c", "import torch; import mla_plugin").stderr
        fastest = min(fastest, own_milliseconds(report))
        if fastest < LIMIT_MS:
            return
    raise AssertionError(f"import mla_plugin took {fastest:.0f} ms beyond torch, {ATTEMPTS} times; allowed {LIMIT_MS}")


def test_own_milliseconds_reads_the_cumulative_column() -> None:
    report = (
        "import time:       900 |       1000 |   mla_plugin.types\nimport time:       200 |      70200 | mla_plugin\n"
    )
    assert own_milliseconds(report) == 70.2
