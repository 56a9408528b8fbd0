"""Every number of heads, sequences and tokens, and every width: kernels fail at sizes that nobody would list.

Each call has one such size, and what else a kernel tells apart is drawn: the layout, the dtype, the mask.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mla_plugin.conformance import once
from mla_plugin.conformance.attention.case import DTYPE_NAMES, Case
from mla_plugin.conformance.attention.special import check_once
from mla_plugin.conformance.drawn import Dice

if TYPE_CHECKING:
    from mla_plugin.conformance.attention.suite import BackendConformance

_WIDTHS = (*range(8, 257, 8), 288, 320, 384, 448, 512, 576)
_PAIRS = tuple((dim, dim) for dim in _WIDTHS) + tuple((dim + 64, dim) for dim in range(32, 257, 32))
_HEADS = (*range(1, 41), *range(48, 129, 8))
_GROUPS = tuple((group, kv_heads) for group in (*range(2, 17), 24, 32, 40, 48, 64) for kv_heads in (1, 2))
_BATCHES = (*range(1, 41), 48, 63, 64, 65, 100, 127, 128, 129)
_LENGTHS = (*range(1, 140), *range(144, 400, 16), 255, 257, 383, 511, 512, 513)


def check_every_size(suite: BackendConformance, plain: list[Case]) -> None:
    """Both passes, or the forward alone, of each size that the backend takes."""
    if plain:
        once.check_sizes(suite, _sizes(), functools.partial(_drawn, suite, plain), functools.partial(check_once, suite))


def _sizes() -> Iterator[tuple[str, dict[str, Any]]]:
    """What the size is of, and what it changes of a case."""
    for dim_qk, dim_v in _PAIRS:
        yield f"widths of {dim_qk} and {dim_v}", {"head_dim_qk": dim_qk, "head_dim_v": dim_v}
    for heads in _HEADS:
        yield f"{heads} heads", {"num_heads": heads, "num_kv_heads": heads}
    for group, kv_heads in _GROUPS:
        yield f"groups of {group} heads", {"num_heads": kv_heads * group, "num_kv_heads": kv_heads}
    for batch in _BATCHES:
        yield f"{batch} sequences", {"seqlens_q": (3,) * batch, "seqlens_kv": (5,) * batch}
    for length in _LENGTHS:
        for sides in (("seqlens_q", "seqlens_kv"), ("seqlens_q",), ("seqlens_kv",)):
            yield f"{length} tokens", {"seqlens_q": (9,), "seqlens_kv": (9,)} | dict.fromkeys(sides, (length,))


def _drawn(suite: BackendConformance, plain: list[Case], dice: Dice, given: dict[str, Any]) -> Case | None:
    """A plain case of this size, with a dtype and a mask that the backend takes beside it."""
    narrow: dict[str, Any] = {"head_dim_qk": 16, "head_dim_v": 16, "num_heads": 1, "num_kv_heads": 1}
    short: dict[str, Any] = {"seqlens_q": (9, 9), "seqlens_kv": (13, 13)}
    for _ in range(6):
        own = dice.one_of(plain)
        mask = dice.one_of(("no_mask", "causal", "causal_bottom_right"))
        if own.is_packed:
            mask = "padding" if mask == "no_mask" else f"padding_{mask}"
        options: dict[str, Any] = {"attn_mask_type": mask}
        options |= {"dtype": dice.one_of((own.dtype, *DTYPE_NAMES)), "return_lse": dice.chance(0.5)}
        for sizes in (narrow | short, short, {}):
            case = replace(own, name="", **(options | sizes | given))
            if suite.plan_of(case) is not None:
                return case
    return None
