"""The torch.library operators of context parallelism; they take the group's name, so torch.compile sees plain values.

``mla_plugin::context_parallel_forward`` and ``..._backward`` take what ``attention_forward`` takes, the name of the
group and ``cp_comm_type``. The tensors that the forward saves for the backward are
a list, whose contents depend on ``cp_comm_type``.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.checks import records_gradients
from mla_plugin.arguments.layout import LAYOUTS, lse_dtype
from mla_plugin.arguments.options import CallOptions
from mla_plugin.arguments.schema import schema_of
from mla_plugin.context_parallel import run
from mla_plugin.context_parallel.checks import checked_request
from mla_plugin.context_parallel.group import Group
from mla_plugin.operations.attention import operator as plain
from mla_plugin.operations.edges import edge_to

_HINTS = get_type_hints(AttentionTensors)
_NAMES = tuple(field.name for field in fields(AttentionTensors))
_DECLARED = {
    **{name: _HINTS[name] for name in _NAMES},
    **get_type_hints(CallOptions),
    "backend": str | None,
    "cp_group": str,
    "cp_comm_type": str,
}
_GIVEN = {"dout": torch.Tensor, "dlse": torch.Tensor | None, "saved": list[torch.Tensor]}
"""The backward's arguments before those of the forward; of q, k and v only the shapes are used."""

_library = torch.library.Library("mla_plugin", "FRAGMENT")
_library.define(f"context_parallel_forward{schema_of(_DECLARED)} -> (Tensor out, Tensor lse, Tensor[] kept)")
_library.define(f"context_parallel_backward{schema_of(_GIVEN | _DECLARED)} -> (Tensor dq, Tensor dk, Tensor dv)")


def _split(arguments: tuple[Any, ...]) -> tuple[plain.Call, Group, str]:
    """Split an operator's arguments into the call, the group and ``cp_comm_type``."""
    return plain.Call.of(arguments[:-2]), Group.named(arguments[-2]), arguments[-1]


def _forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    (tensors, options, backend), group, cp_comm_type = _split(args)
    return run.forward(tensors, options, backend, group, cp_comm_type)


def _backward(
    dout: torch.Tensor, dlse: torch.Tensor | None, saved: list[torch.Tensor], *args: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (tensors, options, backend), group, cp_comm_type = _split(args)
    return run.backward(tensors, options, backend, group, cp_comm_type, saved, dout, dlse)


def _forward_fake(*args: Any) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    (tensors, options, _), group, cp_comm_type = _split(args)
    checked_request(tensors, options, group.size, cp_comm_type)  # so that a wrong argument is an error while tracing
    q, k, v = tensors.q, tensors.k, tensors.v
    layout, dtype = LAYOUTS[options.qkv_format], lse_dtype(q.dtype)
    out_shape = (*q.shape[:-1], v.shape[-1])
    kept = []
    if cp_comm_type == "a2a" and options.is_training and q.numel() and k.numel():
        shapes = [_by_heads(shape, options.qkv_format, group.size) for shape in (q.shape, k.shape, v.shape, out_shape)]
        kept = [q.new_empty(shape) for shape in shapes]
        kept.append(q.new_empty(layout.lse_shape(shapes[0]), dtype=dtype))
    return q.new_empty(out_shape), q.new_empty(layout.lse_shape(q.shape), dtype=dtype), kept


def _by_heads(shape: Any, qkv_format: str, size: int) -> tuple[int, ...]:
    """The shape with all tokens and a share of the heads."""
    layout, sizes = LAYOUTS[qkv_format], list(shape)
    sizes[layout.heads] //= size
    sizes[layout.tokens] *= size
    return tuple(sizes)


def _backward_fake(
    dout: torch.Tensor, dlse: torch.Tensor | None, saved: list[torch.Tensor], *args: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tensors = plain.Call.of(args[:-2]).tensors
    q, k, v = (dout.new_empty(x.shape) for x in (tensors.q, tensors.k, tensors.v))
    return q, k, v


class _Attention(torch.autograd.Function):
    """The autograd function of ``context_parallel_forward``; ``cp_comm_type`` decides what is saved."""

    @staticmethod
    def forward(ctx: Any, edge: torch.Tensor | None, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse, kept = context_parallel_forward(*args)
        given = dict(zip(_DECLARED, args, strict=True))
        lengths = {name: x for name, x in given.items() if name in _NAMES[4:] and isinstance(x, torch.Tensor)}
        ctx.lengths, ctx.shapes = tuple(lengths), tuple(given[name].shape for name in "qkv")
        ctx.values = {name: x for name, x in given.items() if name not in lengths and name not in ("q", "k", "v")}
        saved = kept or [*args[:3], out, lse]
        ctx.save_for_backward(*saved, edge, *lengths.values())
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        tensors = ctx.saved_tensors  # read only once: activation checkpointing recomputes it each time
        saved, edge, lengths = list(tensors[:5]), tensors[5], dict(zip(ctx.lengths, tensors[6:], strict=True))
        q_shape, _, v_shape = ctx.shapes
        if dout is None:  # the other ranks wait for messages even without a gradient
            dout = saved[0].new_zeros((*q_shape[:-1], v_shape[-1]))
        number = saved[0].new_empty(())
        if torch.is_grad_enabled():  # create_graph=True: the operator raises when the second derivative is taken
            number = number.requires_grad_() if edge is None else number + edge.sum()
        stands = [number.expand(shape) for shape in ctx.shapes]
        given = dict(zip("qkv", stands, strict=True)) | ctx.values | lengths
        gradients = context_parallel_backward(dout, dlse, saved, *(given[name] for name in _DECLARED))
        return (None, *gradients, *(None,) * (len(_DECLARED) - 3))

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        raise NotImplementedError(
            "attention has no forward-mode derivative (jvp); use reverse mode: torch.autograd.grad or backward()"
        )


def _edge(*args: Any) -> torch.Tensor | None:
    """An ``edge_to`` q, k and v if other tensors are saved in their place."""
    return edge_to(*args[:3]) if args[-1] == "a2a" else None


def _autograd_forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    has_gradient = records_gradients() and any(x.requires_grad for x in args[:3])
    if has_gradient or torch.autograd.forward_ad._current_level >= 0:
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                "attention does not support torch.func's grad, vjp, jvp and functions built on them; use "
                "torch.autograd.grad or backward()"
            )
        return *_Attention.apply(_edge(*args), *args), []  # type: ignore[no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        return context_parallel_forward(*args)  # type: ignore[no-any-return]


def _no_second_derivative(ctx: Any, *grads: torch.Tensor | None) -> None:
    raise NotImplementedError(
        "attention has no second derivative here; for create_graph=True use an attention of plain PyTorch operations"
    )


_library.impl("context_parallel_forward", _forward, "CompositeExplicitAutograd")
_library.impl("context_parallel_forward", _autograd_forward, "Autograd")
_library.impl("context_parallel_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("mla_plugin::context_parallel_forward", _forward_fake, lib=_library)
torch.library.register_fake("mla_plugin::context_parallel_backward", _backward_fake, lib=_library)
torch.library.register_autograd("mla_plugin::context_parallel_backward", _no_second_derivative, lib=_library)

context_parallel_forward = torch.ops.mla_plugin.context_parallel_forward.default
context_parallel_backward = torch.ops.mla_plugin.context_parallel_backward.default
