"""The launch of the wide decode kernel. rule.py says which calls it takes; ``takes`` adds what tensors decide."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.kernels.decode.descriptors import MAX_CACHES, can_read, strides_of
from mla_plugin.kernels.decode.device import Device
from mla_plugin.kernels.decode.hopper.launch import facts_of
from mla_plugin.kernels.decode.hopper.query_rows import query_rows
from mla_plugin.kernels.decode.transposed.common import KEYS, PANEL, ROPE, bytes_layout
from mla_plugin.kernels.decode.wide import rule
from mla_plugin.kernels.decode.wide.common import QUERY_COLUMNS, query_layout
from mla_plugin.kernels.decode.wide.kernel import wide_decode_kernel
from mla_plugin.kernels.decode.workspace import Scratch
from mla_plugin.kernels.descriptors import Address
from mla_plugin.kernels.launch import Launch
from mla_plugin.kernels.tiles import ceil_div

GIVEN = (
    *("Parts", "Plan", "Out", "KV_scale", "page_table", "seqlens_kv"),
    *("desc_q", "desc_r", "desc_c", "desc_k", "softmax_scale"),
)


def takes(tensors: DecodeTensors, device: Device) -> bool:
    """Whether the kernel computes such calls."""
    batch, seqlen_q, heads, _ = tensors.q_nope_abs.shape
    reason = rule.other_kernel_because(**facts_of(tensors), batch_invariant=False, return_lse=tensors.return_lse)
    tiles = batch * max(1, ceil_div(tensors.capacity, KEYS.value))
    reason = reason or rule.few_tiles_because(seqlen_q * heads, tiles, device.processors)
    if not device.has_gluon or reason is not None or tensors.c_kv.numel() == 0:
        return False
    return can_read(tensors.c_kv) and can_read(tensors.k_rope)


class _Described(NamedTuple):
    """What descriptors of one tensor have in common; ``block`` is what a copy brings."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    block: tuple[int, ...]
    layout: Any


class Descriptors:
    """The descriptors of calls of one layout that the kernel computes, by the addresses of their tensors.

    Attributes:
        gathers, query_block, copies_queries: see ``Described``.
    """

    gathers = False

    def __init__(self, tensors: DecodeTensors) -> None:
        rows, self.copies_queries = query_rows(tensors)
        self.query_block = rows.block
        self._described = []
        for x, columns in ((rows.q_nope_abs, QUERY_COLUMNS.value), (rows.q_rope, ROPE.value // 2)):
            block = (1, *rows.block, columns)
            layout = query_layout(columns, len(block))
            self._described.append(_Described(tuple(x.shape), strides_of(x), torch.bfloat16, block, layout))
        for x, columns in ((tensors.c_kv, PANEL.value), (tensors.k_rope, ROPE.value)):
            block = (1, KEYS.value, columns)
            layout = bytes_layout(columns)
            self._described.append(_Described(tuple(x.shape), strides_of(x), torch.uint8, block, layout))
        self._made = functools.lru_cache(4 * MAX_CACHES)(self._make)

    def _make(self, which: int, address: int) -> TensorDescriptor:
        x = self._described[which]
        memory: Any = Address(address, x.dtype)
        return TensorDescriptor(memory, list(x.shape), [*x.strides, 1], list(x.block), x.layout)

    def arguments(
        self, tensors: DecodeTensors, scratch: Scratch, out: torch.Tensor, lse: torch.Tensor | None, scale: float
    ) -> tuple[object, ...]:
        """Those of a call, by ``GIVEN``; lse is None."""
        read = (tensors.q_nope_abs, tensors.q_rope, tensors.c_kv, tensors.k_rope)
        made = [self._made(which, x.data_ptr()) for which, x in enumerate(read)]
        return (*scratch, out, tensors.kv_scale, tensors.page_table, tensors.seqlens_kv, *made, scale)


def attend_launch(
    tensors: DecodeTensors,
    programs: int,
    parts: int,
    page_size: int,
    options: dict[str, int | None],
    *,
    overhead: int,
    is_planned: bool,
) -> Launch:
    """The launch of the kernel; the arguments of each call are ``GIVEN``.

    Args:
        programs: row tiles x ``parts``.
        page_size: 0: contiguous.
        options: of ``options_of``.
        overhead: of a sequence, in tiles, as for ``plan_kernel``.
        is_planned: another kernel has written the plan.
    """
    batch, seqlen_q, heads, _ = tensors.q_nope_abs.shape
    fixed: dict[str, object] = {"batch": batch, "num_heads": heads, "seqlen_q": seqlen_q}
    fixed |= {"capacity": tensors.capacity, "num_parts": parts, "overhead": overhead}
    fixed |= {"stride_pt": 0 if tensors.page_table is None else tensors.page_table.stride(0)}
    fixed |= {"PAGE_SIZE": page_size, "CAUSAL": tensors.causal and seqlen_q > 1}
    fixed |= {"DEPENDENT": bool(options.get("launch_pdl")), "PLANNED": is_planned}
    return Launch(wide_decode_kernel, (programs, 1, 1), GIVEN, fixed, options)
