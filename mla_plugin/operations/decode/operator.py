"""From a decode call to the backend that runs it, and the operator that torch.compile does not look behind.

A decode step on a GPU takes tens of microseconds, so a call that looks like an earlier one costs one dictionary lookup:
its key is the tensors' layout, and checks, request, decision and hook caller are kept under it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mla_plugin import environment
from mla_plugin.arguments import decode as decode_checks
from mla_plugin.arguments.layout import lse_dtype
from mla_plugin.hooks.decode import DecodeOutput, DecodePlan, DecodeRequest, DecodeTensors
from mla_plugin.hooks.manager import get_manager
from mla_plugin.resolver.decode import resolve_decode

_MAX_ENTRIES = 4096

_library = torch.library.Library("mla_plugin", "FRAGMENT")
_library.define(
    "decode(Tensor q_nope_abs, Tensor q_rope, Tensor c_kv, Tensor k_rope, float softmax_scale, bool causal, "
    "bool return_lse, Tensor? page_table, Tensor? seqlens_kv, Tensor? leftpad_kv, str host, str? backend) "
    "-> (Tensor out, Tensor lse)"
)

_Entry = tuple[DecodePlan, Callable[..., Any]]
_entries: dict[tuple[Any, ...], _Entry] = {}


def request_of(tensors: DecodeTensors, host: str = "direct") -> DecodeRequest:
    """The request that checked tensors make."""
    q, c_kv, page_table = tensors.q_nope_abs, tensors.c_kv, tensors.page_table
    batch, seqlen_q, heads, rank = q.shape
    capacity = c_kv.shape[1] * (1 if page_table is None else page_table.shape[1])
    return DecodeRequest(
        dtype=q.dtype,
        device_type=q.device.type,
        device_index=q.device.index,
        batch_size=batch,
        seqlen_q=seqlen_q,
        num_heads=heads,
        kv_lora_rank=rank,
        qk_rope_head_dim=tensors.q_rope.shape[-1],
        max_seqlen_kv=1 << (capacity - 1).bit_length() if capacity else 0,
        page_size=None if page_table is None else c_kv.shape[1],
        causal=tensors.causal,
        has_seqlens_kv=tensors.seqlens_kv is not None,
        has_host_lengths=tensors.seqlens_kv is None or tensors.lengths is not None,
        has_leftpad_kv=tensors.leftpad_kv is not None,
        has_aligned_rows=_has_aligned_rows(c_kv, tensors.k_rope),
        return_lse=tensors.return_lse,
        host=host,
    )


def _starts_aligned(c_kv: torch.Tensor, k_rope: torch.Tensor) -> bool:
    return (c_kv.data_ptr() | k_rope.data_ptr()) % 16 == 0


def _has_aligned_rows(c_kv: torch.Tensor, k_rope: torch.Tensor) -> bool:
    steps = [stride * x.element_size() for x in (c_kv, k_rope) for stride in x.stride()[:-1]]
    return _starts_aligned(c_kv, k_rope) and all(step % 16 == 0 for step in steps)


def _make_entry(tensors: DecodeTensors, host: str, backend: str | None) -> _Entry:
    decode_checks.check_tensors(tensors)
    plan = resolve_decode(request_of(tensors, host), backend=backend)
    return plan, get_manager().caller("forward", plan.forward_backend)


def _entry(tensors: DecodeTensors, host: str, backend: str | None) -> _Entry:
    q_nope_abs, q_rope, c_kv, k_rope, _, causal, return_lse, page_table, seqlens_kv, leftpad_kv, lengths = tensors
    key = (
        *(q_nope_abs.shape, q_nope_abs.dtype, q_nope_abs.device, q_rope.shape, q_rope.dtype, q_rope.device),
        *(c_kv.shape, c_kv.stride(), c_kv.dtype, c_kv.device, k_rope.shape, k_rope.stride(), k_rope.dtype),
        *(k_rope.device, _starts_aligned(c_kv, k_rope)),
        *(
            None if x is None else (x.shape, x.stride(), x.dtype, x.device)
            for x in (page_table, seqlens_kv, leftpad_kv)
        ),
        *(causal, return_lse, lengths is None, host, backend, environment.gates(), get_manager().generation),
    )
    entry = _entries.get(key)
    if entry is None:
        entry = _make_entry(tensors, host, backend)
        if len(_entries) >= _MAX_ENTRIES:  # a contiguous cache has a new shape at every token
            _entries.clear()
        _entries[key] = entry
    return entry


def _empty_output(tensors: DecodeTensors) -> DecodeOutput:
    """No query, or a cache without room: every query sees no key."""
    q = tensors.q_nope_abs
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=lse_dtype(q.dtype))
    return DecodeOutput(q.new_zeros(q.shape), lse)


def _check_output(output: object, tensors: DecodeTensors, backend: str) -> DecodeOutput:
    if type(output) is not DecodeOutput:
        raise TypeError(f"forward of the backend {backend!r} returned {type(output).__name__}, not DecodeOutput")
    q, (out, lse) = tensors.q_nope_abs, output
    wanted = (q.shape[0], q.shape[2], q.shape[1])
    if out.shape != q.shape or out.dtype != q.dtype or (tensors.return_lse and (lse is None or lse.shape != wanted)):
        given = "None" if lse is None else str(tuple(lse.shape))
        raise RuntimeError(
            f"the backend {backend!r} returned out as {tuple(out.shape)} {out.dtype} and lse as {given}; "
            f"{tuple(q.shape)} {q.dtype} and {wanted} is the contract. MLA_PLUGIN_BLOCK={backend} leaves it out"
        )
    return output


def _check_values(tensors: DecodeTensors) -> None:
    if tensors.q_nope_abs.device.type == "cpu" or (
        environment.is_value_check_requested() and not torch.cuda.is_current_stream_capturing()
    ):
        decode_checks.check_values(tensors)


def run(tensors: DecodeTensors, host: str, backend: str | None) -> DecodeOutput:
    """Check, resolve and compute; a call of a known layout goes straight to its backend."""
    q_nope_abs, q_rope = tensors.q_nope_abs, tensors.q_rope
    if q_nope_abs.stride(-1) != 1 or q_rope.stride(-1) != 1:  # the queries are small, the cache is not
        tensors = tensors._replace(q_nope_abs=q_nope_abs.contiguous(), q_rope=q_rope.contiguous())
    if not q_nope_abs.numel() or not tensors.c_kv.numel():
        decode_checks.check_tensors(tensors)
        _check_values(tensors)
        return _empty_output(tensors)
    plan, forward = _entry(tensors, host, backend)
    _check_values(tensors)
    return _check_output(forward(plan=plan, tensors=tensors), tensors, plan.forward_backend)


def _operator(
    q_nope_abs: torch.Tensor,
    q_rope: torch.Tensor,
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    return_lse: bool,
    page_table: torch.Tensor | None,
    seqlens_kv: torch.Tensor | None,
    leftpad_kv: torch.Tensor | None,
    host: str,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``run`` behind the operator; without return_lse lse is an empty tensor."""
    tensors = DecodeTensors(
        q_nope_abs, q_rope, c_kv, k_rope, softmax_scale, causal, return_lse, page_table, seqlens_kv, leftpad_kv
    )
    out, lse = run(tensors, host, backend)
    out = out.contiguous()
    return out, lse.contiguous() if return_lse and lse is not None else _no_lse(out)


def _no_lse(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(0, dtype=lse_dtype(q.dtype))


def _fake(
    q_nope_abs: torch.Tensor,
    q_rope: torch.Tensor,
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    return_lse: bool,
    page_table: torch.Tensor | None,
    seqlens_kv: torch.Tensor | None,
    leftpad_kv: torch.Tensor | None,
    host: str,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = DecodeTensors(
        q_nope_abs, q_rope, c_kv, k_rope, softmax_scale, causal, return_lse, page_table, seqlens_kv, leftpad_kv
    )
    decode_checks.check_tensors(tensors)
    batch, seqlen_q, heads, _ = q_nope_abs.shape
    out = q_nope_abs.new_empty(q_nope_abs.shape)
    if not return_lse:
        return out, _no_lse(q_nope_abs)
    return out, q_nope_abs.new_empty((batch, heads, seqlen_q), dtype=lse_dtype(q_nope_abs.dtype))


_library.impl("decode", _operator, "CompositeExplicitAutograd")
torch.library.register_fake("mla_plugin::decode", _fake, lib=_library)

decode_operator = torch.ops.mla_plugin.decode.default
