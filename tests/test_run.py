"""``python -m mla_plugin.run``: which hosts it registers and when, and that the program's arguments stay its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.repository.project import ROOT

PROGRAM = """
import json, sys
before = "transformers.modeling_utils" in sys.modules
from transformers import AttentionInterface
print(json.dumps([sys.argv[1:], before, "mla_plugin" in AttentionInterface().valid_keys()]))
"""


def run(*arguments: str, also: Path | None = None) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(x) for x in (ROOT, also) if x is not None)
    return subprocess.run(
        [sys.executable, "-m", "mla_plugin.run", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_program_that_imports_transformers_finds_us_there(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    given = ["--host", "x", "-m", "-h"]
    for options, before in (((), False), (("--host", "transformers"), True)):
        done = run(*options, str(tmp_path / "program.py"), *given)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == [given, before, True]


def test_a_module_is_run_as_one(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run("--host=transformers", "-m", "program", "-m", also=tmp_path)
    assert json.loads(done.stdout.splitlines()[-1]) == [["-m"], True, True], done.stderr


def test_a_program_that_imports_no_host_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import sys\nprint([x for x in ('transformers', 'transformer_engine', 'megatron') if x in sys.modules])\n"
    )
    done = run(str(tmp_path / "program.py"))
    assert done.stdout.splitlines() == ["[]"], done.stderr


def test_a_host_that_is_too_old_is_a_warning_unless_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import transformers\ntransformers.__version__ = '4.0'\nimport transformers.modeling_utils\nprint('ran')\n"
    )
    done = run(str(tmp_path / "program.py"))
    assert done.stdout.splitlines()[-1:] == ["ran"], done.stderr
    assert "mla-plugin is not registered with transformers: " in done.stderr
    done = run("--host", "transformer_engine", str(tmp_path / "program.py"))
    assert done.returncode == 1
    assert "transformer_engine is not installed" in done.stderr


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    done = run("--host", "keras", "x.py")
    assert (done.returncode, "invalid choice: 'keras'" in done.stderr) == (2, True)
    done = run("no_such_program.py")
    assert (done.returncode, "no file 'no_such_program.py'; for a module, put -m" in done.stderr) == (2, True)
