"""Every kind of call of ``batch_invariant`` decode computes by the same operations in the same layouts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.project import ROOT

pytestmark = pytest.mark.xdist_group("compiler")


def test_the_arithmetic_does_not_depend_on_the_call(triton_cache: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(triton_cache)
    command = [sys.executable, "-m", "tests.kernels.decode_arithmetic"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(x["tile"], x["call"]) for x in found} >= {("16", "one query"), ("64", "descriptors")}
    for tile in ("16", "64"):
        first, *others = (x["found"] for x in found if x["tile"] == tile)
        assert sum("dot" in name for name in first) >= 3
        assert any(name.startswith("})") for name in first)
        for other in others:
            assert other.keys() == first.keys()
