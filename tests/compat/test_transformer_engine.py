"""The TransformerEngine adapter inside seven released versions of its Python, each in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.compat import te_host
from tests.house.project import ROOT


def run(*command: str, version: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A fresh Python in the checkout, with Triton's interpreter and this version of TransformerEngine on its path."""
    environ = {
        name: text for name, text in os.environ.items() if not name.startswith(("NVTE_", "MLA_PLUGIN_", "PYTEST"))
    }
    environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "TE_VERSION": version}
    environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(te_host.folder_of(version))))
    command = (sys.executable, *command)
    return subprocess.run(command, cwd=ROOT, env=environ | variables, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("version", te_host.VERSIONS)
def test_inside(version: str) -> None:
    done = run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/compat/te_inside.py", version=version
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"\d\d+ passed.* in .*", summary), summary  # nothing skipped, nothing left out
    assert "skipped" not in summary
