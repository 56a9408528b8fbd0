"""The oldest pluggy that the package accepts, and the one between: their registering stops halfway at an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.repository.project import ROOT, pyproject

VERSIONS = ("1.5.0", "1.6.0")
TESTS = ["tests/hooks/test_registry.py", "tests/hooks/test_manager.py"]


def test_the_oldest_is_the_one_that_is_declared() -> None:
    (pluggy,) = [r for text in pyproject()["project"]["dependencies"] if (r := Requirement(text)).name == "pluggy"]
    assert f"{pluggy.specifier}.0" == f">={VERSIONS[0]}"


@pytest.mark.parametrize("version", VERSIONS)
def test_registering_under_an_older_pluggy(version: str, tmp_path: Path) -> None:
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        tmp_path,
        f"pluggy=={version}",
    ]
    subprocess.run(install, check=True)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT))), "OMP_NUM_THREADS": "1"}
    found = [sys.executable, "-c", "import importlib.metadata, pluggy; print(pluggy.__file__)"]
    assert subprocess.run(found, capture_output=True, text=True, env=environ, check=True).stdout.startswith(
        str(tmp_path)
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *TESTS]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout
