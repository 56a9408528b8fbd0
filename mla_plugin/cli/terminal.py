"""Output for a terminal, where long lines continue under their last column; in pipes and files they stay whole."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap

_COLUMNS = re.compile(r"\s*(?:\S+(?: \S+)?\s{2,}){0,2}")
"""Indentation, and up to two columns of one or two words that two spaces separate from the rest."""
_COMMAND = re.compile(r"\s*[-=]> ")


def show(text: str) -> None:
    """Print a text, with long lines folded to the width of a terminal."""
    print(folded(text, shutil.get_terminal_size().columns) if sys.stdout.isatty() else text)


def folded(text: str, width: int) -> str:
    """The text with its long lines folded; those that hold a command to copy stay whole."""
    return "\n".join(line if _COMMAND.match(line) else _fold(line, width) for line in text.split("\n"))


def _fold(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    columns = _COLUMNS.match(line)
    indent = columns.end() if columns is not None else 0
    parts = textwrap.wrap(
        line[indent:],
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent or 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return line[:indent] + "\n".join(parts)[indent:]
