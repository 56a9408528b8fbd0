"""Launches the Hopper decode kernel. rule.py says which calls it takes, ``takes`` adds the strides of the cache."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_plugin.arguments.cache_format import FP8, FP8_DS_MLA, PLAIN
from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.arguments.decode_layout import starts_aligned
from mla_plugin.kernels.decode.descriptors import can_read, strides_of
from mla_plugin.kernels.decode.device import Device
from mla_plugin.kernels.decode.hopper import rule
from mla_plugin.kernels.decode.hopper.gathering import UNIT
from mla_plugin.kernels.decode.hopper.kernel import hopper_decode_kernel
from mla_plugin.kernels.decode.hopper.query_rows import query_rows
from mla_plugin.kernels.decode.workspace import Scratch
from mla_plugin.kernels.descriptors import Address
from mla_plugin.kernels.hopper.common import PANEL, block_layout, tile_layout
from mla_plugin.kernels.hopper.latent import KEYS
from mla_plugin.kernels.hopper.tickets import LOADING_REGISTERS
from mla_plugin.kernels.launch import Launch, named_strides

GIVEN = (
    *("Parts", "Plan", "Out", "Lse", "C_kv", "K_rope", "KV_scale", "page_table", "seqlens_kv", "leftpad_kv"),
    *("desc_q", "desc_r", "desc_c", "desc_k", "softmax_scale"),
)
_GATHERING_REGISTERS = {PLAIN: 56, FP8: 88, FP8_DS_MLA: 88}
"""For copies and for conversions. With 72 over fp8 each load is waited for at once: 845 us in place of 634 (H200)."""
_DTYPES = {torch.bfloat16: triton.language.bfloat16, torch.float16: triton.language.float16}
_NO_CACHE = (None, None)
_MAX_DESCRIPTORS = 1024  # of one layout: four for each layer of a model, whose queries may lie at several addresses


def registers_of(kv_cache_format: str, *, gathers: bool) -> int:
    """Of each thread of the warp, or the warpgroup, that loads; the computing warpgroups have the rest."""
    return _GATHERING_REGISTERS[kv_cache_format] if gathers else LOADING_REGISTERS


def _must_gather(tensors: DecodeTensors) -> bool:
    return rule.must_gather(tensors.kv_cache_format, None if tensors.page_table is None else tensors.c_kv.shape[1])


def _gathers(tensors: DecodeTensors) -> bool:
    """Also a cache that sequences share: no descriptor is made for a stride of 0. Only batch-invariant calls do so."""
    return _must_gather(tensors) or not (can_read(tensors.c_kv) and can_read(tensors.k_rope))


def has_aligned_rows(tensors: DecodeTensors) -> bool:
    """Whether the rows of the cache start on 16 bytes."""
    caches = (tensors.c_kv, tensors.k_rope)
    return starts_aligned(*caches) and all(
        stride * x.element_size() % 16 == 0 for x in caches for stride in strides_of(x)
    )


def facts_of(tensors: DecodeTensors) -> dict[str, Any]:
    """Arguments that the rules of all kernels have, but for ``batch_invariant``, which tensors do not tell."""
    _, seqlen_q, heads, rank = tensors.q_nope_abs.shape
    return {
        "dtype": tensors.q_nope_abs.dtype,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": tensors.q_rope.shape[-1],
        "rows": seqlen_q * heads,
        "page_size": None if tensors.page_table is None else tensors.c_kv.shape[1],
        "kv_cache_format": tensors.kv_cache_format,
        "has_leftpad_kv": tensors.leftpad_kv is not None,
        "has_aligned_rows": has_aligned_rows(tensors),
    }


def takes_cache(tensors: DecodeTensors, device: Device, *, batch_invariant: bool = False) -> bool:
    """Whether the kernel computes calls with such a cache, dtype and widths, and, if not ``batch_invariant``, rows."""
    reason = rule.plain_kernel_because(**facts_of(tensors), batch_invariant=batch_invariant)
    return device.has_gluon and reason is None and tensors.c_kv.numel() > 0


def takes(tensors: DecodeTensors, device: Device, can_describe: bool) -> bool:
    """Whether the kernel computes a call.

    Args:
        can_describe: descriptors can read its cache (``can_use_descriptors``).
    """
    return takes_cache(tensors, device) and (can_describe or _must_gather(tensors))


class Descriptors:
    """The descriptors of calls of one layout that the kernel computes, by the addresses of their tensors.

    Attributes:
        gathers, query_block, copies_queries: see ``Described``.
    """

    def __init__(self, tensors: DecodeTensors) -> None:
        self.gathers = _gathers(tensors)
        self._dtype = tensors.q_nope_abs.dtype
        rows, self.copies_queries = query_rows(tensors)
        self.query_block = rows.block
        of_queries, of_cache = (1, *rows.block, PANEL.value), (1, KEYS.value, PANEL.value)
        read = [(rows.q_nope_abs, of_queries), (rows.q_rope, of_queries)]
        if not self.gathers:
            read += [(tensors.c_kv, of_cache), (tensors.k_rope, of_cache)]
        self._shapes = [(tuple(x.shape), strides_of(x), block) for x, block in read]
        self._made = functools.lru_cache(_MAX_DESCRIPTORS)(self._make)

    def _make(self, which: int, address: int) -> TensorDescriptor:
        shape, strides, block = self._shapes[which]
        memory: Any = Address(address, self._dtype)
        layout_of = tile_layout if len(block) == 4 else block_layout
        return TensorDescriptor(memory, list(shape), [*strides, 1], list(block), layout_of(_DTYPES[self._dtype]))

    def arguments(
        self, tensors: DecodeTensors, scratch: Scratch, out: torch.Tensor, lse: torch.Tensor | None, scale: float
    ) -> tuple[object, ...]:
        """Those of a call, by ``GIVEN``: descriptors of q_nope_abs, q_rope, and the cache, or what is gathered."""
        given = (tensors.q_nope_abs, tensors.q_rope, tensors.c_kv, tensors.k_rope)
        made = [self._made(which, x.data_ptr()) for which, x in enumerate(given[: len(self._shapes)])]
        cache = (tensors.c_kv, tensors.k_rope, tensors.kv_scale) if self.gathers else (None, None, None)
        keys = (tensors.page_table, tensors.seqlens_kv, tensors.leftpad_kv)
        return (*scratch, out, lse, *cache, *keys, *made, *(_NO_CACHE if self.gathers else ()), scale)


def attend_launch(
    tensors: DecodeTensors,
    programs: int,
    parts: int,
    page_size: int,
    options: dict[str, int | None],
    *,
    overhead: int = 0,
    slots: int = 0,
    chunk: int = 0,
    is_planned: bool,
) -> Launch:
    """The launch of the kernel; the arguments of each call are ``GIVEN``.

    Args:
        programs: row tiles x ``parts``.
        page_size: 0: contiguous.
        options: of ``options_of``.
        overhead: of a sequence, in tiles, as for ``plan_kernel``.
        slots, chunk: of the batch-invariant kernels; a ``chunk`` of 0 is another call's.
        is_planned: another kernel has written the plan.
    """
    batch, seqlen_q, heads, rank = tensors.q_nope_abs.shape
    fixed: dict[str, object] = {"batch": batch, "num_heads": heads, "seqlen_q": seqlen_q}
    fixed |= {"capacity": tensors.capacity, "num_parts": parts, "overhead": overhead, "slots": slots}
    fixed |= {"stride_pt": 0 if tensors.page_table is None else tensors.page_table.stride(0)}
    for letter, cache in (("c", tensors.c_kv), ("k", tensors.k_rope)):
        units = [stride * cache.element_size() // UNIT.value for stride in strides_of(cache)]
        fixed |= named_strides(letter, "bn", units if _gathers(tensors) else (0, 0))
    fixed |= {"R": rank, "PAGE_SIZE": page_size, "CAUSAL": tensors.causal and seqlen_q > 1}
    fixed |= {"DEPENDENT": bool(options.get("launch_pdl")), "FORMAT": tensors.kv_cache_format}
    fixed |= {"REGISTERS": registers_of(tensors.kv_cache_format, gathers=_gathers(tensors)), "CHUNK": chunk}
    fixed |= {"PLANNED": is_planned}
    return Launch(hopper_decode_kernel, (programs, 1, 1), GIVEN, fixed, options)
