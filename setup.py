"""The long description: README.md with links and images that work on PyPI. All else is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = "https://github.com/mla-plugin/mla-plugin/blob/main/"
SITE = "https://mla-plugin.github.io/mla-plugin/"


def with_absolute_links(readme: str) -> str:
    """PyPI shows the page alone: files of the repository and figures of the site need their whole addresses."""
    readme = re.sub(r'(src|srcset)="docs/', rf'\1="{SITE}', readme)
    return re.sub(r"(?<=\]\()(?![a-z]+:|#)", REPOSITORY, readme)


setup(
    long_description=with_absolute_links((Path(__file__).parent / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
