"""The launch of the transposed decode kernel. rule.py says which calls it takes; ``takes`` adds what tensors decide."""

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.kernels.decode.descriptors import MAX_CACHES, can_read, strides_of
from mla_plugin.kernels.decode.device import Device
from mla_plugin.kernels.decode.hopper.gathering import UNIT
from mla_plugin.kernels.decode.hopper.launch import facts_of
from mla_plugin.kernels.decode.hopper.rule import lies_in_several_pages
from mla_plugin.kernels.decode.transposed import rule
from mla_plugin.kernels.decode.transposed.common import KEYS, PANEL, ROPE, bytes_layout
from mla_plugin.kernels.decode.transposed.kernel import transposed_decode_kernel
from mla_plugin.kernels.decode.workspace import Scratch
from mla_plugin.kernels.descriptors import Address
from mla_plugin.kernels.hopper.tickets import LOADING_REGISTERS
from mla_plugin.kernels.launch import Launch, named_strides
from mla_plugin.kernels.tiles import ceil_div

GIVEN = (
    *("Parts", "Plan", "Out", "Lse", "Q_nope_abs", "Q_rope", "C_kv", "K_rope", "KV_scale", "page_table", "seqlens_kv"),
    *("desc_c", "desc_k", "softmax_scale"),
)
_REGISTERS = 128
"""Of a thread on average, so that a multiprocessor holds two programs of eight warps.

Where TMA loads the tiles, three of the eight do not run.
"""
_GATHERING_REGISTERS = 56
"""Of a thread of the gathering warps, which leaves 200 to the computing ones."""
_NO_CACHE = (None, None)


def takes(tensors: DecodeTensors, device: Device) -> bool:
    """Whether the kernel computes such calls."""
    batch, seqlen_q, heads, _ = tensors.q_nope_abs.shape
    reason = rule.other_kernel_because(**facts_of(tensors), batch_invariant=False)
    tiles = batch * max(1, ceil_div(tensors.capacity, KEYS.value))
    reason = reason or rule.few_tiles_because(seqlen_q * heads, tiles, device.processors)
    if seqlen_q * heads > rule.FEW_ROWS and _gathers(tensors):
        return False  # of sequences that share a cache, which the rule does not see
    return device.has_gluon and reason is None and tensors.c_kv.numel() > 0


def _gathers(tensors: DecodeTensors) -> bool:
    """Whether TMA cannot load the key tiles: they lie in several pages, or sequences share a cache."""
    page_size = None if tensors.page_table is None else tensors.c_kv.shape[1]
    return lies_in_several_pages(page_size) or not (can_read(tensors.c_kv) and can_read(tensors.k_rope))


class Descriptors:
    """The descriptors of the caches of calls of one layout, by their addresses.

    Attributes:
        gathers, query_block, copies_queries: see ``Described``.
    """

    query_block: tuple[int, ...] | None = None
    copies_queries = False

    def __init__(self, tensors: DecodeTensors) -> None:
        self.gathers = _gathers(tensors)
        self._shapes = [(tuple(x.shape), strides_of(x)) for x in (tensors.c_kv, tensors.k_rope)]
        self._made = functools.lru_cache(2 * MAX_CACHES)(self._make)

    def _make(self, which: int, address: int) -> TensorDescriptor:
        shape, strides = self._shapes[which]
        memory: Any = Address(address, torch.uint8)
        columns = (PANEL.value, ROPE.value)[which]
        return TensorDescriptor(memory, list(shape), [*strides, 1], [1, KEYS.value, columns], bytes_layout(columns))

    def arguments(
        self, tensors: DecodeTensors, scratch: Scratch, out: torch.Tensor, lse: torch.Tensor | None, scale: float
    ) -> tuple[object, ...]:
        """Those of a call, by ``GIVEN``."""
        read: tuple[object, ...] = (tensors.c_kv, tensors.k_rope)
        described: tuple[object, ...] = _NO_CACHE
        if not self.gathers:
            described = (self._made(0, tensors.c_kv.data_ptr()), self._made(1, tensors.k_rope.data_ptr()))
            read = _NO_CACHE
        queries = (tensors.q_nope_abs, tensors.q_rope)
        keys = (tensors.kv_scale, tensors.page_table, tensors.seqlens_kv)
        return (*scratch, out, lse, *queries, *read, *keys, *described, scale)


def attend_launch(
    tensors: DecodeTensors,
    parts: int,
    page_size: int,
    options: dict[str, int | None],
    *,
    overhead: int,
    is_planned: bool,
) -> Launch:
    """The launch of the kernel; the arguments of each call are ``GIVEN``.

    Args:
        page_size: 0: contiguous.
        options: of ``options_of``.
        overhead: of a sequence, in tiles, as for ``plan_kernel``.
        is_planned: another kernel has written the plan.
    """
    q_nope_abs, q_rope = tensors.q_nope_abs, tensors.q_rope
    batch, seqlen_q, heads, _ = q_nope_abs.shape
    fixed: dict[str, object] = {"batch": batch, "num_heads": heads, "seqlen_q": seqlen_q}
    fixed |= {"capacity": tensors.capacity, "num_parts": parts, "overhead": overhead}
    fixed |= named_strides("q", "bsh", q_nope_abs.stride()[:3]) | named_strides("r", "bsh", q_rope.stride()[:3])
    fixed |= {"stride_pt": 0 if tensors.page_table is None else tensors.page_table.stride(0)}
    gathers = _gathers(tensors)
    for letter, x in (("c", tensors.c_kv), ("k", tensors.k_rope)):
        units = [stride // UNIT.value for stride in strides_of(x)]
        fixed |= named_strides(letter, "bn", units if gathers else (0, 0))
    fixed |= {"PAGE_SIZE": page_size, "ROWS": rule.tile_rows(seqlen_q * heads)}
    fixed |= {"CAUSAL": tensors.causal and seqlen_q > 1, "DEPENDENT": bool(options.get("launch_pdl"))}
    fixed |= {"REGISTERS": _GATHERING_REGISTERS if gathers else LOADING_REGISTERS, "PLANNED": is_planned}
    return Launch(transposed_decode_kernel, (parts, 1, 1), GIVEN, fixed, {**options, "maxnreg": _REGISTERS})
