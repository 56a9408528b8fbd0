"""Every environment variable: its exact parsing, default and meaning. ``environment`` reads them.

TransformerEngine parses its variables in three ways, which are kept: ``int()`` (so ``"true"`` and ``""`` raise,
``" 1 "`` and ``"2"`` are on), ``bool(int())``, and equality with the string ``"1"`` (so nothing raises). Its C++ reads
one as a stream.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

Value: TypeAlias = int | bool | str | tuple[str, ...] | None
ReadAt: TypeAlias = Literal["selection", "construction", "import", "call"]


CHUNKS = (128, 256, 512, 1024, 2048, 4096)
"""Keys of a sequence's first chunks that batch-invariant decode may be told to take."""


def _integer(text: str) -> int:
    return int(text)


def _first_integer(text: str) -> int | None:
    """As C++ streams read it: what comes after the digits does not count."""
    found = re.match(r"\s*([+-]?[0-9]+)", text)
    return None if found is None else int(found[1])


def _boolean_integer(text: str) -> bool:
    return bool(int(text))


def _is_one(text: str) -> bool:
    return text == "1"


def _is_fill(text: str) -> bool:
    return text == "fill"


def _is_not_zero(text: str) -> bool:
    return text != "0"


def _chunk(text: str) -> int:
    keys = int(text)
    if keys not in CHUNKS:
        raise ValueError(keys)
    return keys


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


def _ours(name: str, parse: Callable[[str], Value], accepted: str, default: Value, meaning: str) -> Variable:
    return Variable(name, parse, accepted, default, meaning, "selection", "mla-plugin")


VARIABLES: tuple[Variable, ...] = (
    _te("NVTE_FLASH_ATTN", _integer, _INT, 1, "FlashAttention 2, 3 and 4.", "selection"),
    _te(
        "NVTE_FLASH_ATTN_V2",
        _integer,
        _INT,
        1,
        "FlashAttention 2; read only while NVTE_FLASH_ATTN is on; inside TransformerEngine from 2.18 on.",
        "selection",
    ),
    _te(
        "NVTE_FLASH_ATTN_V3",
        _integer,
        _INT,
        1,
        "FlashAttention 3; read only while NVTE_FLASH_ATTN is on; inside TransformerEngine from 2.18 on.",
        "selection",
    ),
    _te(
        "NVTE_FLASH_ATTN_V4",
        _integer,
        _INT,
        1,
        "FlashAttention 4; read only while NVTE_FLASH_ATTN is on; inside TransformerEngine from 2.18 on.",
        "selection",
    ),
    _te("NVTE_FUSED_ATTN", _integer, _INT, 1, "cuDNN attention (backend `cudnn`).", "selection"),
    _te("NVTE_UNFUSED_ATTN", _integer, _INT, 1, "The unfused fallback (backend `sdpa`).", "selection"),
    _te(
        "NVTE_FUSED_ATTN_BACKEND",
        _first_integer,
        "a text that begins with an integer; any other is as unset",
        None,
        "Inside TransformerEngine up to 2.15: 0 puts its cuDNN kernels for short sequences before the general ones. "
        "Newer releases and other hosts do not read it.",
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
    _te("NVTE_DEBUG", _integer, _INT, 0, "Log each new decision, in the detail of NVTE_DEBUG_LEVEL.", "selection"),
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
        "0 lets our Triton kernels time a few tiles at the first call of each kind and store the fastest in Triton's "
        "cache directory; unset, they use a table of tiles, where TransformerEngine's kernels would autotune.",
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
    Variable(
        "NVTE_MLA_TRITON",
        _verbatim,
        'exactly "1" is on and "0" is off everywhere; anything else is as unset',
        None,
        '"1" puts our Triton kernels first, inside TransformerEngine where they are known to be right; '
        '"0" disables them everywhere.',
        "selection",
        "mla-plugin",
    ),
    _ours(
        "MLA_PLUGIN_BACKEND",
        _text,
        "the name of a backend",
        None,
        "Use this backend and no other; a request that it refuses raises with its reasons.",
    ),
    _ours("MLA_PLUGIN_BLOCK", _names, "backend names, separated by commas", (), "Backends that are never used."),
    Variable(
        "MLA_PLUGIN_CHECK",
        _is_one,
        _ONE,
        False,
        "Check the values of lengths, page tables and cache slots on CUDA devices too, as on the CPU. In each "
        "context-parallel call also check that all ranks make the same call and that none failed. These checks wait "
        "for the device. Set it on all ranks.",
        "call",
        "mla-plugin",
    ),
    _ours(
        "MLA_PLUGIN_BATCH_INVARIANT",
        _is_one,
        _ONE,
        False,
        "Every call asks for `batch_invariant=True`, for hosts that have no argument for it.",
    ),
    Variable(
        "MLA_PLUGIN_BATCH_INVARIANT_CHUNK",
        _chunk,
        f"one of {', '.join(map(str, CHUNKS))}",
        256,
        "Number of keys between the first of the fixed splits of `batch_invariant=True` decode; later ones are two and "
        "four times as far apart. More are faster for large batches of many heads, fewer for small batches; results "
        "depend on it bit by bit, so set it equally wherever they are compared.",
        "call",
        "mla-plugin",
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
    Variable(
        "MLA_PLUGIN_NVTE_PLUGIN",
        _text,
        "the name of a module with load_plugins()",
        None,
        "Another plugin for TransformerEngine's one slot, loaded when NVTE_PLUGIN names this library.",
        "import",
        "mla-plugin",
    ),
    Variable(
        "MLA_PLUGIN_VLLM_OVERRIDE",
        _is_one,
        _ONE,
        False,
        "Decode in place of vLLM's `TRITON_MLA`.",
        "import",
        "mla-plugin",
    ),
)
