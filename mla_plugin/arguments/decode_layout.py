"""What a decode call looks like, and what is known of the calls that look like it.

A decode step on a GPU takes tens of microseconds, so a call that looks like an earlier one costs one dictionary lookup.
``DecodeLayout`` is the key. Whatever a call's layout decides is kept under it: that its tensors were checked, the
resolver's plan, and what the backend works out (our kernels' launches).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from mla_plugin.arguments import decode_checks
from mla_plugin.arguments.checks import DTYPES
from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.arguments.layout import are_joined

TENSOR_ATTRIBUTES = ("type", "shape", "stride", "dtype", "device")
TensorLayout = tuple[type, torch.Size, tuple[int, ...], torch.dtype, torch.device]
"""``TENSOR_ATTRIBUTES`` of one tensor."""
_MAX_LAYOUTS = 4096


class DecodeLayout(NamedTuple):
    """All of a call that its checks and its launches depend on: not its scale, nor what tensors and lengths hold.

    Attributes:
        q_nope_abs, q_rope, c_kv, k_rope, page_table, seqlens_kv, leftpad_kv: of the tensors of these names.
        starts_aligned: c_kv and k_rope start on 16-byte boundaries.
        is_joined: they are columns of one tensor.
        causal, return_lse: as in ``DecodeTensors``.
    """

    q_nope_abs: TensorLayout
    q_rope: TensorLayout
    c_kv: TensorLayout
    k_rope: TensorLayout
    page_table: TensorLayout | None
    seqlens_kv: TensorLayout | None
    leftpad_kv: TensorLayout | None
    starts_aligned: bool
    is_joined: bool
    causal: bool
    return_lse: bool


def starts_aligned(c_kv: torch.Tensor, k_rope: torch.Tensor) -> bool:
    """Both start on a 16-byte boundary."""
    return (c_kv.data_ptr() | k_rope.data_ptr()) % 16 == 0


def _of(x: torch.Tensor) -> TensorLayout:
    return type(x), x.shape, x.stride(), x.dtype, x.device


def layout_of(tensors: DecodeTensors) -> DecodeLayout:
    """The layout of a call, whose tensors may be unfit for each other but are strided."""
    q_nope_abs, q_rope, c_kv, k_rope, _, causal, return_lse, page_table, seqlens_kv, leftpad_kv, _ = tensors
    values = (
        _of(q_nope_abs),
        _of(q_rope),
        _of(c_kv),
        _of(k_rope),
        page_table if page_table is None else _of(page_table),
        seqlens_kv if seqlens_kv is None else _of(seqlens_kv),
        leftpad_kv if leftpad_kv is None else _of(leftpad_kv),
        starts_aligned(c_kv, k_rope),
        are_joined(c_kv, k_rope),
        causal,
        return_lse,
    )
    return tuple.__new__(DecodeLayout, values)


class Known:
    """What is known of the calls of one layout.

    Attributes:
        has_no_query: the output has no element.
        is_empty: no query, or a cache without room.
        has_strided_queries: the queries' last dimension is not contiguous.
        decisions: plan and hook caller, by what else decides: the host, the backend asked for, what the host knows of
            the lengths, the environment and the set of plugins.
        kept: what a backend worked out for the layout, by the backend's name. It holds no tensor of a call.
    """

    __slots__ = ("decisions", "has_no_query", "has_strided_queries", "is_empty", "kept")

    def __init__(self, tensors: DecodeTensors) -> None:
        queries = (tensors.q_nope_abs, tensors.q_rope)
        self.has_no_query = not tensors.q_nope_abs.numel()
        self.is_empty = self.has_no_query or not tensors.c_kv.numel()
        self.has_strided_queries = any(x.stride(-1) != 1 for x in queries)
        self.decisions: dict[tuple[Any, ...], tuple[Any, Callable[..., Any]]] = {}
        self.kept: dict[str, Any] = {}


class DecodeCall(DecodeTensors):
    """``DecodeTensors`` on their way to a backend, with what is known of their layout once it was looked up.

    It belongs to these very tensors: ``_replace`` gives a ``DecodeCall`` of which nothing is known yet.
    """

    known: Known | None = None


_known: dict[DecodeLayout, Known] = {}


def known_of(tensors: DecodeTensors, dtypes: Sequence[torch.dtype] = DTYPES) -> Known:
    """What is known of the tensors' layout: one lookup for a ``DecodeCall``, however often it is asked for.

    Backends keep there what they would otherwise work out anew for every layer of every step. The tensors are checked
    when their layout is met for the first time.

    Raises:
        ValueError, TypeError: the tensors do not fit each other, or ``dtypes`` has not theirs.
    """
    call = tensors if isinstance(tensors, DecodeCall) else None
    if call is not None and call.known is not None:
        return call.known
    try:
        layout = layout_of(tensors)
    except (AttributeError, RuntimeError):  # no tensor, or one without strides: the check says which
        decode_checks.check_tensors(tensors, dtypes)
        raise
    known = _known.get(layout)
    if known is None:
        decode_checks.check_tensors(tensors, dtypes)
        if len(_known) >= _MAX_LAYOUTS:  # a contiguous cache has a new shape at every token
            _known.clear()
        known = _known[layout] = Known(tensors)
    if call is not None:
        call.known = known
    return known
