"""The only module that reads ``os.environ``: a table of variables with their exact parsing, default and meaning.

TransformerEngine parses its variables in three ways, which are kept: ``int()`` (so ``"true"`` and ``""`` raise,
``" 1 "`` and ``"2"`` are on), ``bool(int())``, and equality with the string ``"1"`` (so nothing raises).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias

Value: TypeAlias = int | bool | str | tuple[str, ...] | None
ReadAt: TypeAlias = Literal["selection", "construction", "import", "call"]


class EnvironmentVariableError(ValueError):
    """An environment variable has a value that is not accepted."""


def _integer(text: str) -> int:
    return int(text)


def _boolean_integer(text: str) -> bool:
    return bool(int(text))


def _is_one(text: str) -> bool:
    return text == "1"


def _is_fill(text: str) -> bool:
    return text == "fill"


def _is_not_zero(text: str) -> bool:
    return text != "0"


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _verbatim(text: str) -> str:
    return text


def _text(text: str) -> str | None:
    return text.strip() or None


class Variable(NamedTuple):
    """One environment variable.

    Attributes:
        name: its name.
        parse: converts the string to a value; raises ValueError for a string that is not accepted.
        accepted: description of the accepted strings, used in the error message.
        default: value when the variable is unset.
        meaning: one sentence.
        read_at: when a change takes effect: at every ``selection``, at the ``construction`` of a host's attention
            module, at the ``import`` of the package, or at the ``call`` that uses it.
        owner: whose variable it is.
    """

    name: str
    parse: Callable[[str], Value]
    accepted: str
    default: Value
    meaning: str
    read_at: ReadAt
    owner: Literal["TransformerEngine", "Triton", "mla-plugin"]


_INT = "an integer, non-zero is on"
_ONE = 'exactly "1"; anything else is off'
_ANY = "any text; it is not read"


def _te(
    name: str, parse: Callable[[str], Value], accepted: str, default: Value, meaning: str, read_at: ReadAt
) -> Variable:
    return Variable(name, parse, accepted, default, meaning, read_at, "TransformerEngine")


def _ours(
    name: str, parse: Callable[[str], Value], accepted: str, default: Value, meaning: str, read_at: ReadAt = "selection"
) -> Variable:
    return Variable(name, parse, accepted, default, meaning, read_at, "mla-plugin")


VARIABLES: tuple[Variable, ...] = (
    _te("NVTE_FLASH_ATTN", _integer, _INT, 1, "FlashAttention 2, 3 and 4.", "selection"),
    _te(
        "NVTE_FLASH_ATTN_V2", _integer, _INT, 1, "FlashAttention 2; read only while NVTE_FLASH_ATTN is on.", "selection"
    ),
    _te(
        "NVTE_FLASH_ATTN_V3", _integer, _INT, 1, "FlashAttention 3; read only while NVTE_FLASH_ATTN is on.", "selection"
    ),
    _te(
        "NVTE_FLASH_ATTN_V4", _integer, _INT, 1, "FlashAttention 4; read only while NVTE_FLASH_ATTN is on.", "selection"
    ),
    _te("NVTE_FUSED_ATTN", _integer, _INT, 1, "cuDNN attention (backend `cudnn`).", "selection"),
    _te("NVTE_UNFUSED_ATTN", _integer, _INT, 1, "The unfused fallback (backend `sdpa`).", "selection"),
    _te(
        "NVTE_FUSED_ATTN_BACKEND",
        _verbatim,
        _ANY,
        None,
        "Documented by TransformerEngine, read by none of its code; without effect here too.",
        "selection",
    ),
    _te(
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        _boolean_integer,
        _INT,
        True,
        "0 asks for a bitwise deterministic backward.",
        "selection",
    ),
    _te("NVTE_DEBUG", _integer, _INT, 0, "Log each new decision as NVTE_DEBUG_LEVEL says.", "selection"),
    _te(
        "NVTE_DEBUG_LEVEL",
        _integer,
        "an integer: 0 warnings, 1 the chosen backend, 2 every reason",
        0,
        "How much NVTE_DEBUG=1 logs.",
        "selection",
    ),
    _te(
        "NVTE_FUSED_ATTN_USE_FAv2_BWD",
        _is_one,
        _ONE,
        False,
        "TransformerEngine runs FlashAttention 2's backward after cuDNN's forward (compute capability 9.0 only); "
        "wrong for head_dim_qk > head_dim_v, so it has no effect here.",
        "construction",
    ),
    _te(
        "NVTE_APPLY_QK_LAYER_SCALING",
        _boolean_integer,
        _INT,
        False,
        "TransformerEngine's unfused attention divides the scores by the layer number before the softmax's own scaling "
        "and multiplies it back; the result is unchanged.",
        "construction",
    ),
    _te(
        "NVTE_BATCH_MHA_P2P_COMM",
        _integer,
        _INT,
        1,
        "Context parallelism by p2p sends and receives in one batch. 0, TransformerEngine's default, does so one by "
        "one, but never between 2 ranks before compute capability 10.0.",
        "call",
    ),
    _te("NVTE_UnfusedDPA_Emulate_FP8", _is_one, _ONE, False, "FP8 only; FP8 is refused here.", "selection"),
    _te(
        "NVTE_DISABLE_TRITON_AUTOTUNING",
        _is_not_zero,
        'exactly "0" turns autotuning on; anything else is off',
        True,
        "0 lets our Triton kernels time a few tiles at the first call of each kind and keep the fastest in Triton's "
        "cache directory; unset they take the tiles of a table, where TransformerEngine's kernels would autotune.",
        "call",
    ),
    Variable(
        "TRITON_INTERPRET",
        _is_one,
        _ONE,
        False,
        "Triton runs kernels in Python on the CPU, to test them without a GPU; set it before the program starts.",
        "import",
        "Triton",
    ),
    _ours(
        "NVTE_MLA_TRITON",
        _verbatim,
        'exactly "1" is on and "0" is off everywhere; anything else is as unset',
        None,
        '"1" puts our Triton kernels first, inside TransformerEngine where they are known to be right; '
        '"0" keeps them off everywhere.',
    ),
    _ours(
        "MLA_PLUGIN_BACKEND",
        _text,
        "the name of a backend",
        None,
        "Use this backend and no other; a request that it refuses raises with its reasons.",
    ),
    _ours("MLA_PLUGIN_BLOCK", _names, "backend names, separated by commas", (), "Backends that are never used."),
    _ours(
        "MLA_PLUGIN_CHECK",
        _is_one,
        _ONE,
        False,
        "Check the values of lengths, page tables and cache slots on CUDA devices too, as on the CPU, and in each "
        "context-parallel call whether the ranks make the same one and whether it failed on another rank; every such "
        "call then waits for the device. Set it on all ranks.",
        "call",
    ),
    _ours(
        "MLA_PLUGIN_BATCH_INVARIANT",
        _is_one,
        _ONE,
        False,
        "Every call asks for `batch_invariant=True`, for hosts that have no argument for it.",
    ),
    _ours(
        "MLA_PLUGIN_STRICT_TE",
        _is_one,
        _ONE,
        False,
        "Every host decides as TransformerEngine, in its order: nothing runs that its selection would not allow.",
    ),
    _ours(
        "MLA_PLUGIN_TE",
        _is_fill,
        'exactly "fill"; anything else is off',
        False,
        "Inside TransformerEngine, run the calls for which it has no backend or only its quadratic one.",
    ),
    _ours(
        "MLA_PLUGIN_NVTE_PLUGIN",
        _text,
        "the name of a module with load_plugins()",
        None,
        "Another plugin for TransformerEngine's one slot, loaded when NVTE_PLUGIN names this library.",
        "import",
    ),
    _ours("MLA_PLUGIN_VLLM_OVERRIDE", _is_one, _ONE, False, "Decode in place of vLLM's `TRITON_MLA`.", "import"),
)

_BY_NAME: dict[str, Variable] = {variable.name: variable for variable in VARIABLES}


def parse(name: str, environ: Mapping[str, str]) -> Value:
    """Parse one variable from a mapping.

    Raises:
        KeyError: the variable is not in the table.
        EnvironmentVariableError: the value is not accepted; names the variable, the value and what is accepted.
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


_GATES: tuple[str, ...] = tuple(
    v.name for v in VARIABLES if v.read_at == "selection" and v.name != "NVTE_FUSED_ATTN_BACKEND"
)

Gates: TypeAlias = tuple[tuple[str, str], ...]
"""The set variables that a selection reads, with their raw strings: hashable, part of the cache key."""


def gates() -> Gates:
    """Snapshot of the variables that a selection depends on.

    It runs at every call. Looking up a missing name in ``os.environ`` raises and catches a KeyError (7.8 us for the
    whole table), so the names are looked up in its underlying dictionary, if there is one (0.5 us).
    """
    environ = os.environ
    data = getattr(environ, "_data", None)
    if data is None:
        return tuple([(name, text) for name in _GATES if (text := environ.get(name)) is not None])
    try:
        return tuple([(name, environ.decodevalue(data[key])) for key, name in _encoded_gates() if key in data])
    except KeyError:  # another thread removed one after it was found
        return gates()


@functools.cache
def _encoded_gates() -> tuple[tuple[object, str], ...]:
    return tuple((_encoded(name), name) for name in _GATES)


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


def is_autotuning_requested() -> bool:
    """True when NVTE_DISABLE_TRITON_AUTOTUNING is "0"."""
    return _may_be_set("NVTE_DISABLE_TRITON_AUTOTUNING") and not read("NVTE_DISABLE_TRITON_AUTOTUNING")


def is_batch_invariance_requested() -> bool:
    """True when MLA_PLUGIN_BATCH_INVARIANT is "1"."""
    return _may_be_set("MLA_PLUGIN_BATCH_INVARIANT") and bool(read("MLA_PLUGIN_BATCH_INVARIANT"))


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
    """Parse the variables that TransformerEngine's selection parses, as lazily as it does; errors as ``parse``."""
    if parse("NVTE_FLASH_ATTN", environ):
        for name in ("NVTE_FLASH_ATTN_V2", "NVTE_FLASH_ATTN_V3", "NVTE_FLASH_ATTN_V4"):
            parse(name, environ)
    parse("NVTE_FUSED_ATTN", environ)
    parse("NVTE_UNFUSED_ATTN", environ)


def markdown_table() -> str:
    """The README's table of variables."""
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


@contextmanager
def changed_variable(name: str, value: str) -> Iterator[None]:
    """Set a variable to another value within the block; for the conformance suite."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
