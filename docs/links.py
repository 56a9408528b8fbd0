"""What the documentation's site does differently from a checkout: included files, and links out of docs/.

In a checkout ``../examples`` is right as it stands; the site has no such page, so there it leads to the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

INCLUDED = {
    "kernels.md": "mla_plugin/kernels/README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
}
"""Pages that are another file of the repository; in a checkout they name it."""
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page's text as the site shows it."""
    uri = page.file.src_uri
    source = INCLUDED.get(uri, f"docs/{uri}")
    if uri in INCLUDED:
        markdown = (Path(config.config_file_path).parent / source).read_text()

    def lead(link: re.Match[str]) -> str:
        target = link[1]
        if ":" in target:
            return target
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        path = next((f"docs/{page_of}" for page_of, included in INCLUDED.items() if included == path), path)
        if path.startswith("docs/"):
            return posixpath.relpath(path, posixpath.dirname(f"docs/{uri}"))
        return f"{config.repo_url}/blob/main/{path}"

    return _LINK.sub(lead, markdown)
