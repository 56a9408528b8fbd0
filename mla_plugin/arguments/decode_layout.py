"""The layout of a decode call, and the cache of everything that depends on it.

A decode step on a GPU takes tens of microseconds, so a call like an earlier one costs one dictionary lookup.
``DecodeLayout`` is the key. The value says that the tensors were checked, and holds the resolver's plan and what the
backend has prepared (our kernels' launches).
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
    """Everything that checks and launches of a call depend on; excludes the scale and the tensors' values.

    Attributes:
        q_nope_abs, q_rope, c_kv, k_rope, page_table, seqlens_kv, leftpad_kv: ``TENSOR_ATTRIBUTES`` of these tensors.
        starts_aligned: c_kv and k_rope start on 16-byte boundaries.
        queries_aligned: so do q_nope_abs and q_rope.
        is_joined: they are columns of one tensor.
        causal, return_lse, kv_cache_format: as in ``DecodeTensors``. The format says what ``kv_scale`` is.
    """

    q_nope_abs: TensorLayout
    q_rope: TensorLayout
    c_kv: TensorLayout
    k_rope: TensorLayout
    page_table: TensorLayout | None
    seqlens_kv: TensorLayout | None
    leftpad_kv: TensorLayout | None
    starts_aligned: bool
    queries_aligned: bool
    is_joined: bool
    causal: bool
    return_lse: bool
    kv_cache_format: str


def starts_aligned(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Both start on a 16-byte boundary."""
    return (x.data_ptr() | y.data_ptr()) % 16 == 0


def tensor_layout(x: torch.Tensor) -> TensorLayout:
    """``TENSOR_ATTRIBUTES`` of a tensor."""
    return type(x), x.shape, x.stride(), x.dtype, x.device


def layout_of(tensors: DecodeTensors) -> DecodeLayout:
    """The layout of a call; its tensors are strided but need not have been checked.

    ``tensor_layout`` and ``starts_aligned`` are written out for the tensors of most calls, because calling them takes
    longer than what they do.
    """
    q_nope_abs, q_rope, c_kv, k_rope, _, causal, return_lse, table, seqlens, leftpad, _, _, kv_cache_format = tensors
    values = (
        (type(q_nope_abs), q_nope_abs.shape, q_nope_abs.stride(), q_nope_abs.dtype, q_nope_abs.device),
        (type(q_rope), q_rope.shape, q_rope.stride(), q_rope.dtype, q_rope.device),
        (type(c_kv), c_kv.shape, c_kv.stride(), c_kv.dtype, c_kv.device),
        (type(k_rope), k_rope.shape, k_rope.stride(), k_rope.dtype, k_rope.device),
        None if table is None else (type(table), table.shape, table.stride(), table.dtype, table.device),
        None if seqlens is None else (type(seqlens), seqlens.shape, seqlens.stride(), seqlens.dtype, seqlens.device),
        None if leftpad is None else tensor_layout(leftpad),
        (c_kv.data_ptr() | k_rope.data_ptr()) % 16 == 0,
        (q_nope_abs.data_ptr() | q_rope.data_ptr()) % 16 == 0,
        are_joined(c_kv, k_rope),
        causal,
        return_lse,
        kv_cache_format,
    )
    return tuple.__new__(DecodeLayout, values)


class Known:
    """Cached facts about the calls of one layout.

    Attributes:
        has_no_query: the output has no element.
        is_empty: no query, or a cache without room.
        has_strided_queries: the queries' last dimension is not contiguous.
        decisions: plan and hook caller, by the rest of what decides: the host, the requested backend, what the host
            knows of the lengths, the environment and the set of plugins.
        kept: what a backend prepared for the layout, by the backend's name. It holds no tensor of a call.
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
    """``DecodeTensors`` with the ``Known`` of their layout, once it has been looked up.

    ``_replace`` gives a ``DecodeCall`` whose layout has not been looked up yet.
    """

    known: Known | None = None


_known: dict[DecodeLayout, Known] = {}


def known_of(tensors: DecodeTensors, dtypes: Sequence[torch.dtype] = DTYPES) -> Known:
    """The ``Known`` of the tensors' layout; a ``DecodeCall`` looks it up only once.

    Backends store there what they would otherwise recompute for every layer of every step. The tensors are checked
    when their layout is first seen.

    Raises:
        ValueError, TypeError: the tensors do not match each other, or ``dtypes`` lacks their dtype.
    """
    call = tensors if isinstance(tensors, DecodeCall) else None
    if call is not None and call.known is not None:
        return call.known
    try:
        layout = layout_of(tensors)
    except (AttributeError, IndexError, RuntimeError):  # no tensor, none with dimensions or strides: reported below
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
