"""The site builds without a warning, and no page of it has a link, an anchor or an image that leads nowhere."""

from __future__ import annotations

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from tests.repository.project import ROOT


class Page(HTMLParser):
    """The addresses that a page names, and the anchors that it has."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.images: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.anchors.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "img" and "src" in given:
            self.images.append(given["src"])
        if tag == "script" and "src" in given:
            self.loaded.append(given["src"])
        if tag == "link" and "href" in given and given.get("rel") in ("stylesheet", "icon"):
            self.loaded.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """Every page of the built site."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(target)]
    environ = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return {path: Page(path.read_text()) for path in target.rglob("*.html") if path.name != "404.html"}


def broken(path: Path, address: str, site: dict[Path, Page]) -> bool:
    """Whether an address on a page leads to no file, or to no anchor of its page."""
    if "://" in address or address.startswith(("mailto:", "data:")):
        return False
    target, anchor = urldefrag(address)
    file = (path.parent / unquote(target.partition("?")[0])).resolve() if target else path
    file = file / "index.html" if file.is_dir() else file
    if not file.exists():
        return True
    has_anchors = bool(anchor) and file in site and not anchor.startswith(("__", "gh-"))
    return has_anchors and unquote(anchor) not in site[file].anchors


def test_no_link_and_no_image_is_broken(site: dict[Path, Page]) -> None:
    found = [
        f"{path.parent.name}: {address}"
        for path, page in site.items()
        for address in (*page.links, *page.images, *page.loaded)
        if broken(path, address, site)
    ]
    assert not found, "\n".join(found)


def test_every_page_of_docs_is_on_the_site(site: dict[Path, Page]) -> None:
    written = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    assert len(site) == len(written)
    assert sum(len(page.images) for page in site.values()) >= 10


def test_no_page_loads_anything_from_another_host(site: dict[Path, Page]) -> None:
    for path, page in site.items():
        assert not [address for address in (*page.images, *page.loaded) if "://" in address], path


def test_a_broken_link_is_detected(site: dict[Path, Page]) -> None:
    path = next(path for path in site if path.parent.name == "quick_start")
    assert broken(path, "../nowhere/", site)
    assert broken(path, "../decode/#nothing-of-that-name", site)
    assert not broken(path, "../decode/", site)
