"""The pages that are tested: README.md, and the Markdown of docs/ but what is generated from runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.repository.project import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^(?P<reason><!-- not run: .+? -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block; ``reason`` says why it cannot be run here."""

    language: str
    text: str
    reason: str | None


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """The fenced blocks of a page, those of one language if it is given."""
    found = [Block(m["language"], m["text"], m["reason"]) for m in _BLOCK.finditer(page.read_text())]
    return [block for block in found if language in (None, block.language)]


def pages_with(language: str) -> list[str]:
    """Pages, as paths in the project, with such a block."""
    return [str(page.relative_to(ROOT)) for page in PAGES if blocks(page, language)]
