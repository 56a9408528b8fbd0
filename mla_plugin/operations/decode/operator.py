"""Runs a decode call on its backend, eagerly or through the torch.library operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mla_plugin import environment
from mla_plugin.arguments import decode_checks
from mla_plugin.arguments.decode import OPERATOR_FIELDS, DecodeTensors
from mla_plugin.arguments.decode_layout import DecodeCall, Known, known_of
from mla_plugin.arguments.layout import lse_dtype
from mla_plugin.arguments.schema import schema_of
from mla_plugin.arguments.transforms import loop_under_vmap, refuse_derivatives
from mla_plugin.hooks.decode import DecodeOutput, DecodePlan, DecodeRequest
from mla_plugin.hooks.manager import get_manager
from mla_plugin.resolver.decode import resolve_decode

_library = torch.library.Library("mla_plugin", "FRAGMENT")
_MORE = {"host": str, "backend": str | None, "batch_invariant": bool}
_library.define(f"decode{schema_of(OPERATOR_FIELDS | _MORE)} -> (Tensor out, Tensor lse)")


def _decide(
    tensors: DecodeTensors, host: str, backend: str | None, batch_invariant: bool
) -> tuple[DecodePlan, Callable[..., Any]]:
    request = DecodeRequest.of(tensors, host=host, batch_invariant=batch_invariant)
    plan = resolve_decode(request, backend=backend)
    return plan, get_manager().caller("forward", plan.forward_backend)


def _empty_output(tensors: DecodeTensors) -> DecodeOutput:
    """The result without queries or without cache rows: no query sees a key."""
    q = tensors.q_nope_abs
    lse = q.new_full(tensors.lse_shape, -torch.inf, dtype=lse_dtype(q.dtype))
    return DecodeOutput(q.new_zeros(q.shape), lse)


def _check_output(output: object, tensors: DecodeTensors, backend: str) -> DecodeOutput:
    if type(output) is not DecodeOutput:
        raise TypeError(f"forward of the backend {backend!r} returned {type(output).__name__}, not DecodeOutput")
    q = tensors.q_nope_abs
    is_right = _fits(output.out, q.shape, q.dtype, q.device)
    if is_right and not tensors.return_lse:
        return output
    wide = lse_dtype(q.dtype)
    if is_right and _fits(output.lse, tensors.lse_shape, wide, q.device):
        return output
    raise RuntimeError(
        f"the backend {backend!r} returned out as {_described(output.out)} and lse as {_described(output.lse)}; "
        f"expected {tuple(q.shape)} {q.dtype} and {tensors.lse_shape} {wide} on {q.device}. "
        f"MLA_PLUGIN_BLOCK={backend} excludes it"
    )


def _fits(x: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    return isinstance(x, torch.Tensor) and x.shape == shape and x.dtype == dtype and x.device == device


def _described(x: object) -> str:
    return f"{tuple(x.shape)} {x.dtype} on {x.device}" if isinstance(x, torch.Tensor) else type(x).__name__


def run(
    tensors: DecodeTensors, known: Known, host: str, backend: str | None, batch_invariant: bool = False
) -> DecodeOutput:
    """Resolve and compute; a call with a cached layout goes directly to its backend."""
    if known.has_strided_queries:  # copies the queries, which are small, never the cache
        contiguous = {name: getattr(tensors, name).contiguous() for name in ("q_nope_abs", "q_rope")}
        tensors = tensors._replace(**contiguous)
        known = known_of(tensors)
    profile = None if tensors.lengths is None else tensors.lengths.profile
    key = (host, backend, batch_invariant, profile, environment.gates(), get_manager().generation)
    decision = known.decisions.get(key)
    if decision is None:
        decision = known.decisions[key] = _decide(tensors, host, backend, batch_invariant)
    plan, forward = decision
    decode_checks.check_values(tensors)
    if known.is_empty:
        return _empty_output(tensors)
    return _check_output(forward(plan=plan, tensors=tensors), tensors, plan.forward_backend)


def run_traced(
    tensors: DecodeTensors, host: str, backend: str | None, batch_invariant: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``run`` through the operator, only for tracing: it takes as much host time as a launch."""
    arguments = {name: getattr(tensors, name) for name in OPERATOR_FIELDS}
    out, lse = decode_operator(**arguments, host=host, backend=backend, batch_invariant=batch_invariant)
    return out, lse


def _call_of(arguments: tuple[Any, ...]) -> DecodeCall:
    """The operator's arguments, except those of ``_MORE``, as tensors of a call."""
    return DecodeCall(**dict(zip(OPERATOR_FIELDS, arguments, strict=True)))


def _no_lse(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(0, dtype=lse_dtype(q.dtype))


def _operator(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """``run`` as an operator; without return_lse lse is an empty tensor."""
    call = _call_of(arguments[: -len(_MORE)])
    out, lse = run(call, known_of(call), *arguments[-len(_MORE) :])
    out = out.contiguous()
    return out, lse.contiguous() if call.return_lse and lse is not None else _no_lse(out)


def _fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = _call_of(arguments[: -len(_MORE)])
    decode_checks.check_tensors(call)
    q = call.q_nope_abs
    lse = q.new_empty(call.lse_shape, dtype=lse_dtype(q.dtype)) if call.return_lse else _no_lse(q)
    return q.new_empty(q.shape), lse


_library.impl("decode", _operator, "CompositeExplicitAutograd")
torch.library.register_fake("mla_plugin::decode", _fake, lib=_library)
refuse_derivatives(_library, "decode", decode_checks.NO_DERIVATIVE)
loop_under_vmap(_library, "decode")

decode_operator = torch.ops.mla_plugin.decode.default
