"""Made the part of signatures.json that is FlashMLA's: its functions commit by commit, and those of its copies.

    git clone https://github.com/deepseek-ai/FlashMLA REPOSITORY
    pip download --no-deps --only-binary :all: -d SOURCES sgl-flash-mla==1.0.0
    pip download --no-deps --only-binary :all: -d SOURCES sglang-kernel==0.4.10
    python -m tests.plugins.data.record_flash_mla REPOSITORY SOURCES

A release is the day of a commit, or the archive's name and version; of vLLM and of SGLang's kernels one each is kept,
whose archives have hundreds of megabytes. Nothing is installed or imported.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.plugins.data.record_signatures import functions, sources

SOURCE = "flash_mla/flash_mla_interface.py"
FUNCTIONS = ("get_mla_metadata", "flash_mla_with_kvcache")
ARCHIVES = {
    "sgl_flash_mla": SOURCE,
    "sgl_kernel": "sgl_kernel/flash_mla.py",
    "sglang_kernel": "sgl_kernel/flash_mla.py",
    "vllm": "vllm/third_party/flashmla/flash_mla_interface.py",
}
"""Packages that carry it, to the file in each."""


def commits(repository: Path) -> Iterator[tuple[str, str]]:
    """(day, the file as it was), oldest first, one for each day."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", repository, *arguments], capture_output=True, text=True, check=True).stdout

    log = git("log", "--reverse", "--format=%H %cs", "--", SOURCE)
    days = {line.split()[1]: line.split()[0] for line in log.splitlines()}
    for day, commit in days.items():
        yield day, git("show", f"{commit}:{SOURCE}")


def main(repository: Path, folder: Path) -> None:
    """Read everything and write the part."""
    recorded: dict[str, dict[str, list[str]]] = {}
    found = list(commits(repository))
    for path in sorted(folder.glob("*.whl")):
        name, version = path.name.split("-")[:2]
        found += [(f"{name} {version}", text) for text in sources(path, ARCHIVES[name])]
    for release, text in found:
        for function, signature in functions(text, FUNCTIONS).items():
            releases = recorded.setdefault(function, {}).setdefault(signature, [])
            releases += [] if release in releases else [release]
    target = Path(__file__).with_name("signatures.json")
    target.write_text(json.dumps(json.loads(target.read_text()) | {"flashmla": recorded}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
