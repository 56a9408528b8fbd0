"""The only module that reads ``os.environ``; ``variables`` is the table of what it reads."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from mla_plugin.variables import VARIABLES, Value, Variable


class EnvironmentVariableError(ValueError):
    """An environment variable has a value that is not accepted."""


_BY_NAME: dict[str, Variable] = {variable.name: variable for variable in VARIABLES}


def parse(name: str, environ: Mapping[str, str]) -> Value:
    """Parse one variable from a mapping.

    Raises:
        KeyError: the variable is not in the table.
        EnvironmentVariableError: the value is not accepted; names the variable, the value and what is expected.
    """
    variable = _BY_NAME[name]
    text = environ.get(name)
    if text is None:
        return variable.default
    try:
        return variable.parse(text)
    except ValueError as error:
        raise EnvironmentVariableError(f"{name}={text!r}: expected {variable.accepted}") from error


def text(name: str, environ: Mapping[str, str]) -> str | None:
    """The value of a string variable; None when unset or blank."""
    value = parse(name, environ)
    return value if isinstance(value, str) else None


def names(name: str, environ: Mapping[str, str]) -> frozenset[str]:
    """The value of a variable that lists names."""
    value = parse(name, environ)
    return frozenset(value) if isinstance(value, tuple) else frozenset()


_GATES: tuple[str, ...] = tuple(v.name for v in VARIABLES if v.read_at == "selection")

Gates: TypeAlias = tuple[tuple[str, str], ...]
"""The set variables that a selection reads, with their raw strings: hashable, part of the cache key."""


def gates() -> Gates:
    """Snapshot of the variables that a selection depends on.

    It runs at every call, and a missing name in ``os.environ`` raises and catches a KeyError (7.8 us for the table), so
    the names are looked up in its underlying dictionary, if there is one (0.3 us).
    """
    environ = os.environ
    if (data := getattr(environ, "_data", None)) is None:
        return tuple([(name, text) for name in _GATES if (text := environ.get(name)) is not None])
    if data.keys().isdisjoint(names := _encoded_gates()):
        return ()
    try:
        return tuple([(name, environ.decodevalue(data[key])) for key, name in names.items() if key in data])
    except KeyError:  # another thread removed one after it was found
        return gates()


@functools.cache
def _encoded_gates() -> dict[object, str]:
    return {_encoded(name): name for name in _GATES}


@functools.cache
def _encoded(name: str) -> object:
    return os.environ.encodekey(name)


def read(name: str) -> Value:
    """Parse one variable from the process's environment; errors as ``parse``."""
    return parse(name, os.environ)


def assignments() -> dict[str, str]:
    """The process's variables with our or TransformerEngine's prefix, as raw strings, including misspelt names."""
    names = sorted(name for name in os.environ if name.startswith(("MLA_PLUGIN_", "NVTE_")))
    return {name: text for name in names if (text := os.environ.get(name)) is not None}


def cuda_homes() -> tuple[str, ...]:
    """Where compilers look for the CUDA toolkit: CUDA_HOME or CUDA_PATH, else the default location."""
    named = tuple(text for name in ("CUDA_HOME", "CUDA_PATH") if (text := os.environ.get(name)))
    return named[:1] or ("/usr/local/cuda",)


def triton_cache() -> Path:
    """Where Triton keeps compiled kernels: TRITON_CACHE_DIR, or a folder in TRITON_HOME or the user's home."""
    named = os.environ.get("TRITON_CACHE_DIR")
    return Path(named or os.path.join(os.environ.get("TRITON_HOME", os.path.expanduser("~")), ".triton", "cache"))


def is_autotuning_requested() -> bool:
    """True when NVTE_DISABLE_TRITON_AUTOTUNING is "0"."""
    return _may_be_set("NVTE_DISABLE_TRITON_AUTOTUNING") and not read("NVTE_DISABLE_TRITON_AUTOTUNING")


def is_batch_invariance_requested() -> bool:
    """True when MLA_PLUGIN_BATCH_INVARIANT is "1"."""
    return _may_be_set("MLA_PLUGIN_BATCH_INVARIANT") and bool(read("MLA_PLUGIN_BATCH_INVARIANT"))


def batch_invariant_chunk(changed: Mapping[str, str] | None = None) -> int:
    """The value of MLA_PLUGIN_BATCH_INVARIANT_CHUNK; ``changed``: variables that differ from the process's."""
    name = "MLA_PLUGIN_BATCH_INVARIANT_CHUNK"
    if changed is not None and name in changed:
        value = parse(name, changed)
    else:
        value = read(name) if _may_be_set(name) else _BY_NAME[name].default
    assert isinstance(value, int)
    return value


def is_value_check_requested() -> bool:
    """True when MLA_PLUGIN_CHECK is "1"."""
    return _may_be_set("MLA_PLUGIN_CHECK") and bool(read("MLA_PLUGIN_CHECK"))


def is_p2p_batch_allowed() -> bool:
    """False when NVTE_BATCH_MHA_P2P_COMM is 0."""
    return not _may_be_set("NVTE_BATCH_MHA_P2P_COMM") or bool(read("NVTE_BATCH_MHA_P2P_COMM"))


def _may_be_set(name: str) -> bool:
    """False for a variable that is not set; called at every call, so it is looked up as in ``gates``."""
    data = getattr(os.environ, "_data", None)
    return data is None or _encoded(name) in data


def check_selection(environ: Mapping[str, str]) -> None:
    """Parse what TransformerEngine's newest release parses to select, as lazily as it does; errors as ``parse``."""
    if parse("NVTE_FLASH_ATTN", environ):
        for name in ("NVTE_FLASH_ATTN_V2", "NVTE_FLASH_ATTN_V3", "NVTE_FLASH_ATTN_V4"):
            parse(name, environ)
    parse("NVTE_FUSED_ATTN", environ)
    parse("NVTE_UNFUSED_ATTN", environ)


def markdown_table() -> str:
    """The table of docs/environment.md."""
    rows = ["| variable | accepted | default | takes effect at | meaning |", "|---|---|---|---|---|"]
    for v in VARIABLES:
        if v.default is None:
            default = "unset"
        elif v.default == ():
            default = "none"
        else:
            default = str(int(v.default)) if isinstance(v.default, bool) else str(v.default)
        rows.append(f"| `{v.name}` | {v.accepted} | {default} | {v.read_at} | {v.meaning} |")
    return "\n".join(rows)


_read: Callable[[Any, Any], str] = type(os.environ).__getitem__
"""The real one: ``recorded_reads`` replaces the method."""


@contextmanager
def recorded_reads() -> Iterator[list[str]]:
    """Record the names of all variables read within the block, in order; for the conformance suite."""
    kind: Any = type(os.environ)
    names: list[str] = []
    original = kind.__getitem__

    def recording(self: Any, name: Any) -> Any:
        names.append(name)
        return original(self, name)

    kind.__getitem__ = recording
    try:
        yield names
    finally:
        kind.__getitem__ = original


def variables() -> dict[str, str]:
    """Every variable of the process and its value; for the conformance suite. ``recorded_reads`` does not see it."""
    return {name: _read(os.environ, name) for name in os.environ}


def assign(name: str, value: str | None) -> None:
    """Set a variable, or remove it with None; for the conformance suite."""
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
