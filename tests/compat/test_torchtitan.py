"""The torchtitan adapter on torchtitan's real Python, installed in a separate directory."""

from __future__ import annotations

import subprocess
import sys

from tests.compat.test_transformers_versions import install
from tests.repository.project import ROOT

# With what its models import; training with it needs the rest.
REQUIREMENTS = ("torchtitan==0.3.0", "spmd_types==0.2.3", "tyro==1.0.17", "docstring-parser", "typeguard")


def test_in_torchtitan(request):
    target = install("torchtitan-0.3.0", REQUIREMENTS, request.config.cache, "--no-deps", "--ignore-requires-python")
    search = f"import sys; sys.path[:0] = [{str(target)!r}, {str(ROOT)!r}]; import pytest; "
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=short"]
    tests = str(ROOT / "tests" / "compat" / "torchtitan_inside.py")
    command = [sys.executable, "-c", f"{search}sys.exit(pytest.main(sys.argv[1:]))", *options, tests]
    run = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert "skipped" not in run.stdout.splitlines()[-1]
