"""Files to 400 lines, functions to 60, kernels to 150, nesting to 4: what a reader can hold in mind.

A function is counted without its signature and docstring: one annotated argument per line and a full description of
each are the contract, not the code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repository.project import ROOT

FOLDERS = ("mla_plugin", "hooks", "compat", "examples")
FILE_LINES, FUNCTION_LINES, KERNEL_LINES, NESTING = 400, 60, 150, 4

_BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Decorated with ``jit``, under any module's name, called or not."""
    decorators = [d.func if isinstance(d, ast.Call) else d for d in function.decorator_list]
    return any((d.attr if isinstance(d, ast.Attribute) else getattr(d, "id", None)) == "jit" for d in decorators)


def nesting(node: ast.AST) -> int:
    """Depth of blocks within blocks; an ``elif`` is as deep as its ``if``, an inner function starts at 0."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _FUNCTIONS):
            continue
        is_elif = isinstance(child, ast.If) and isinstance(node, ast.If) and node.orelse == [child]
        deepest = max(deepest, nesting(child) + (isinstance(child, _BLOCKS) and not is_elif))
    return deepest


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first statement after the docstring to the end."""
    code = function.body[1:] if ast.get_docstring(function) else function.body
    return code[-1].end_lineno - code[0].lineno + 1 if code else 0


def excesses(source: str) -> Iterator[str]:
    """Everything in the source that is beyond a limit."""
    if (lines := len(source.splitlines())) > FILE_LINES:
        yield f"{lines} lines > {FILE_LINES}"
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, _FUNCTIONS):
            continue
        limit = KERNEL_LINES if is_kernel(node) else FUNCTION_LINES
        if (lines := length(node)) > limit:
            yield f"{node.name}: {lines} lines > {limit}"
        if (depth := nesting(node)) > NESTING:
            yield f"{node.name}: nesting {depth} > {NESTING}"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_sizes(path: Path) -> None:
    assert list(excesses(path.read_text())) == []


def function(lines: int, decorator: str = "") -> str:
    return f'{decorator}\ndef f(\n    x,\n):\n    """One\n\n    and two."""\n' + "    pass\n" * lines


def nested(depth: int) -> str:
    blocks = [f"{'    ' * (level + 1)}if x:\n" for level in range(depth)]
    return "def f(x):\n" + "".join(blocks) + "    " * (depth + 1) + "pass\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 1\n" * 400, []),
        ("x = 1\n" * 401, ["401 lines > 400"]),
        (function(60), []),
        (function(61), ["f: 61 lines > 60"]),
        (function(150, "@triton.jit"), []),
        (function(151, "@triton.jit(do_not_specialize=['n'])"), ["f: 151 lines > 150"]),
        (function(61, "@gluon.jit"), []),
        (function(61, "@functools.cache"), ["f: 61 lines > 60"]),
        (nested(4), []),
        (nested(5), ["f: nesting 5 > 4"]),
        ("def f(x):\n" + "    if x:\n        pass\n" + "    elif x > 1:\n        pass\n" * 5, []),
    ],
)
def test_the_check_itself(source: str, expected: list[str]) -> None:
    assert list(excesses(source)) == expected
