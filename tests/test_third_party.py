"""A backend from another package: found by its entry point, chosen, run, blocked; a broken one reported and left out.

Each test asks a fresh process, because a process meets its entry points once.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mla_plugin.hooks.manager import BUILTIN_BACKENDS

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "third_party_backend"

ATTEND = """
import json
import torch
import mla_plugin
from mla_plugin.hooks.manager import get_manager

q, k = (torch.randn(2, 150, 4, 24, dtype=torch.float64, requires_grad=True) for _ in range(2))
v = torch.randn(2, 150, 4, 16, dtype=torch.float64, requires_grad=True)
dout = torch.randn(2, 150, 4, 16, dtype=torch.float64)
calls = []

class Recorder:
    @mla_plugin.hookimpl(wrapper=True)
    def forward(self, plan, tensors):
        calls.append(plan.forward_backend)
        return (yield)

    @mla_plugin.hookimpl(wrapper=True)
    def backward(self, plan, residuals, dout, dlse):
        calls.append(plan.backward_backend)
        return (yield)

get_manager().register(Recorder(), "recorder")

def run(**options):
    out = mla_plugin.attention(q, k, v, **options)
    return (out, *torch.autograd.grad(out, (q, k, v), dout))

chosen, fallback = run(), run(backend="sdpa")
print(json.dumps({
    "backends": get_manager().backends(),
    "broken": get_manager().broken,
    "calls": calls,
    "difference": max(float((a - b).abs().max()) for a, b in zip(chosen, fallback)),
}))
"""


def ask(code: str, *site: Path, **variables: str) -> dict:
    """What the code prints, as JSON, in a fresh process that sees the folders of installed packages."""
    path = os.pathsep.join(map(str, (*site, ROOT)))
    environ = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"stderr": done.stderr}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example package installed in it."""
    source, target = tmp_path_factory.mktemp("source") / "package", tmp_path_factory.mktemp("site")
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, "--target", target, source], check=True, timeout=300)
    return target


def broken_package(site: Path, body: str, name: str = "shaky") -> Path:
    """An installed package whose module does what the body says when it is imported."""
    information = site / f"{name}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[mla_plugin]\n{name} = {name}_module\n")
    (site / f"{name}_module.py").write_text(body)
    return site


def test_it_is_found_chosen_and_run(site: Path) -> None:
    answer = ask(ATTEND, site)
    assert answer["backends"] == [*BUILTIN_BACKENDS, "blockwise"]
    assert answer["calls"] == ["blockwise", "blockwise", "sdpa", "sdpa"]
    assert answer["difference"] < 1e-12
    assert answer["broken"] == {}


def test_without_the_package_the_fallback_runs() -> None:
    answer = ask(ATTEND)
    assert answer["backends"] == [*BUILTIN_BACKENDS]
    assert answer["calls"] == ["sdpa"] * 4


def test_a_blocked_backend_is_not_used(site: Path) -> None:
    answer = ask(ATTEND, site, MLA_PLUGIN_BLOCK="blockwise")
    assert "blockwise" not in answer["backends"]
    assert answer["calls"] == ["sdpa"] * 4


def test_a_blocked_package_is_not_imported(tmp_path: Path, site: Path) -> None:
    answer = ask(ATTEND, broken_package(tmp_path, "raise RuntimeError('imported')"), site, MLA_PLUGIN_BLOCK="shaky")
    assert answer["calls"] == ["blockwise", "blockwise", "sdpa", "sdpa"]
    assert answer["broken"] == {}
    assert "shaky" not in answer["stderr"]


def test_a_named_backend_is_used(site: Path) -> None:
    answer = ask(ATTEND.replace("run()", 'run(backend="blockwise")'), site, MLA_PLUGIN_BACKEND="sdpa")
    assert answer["calls"] == ["blockwise", "blockwise", "sdpa", "sdpa"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import a_library_that_is_not_there", "ModuleNotFoundError: No module named 'a_library_that_is_not_there'"),
        ("raise RuntimeError('needs a newer driver')", "RuntimeError: needs a newer driver"),
        (
            "import mla_plugin\n@mla_plugin.hookimpl\ndef forward(plan, tensor): ...",
            "PluginValidationError",
        ),
        ("def select_backend(request): ...", "has select_backend without the marker; decorate it with"),
        ("x = 1", "implements no hook"),
    ],
)
def test_a_broken_package_is_reported_and_left_out(tmp_path: Path, site: Path, body: str, reason: str) -> None:
    answer = ask(ATTEND, broken_package(tmp_path, body), site)
    assert answer["backends"] == [*BUILTIN_BACKENDS, "blockwise"]
    assert reason in answer["broken"]["shaky"]
    assert "'shaky'" in answer["stderr"]
    assert answer["calls"] == ["blockwise", "blockwise", "sdpa", "sdpa"]


def test_a_name_of_ours_cannot_be_taken(tmp_path: Path) -> None:
    answer = ask(ATTEND, broken_package(tmp_path, "raise RuntimeError('never imported')", name="sdpa"))
    assert answer["backends"] == [*BUILTIN_BACKENDS]
    assert "built-in" in answer["broken"]["sdpa"]


def test_two_packages_cannot_share_a_name(tmp_path: Path, site: Path) -> None:
    rival = broken_package(tmp_path, "raise RuntimeError('never imported')", name="zz-rival")
    (rival / "zz-rival-1.0.dist-info" / "entry_points.txt").write_text("[mla_plugin]\nblockwise = zz_rival_module\n")
    answer = ask(ATTEND, rival, site)
    assert answer["calls"] == ["blockwise", "blockwise", "sdpa", "sdpa"]
    assert "zz-rival has an entry point of this name too" in answer["broken"]["blockwise"]
    assert "zz-rival" in answer["stderr"]


NOT_THE_LONG_ONES = "not (sizes or pairs or extremes or every_size or many_sequences or keys_33000)"


def run_pytest(site: Path, *arguments: str | Path) -> str:
    """What pytest prints in a fresh process that sees the installed packages; everything must pass."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (site, ROOT))), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=site, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    return done.stdout


def test_it_passes_the_conformance_suite(site: Path) -> None:
    run_pytest(site, "pytest", "-q", "-p", "no:cacheprovider", "-k", NOT_THE_LONG_ONES, EXAMPLE / "tests")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the other two example packages installed in it."""
    target = tmp_path_factory.mktemp("others")
    for name in ("third_party_decode", "timer_plugin"):
        source = tmp_path_factory.mktemp("source") / name
        shutil.copytree(ROOT / "examples" / name, source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
        subprocess.run([*install, "--target", target, source], check=True, timeout=300)
    return target


def test_the_decode_example_passes_by_the_command(others: Path) -> None:
    """Its own test file, and the one command, with the timer around it."""
    tests = ROOT / "examples" / "third_party_decode" / "tests"
    run_pytest(others, "pytest", "-q", "-p", "no:cacheprovider", "-k", NOT_THE_LONG_ONES, tests)
    few = "thd or leftpad or paged-fp32"
    printed = run_pytest(others, "mla_plugin.conformance", "tokenwise", "--quick", "-k", few)
    assert re.search(r"decode +paged +computed", printed)
    assert re.search(r"decode +leftpad +refused .*has_leftpad_kv=True", printed)
    assert re.search(r"attention +thd +refused .*AttentionRequest, expected DecodeRequest", printed)


def test_the_timer_takes_part(others: Path) -> None:
    run_pytest(others, "pytest", "-q", "-p", "no:cacheprovider", ROOT / "examples" / "timer_plugin" / "tests")


def test_the_example_needs_no_change_of_ours() -> None:
    """It imports the package's public names and nothing below them."""
    tree = ast.parse((EXAMPLE / "mla_plugin_blockwise.py").read_text())
    origins = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert origins | names == {"collections.abc", "torch", "mla_plugin"}
