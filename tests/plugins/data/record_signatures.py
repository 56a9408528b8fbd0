"""Made signatures.json next to this file: what the functions take that our adapters call, release by release.

    pip download --no-deps --only-binary :all: -d SOURCES flash-attn-4==4.0.0b36
    pip download --no-deps --only-binary :all: -d SOURCES flashinfer-python==0.7.2
    FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE pip download --no-deps --no-binary :all: --no-build-isolation \\
        -d SOURCES flash-attn==2.8.3
    python tests/plugins/data/record_signatures.py SOURCES [REPOSITORY]

once for each release that the package registry offers and an adapter accepts. Nothing is installed or imported: the
files in the archives are read as text. FlashAttention 3 is on no registry; its source is in the archives of flash-attn
(``hopper/``), and newer than the last of them in FlashAttention's REPOSITORY, whose commits are recorded by day. vLLM's
operator and SGLang's function come in binaries of hundreds of megabytes and are not recorded.

The file maps a library to its functions, each to its signatures, each to the releases that have it. Defaults that are
no literals are None. FlashAttention 3's operators, which builds register since May 2025 and whose
source is in the REPOSITORY alone, are recorded by their schemas.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from packaging.version import Version

BOTH = ("flash_attn_func", "flash_attn_varlen_func")
FA3_SOURCE = "hopper/flash_attn_interface.py"
FA3_OPERATORS = "hopper/flash_api.cpp"
FA3_NAME = 'PACKAGE_NAME = "flash_attn_3"'
"""In ``hopper/setup.py`` since early 2025; packages of its earlier names are not what the adapter takes."""
LIBRARIES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "fa2": (
        "flash_attn",
        "flash_attn/flash_attn_interface.py",
        (
            *BOTH,
            *(f"_flash_attn_{kind}" for kind in ("forward", "backward", "varlen_forward", "varlen_backward")),
        ),
    ),
    "fa3": ("flash_attn", FA3_SOURCE, (*BOTH, "_flash_attn_backward")),
    "fa4": ("flash_attn_4", "flash_attn/cute/interface.py", (*BOTH, "_flash_attn_bwd", "_validate_head_dims")),
    "flashinfer": (
        "flashinfer_python",
        "flashinfer/mla",
        (
            *(f"BatchMLAPagedAttentionWrapper.{name}" for name in ("__init__", "plan", "run")),
            "MLAPlanMetadata.csr",
        ),
    ),
}
"""Our name to the archive's name, a file or a folder in it, and what is called."""


def sources(archive: Path, place: str) -> Iterator[str]:
    """The Python files of an archive at a place."""

    def is_there(name: str) -> bool:
        return name.endswith(".py") and (name == place or name.startswith(f"{place}/") or name == f"{place}.py")

    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as file:
            yield from (file.read(name).decode() for name in file.namelist() if is_there(name))
        return
    with tarfile.open(archive) as file:
        for member in file:
            _, _, name = member.name.partition("/")
            if is_there(name) and (found := file.extractfile(member)):
                yield found.read().decode()


def literal(node: ast.expr) -> str:
    """The default's text, where it is one of a few values."""
    try:
        return repr(ast.literal_eval(node))
    except ValueError:
        return "None"


def signature(function: ast.FunctionDef) -> str:
    """Names, kinds and defaults: ``(q, k, *, causal=False)``."""
    given = function.args
    places = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(places) - len(given.defaults)) + list(given.defaults)
    parts = []
    for index, (argument, default) in enumerate(zip(places, defaults, strict=True)):
        parts.append(argument.arg if default is None else f"{argument.arg}={literal(default)}")
        parts += ["/"] if index + 1 == len(given.posonlyargs) else []
    if given.vararg or given.kwonlyargs:
        parts.append(f"*{given.vararg.arg}" if given.vararg else "*")
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        parts.append(argument.arg if default is None else f"{argument.arg}={literal(default)}")
    parts += [f"**{given.kwarg.arg}"] if given.kwarg else []
    return f"({', '.join(parts)})"


def _is_overload(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(node).endswith("overload") for node in function.decorator_list)


def functions(text: str, wanted: tuple[str, ...]) -> dict[str, str]:
    """Qualified name to signature, of the last definition of each that is no overload."""
    found = {}
    for node in ast.parse(text).body:
        scopes = [("", [node])] + ([(f"{node.name}.", node.body)] if isinstance(node, ast.ClassDef) else [])
        for prefix, body in scopes:
            for member in body:
                if isinstance(member, ast.FunctionDef) and not _is_overload(member) and prefix + member.name in wanted:
                    found[prefix + member.name] = signature(member)
    return found


def schemas(text: str) -> dict[str, str]:
    """Name to schema of the operators that C++ defines by one."""
    found = re.findall(r"m\.def\(((?:\s*\"[^\"]*\")+)\);", text)
    written = ["".join(re.findall(r'"([^"]*)"', literals)) for literals in found]
    parts = (text.partition("(") for text in written if "->" in text)
    return {f"flash_attn_3::{name}": place + rest for name, place, rest in parts if name in ("fwd", "bwd")}


def commits(repository: Path) -> Iterator[tuple[str, str, str]]:
    """(day, FlashAttention 3's functions, its operators), as they were, oldest first, one for each day."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", repository, *arguments], capture_output=True, text=True, check=True).stdout

    log = git("log", "--reverse", "--format=%H %cs", "--since=2025-01-01", "--", FA3_SOURCE)
    days = {line.split()[1]: line.split()[0] for line in log.splitlines()}
    for day, commit in days.items():
        if FA3_NAME in git("show", f"{commit}:hopper/setup.py"):
            yield day, git("show", f"{commit}:{FA3_SOURCE}"), git("show", f"{commit}:{FA3_OPERATORS}")


def main(folder: Path, repository: Path | None) -> None:
    """Read every archive and write the file."""
    recorded: dict[str, dict[str, dict[str, list[str]]]] = {}

    def record(library: str, release: str, text: str, operators: str = "") -> None:
        for name, found in (functions(text, LIBRARIES[library][2]) | schemas(operators)).items():
            releases = recorded.setdefault(library, {}).setdefault(name, {}).setdefault(found, [])
            releases += [] if release in releases else [release]

    archives = [path for path in folder.rglob("*") if path.suffix in (".whl", ".gz")]
    named = [(PurePosixPath(path.name.removesuffix(".tar.gz")).name.split("-")[:2], path) for path in archives]
    for (name, version), path in sorted(named, key=lambda item: Version(item[0][1])):
        for library, (archive, place, _) in LIBRARIES.items():
            if name != archive:
                continue
            if library == "fa3" and not any(FA3_NAME in text for text in sources(path, "hopper/setup")):
                continue
            for text in sources(path, place):
                record(library, version, text)
    for day, text, operators in [] if repository is None else commits(repository):
        record("fa3", day, text, operators)
    target = Path(__file__).with_name("signatures.json")
    target.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
