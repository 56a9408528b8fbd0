"""What the pages show is run: their Python, their commands' output, and that the commands name what exists."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch

from mla_plugin import device
from mla_plugin.cli import main, terminal
from tests.docs.project_pages import PAGES, ROOT, blocks, pages_with

LANGUAGES = {"python", "sh", "console", "toml", ""}


def sessions() -> list[tuple[str, str]]:
    """(command, output) of every console block of every page."""
    texts = [block.text for page in PAGES for block in blocks(page, "console")]
    return [re.fullmatch(r"\$ ([^\n]+)\n(.*)", text, re.S).groups() for text in texts]


def commands() -> list[str]:
    """Lines of the shell blocks."""
    texts = [block.text.replace("\\\n", "") for page in PAGES for block in blocks(page, "sh")]
    return [line.split("  #")[0].strip() for text in texts for line in text.splitlines() if line.strip()]


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    found = {block.language for page in PAGES for block in blocks(page)}
    assert found <= LANGUAGES, "a fenced block of another language is seen by no test"


@pytest.mark.parametrize("name", pages_with("python"))
def test_python_runs(name: str) -> None:
    """In the order of the page, in a separate process: ``register`` changes frameworks for good."""
    code = []
    for block in blocks(ROOT / name, "python"):
        compile(block.text, name, "exec")
        if block.reason is None:
            code.append(block.text)
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", "\n".join(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr


def test_few_blocks_are_not_run() -> None:
    reasons = [block.reason for page in PAGES for block in blocks(page) if block.reason]
    assert len(reasons) <= 7, reasons


def test_no_code_is_in_an_indented_block() -> None:
    """Those are formulas: no test would see code there."""
    for page in PAGES:
        fenceless = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
        for block in re.findall(r"^\n((?:    \S.*\n)+)", fenceless, re.M):
            assert not re.search(r"\bimport\b|\bpip\b|python|mla_plugin", block), f"{page}: {block}"


@pytest.mark.parametrize(("command", "output"), sessions())
def test_output_is_what_the_command_prints(
    command: str, output: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a terminal of 80 columns, on a machine without CUDA and with no kernel package but Triton."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "installed_packages", lambda: (("torch", torch.__version__), ("triton", "3.7.1")))
    monkeypatch.setattr(device, "build_tools", frozenset)
    program, *arguments = shlex.split(command)
    assert program == "mla-plugin"
    main(arguments)
    out, err = capsys.readouterr()
    assert terminal.folded(err + out, 80) == output


@pytest.mark.parametrize("command", commands())
def test_a_command_names_what_exists(command: str) -> None:
    assert subprocess.run(["bash", "-n", "-c", command], check=False).returncode == 0
    for module in re.findall(r"python3? -m ((?!sglang)\S+)", command):
        assert importlib.util.find_spec(module), module
    for script in re.findall(r"(?:python3?|bash) ((?!-)\S+)", command):
        assert (ROOT / script).exists(), script


def test_there_is_code_and_output_to_check() -> None:
    assert len(sessions()) >= 2
    assert len(commands()) >= 10
    assert {"README.md", "docs/quick_start.md", "docs/explain.md"} <= set(pages_with("python"))
