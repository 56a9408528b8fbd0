"""The process's environment is read in mla_plugin/environment.py alone, so that its table of variables is complete."""

from __future__ import annotations

import ast

import pytest

from tests.repository.project import ROOT

READER = ROOT / "mla_plugin" / "environment.py"
NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def uses_of_the_environment(source: str) -> list[int]:
    """Lines that touch the environment through the module ``os``, under whatever name it was imported."""
    tree = ast.parse(source)
    aliases = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name in ("os", "posix")
    }
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "posix"):
            lines += [node.lineno for alias in node.names if alias.name in NAMES | {"*"}]
        elif isinstance(node, ast.Attribute) and node.attr in NAMES:
            lines += [node.lineno] if isinstance(node.value, ast.Name) and node.value.id in aliases else []
    return lines


def test_only_the_reader_reads() -> None:
    paths = [path for folder in ("mla_plugin", "hooks", "compat") for path in (ROOT / folder).rglob("*.py")]
    found = {path: uses_of_the_environment(path.read_text()) for path in paths}
    assert found.pop(READER), "the reader is expected to be found by this very check"
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import os\nos.environ['A']", [2]),
        ("import os\ndef f():\n    return os.getenv('A')", [3]),
        ("import os as system\nsystem.environb", [2]),
        ("from os import environ", [1]),
        ("from os import *", [1]),
        ("import os\nos.path.join('a', 'b')", []),
        ("def f(plan):\n    return plan.environ", []),
        ("from os import path", []),
    ],
)
def test_the_check_itself(source: str, lines: list[int]) -> None:
    assert uses_of_the_environment(source) == lines
