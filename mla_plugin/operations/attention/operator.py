"""The torch.library operators of attention, for torch.compile, profilers and dispatch modes.

``mla_plugin::attention_forward`` and ``mla_plugin::attention_backward`` take tensors and plain values. Their schemas
are generated from the fields of ``AttentionTensors`` and ``CallOptions``, and the backend's name.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple, get_type_hints

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.checks import records_gradients
from mla_plugin.arguments.layout import LAYOUTS, lse_dtype
from mla_plugin.arguments.options import CallOptions
from mla_plugin.arguments.schema import schema_of
from mla_plugin.arguments.transforms import loop_under_vmap
from mla_plugin.hooks.attention import Residuals, kind_of, request_of
from mla_plugin.operations.attention import compute
from mla_plugin.operations.attention.known import Known, known_of
from mla_plugin.operations.decisions import Decisions

_HINTS = get_type_hints(AttentionTensors)
_TENSORS = {field.name: _HINTS[field.name] for field in fields(AttentionTensors)}
_DECLARED = {**_TENSORS, **get_type_hints(CallOptions), "backend": str | None}
_NAMES, _TENSOR_FIELDS = tuple(_DECLARED), len(_TENSORS)
_GIVEN = {"dout": torch.Tensor, "dlse": torch.Tensor | None, "out": torch.Tensor, "lse": torch.Tensor}
"""The backward's arguments before those of the forward."""

_library = torch.library.Library("mla_plugin", "DEF")
_library.define(f"attention_forward{schema_of(_DECLARED)} -> (Tensor out, Tensor lse)")
_library.define(f"attention_backward{schema_of(_GIVEN | _DECLARED)} -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)")


class Call(NamedTuple):
    """An operator's arguments, by name."""

    tensors: AttentionTensors
    options: CallOptions
    backend: str | None

    @classmethod
    def of(cls, arguments: tuple[Any, ...]) -> Call:
        """From the arguments in the schema's order."""
        options = CallOptions(*arguments[_TENSOR_FIELDS:-1])
        if options.window_size is not None:  # the dispatcher makes a list of it
            options = options._replace(window_size=tuple(options.window_size))  # type: ignore[arg-type]
        return cls(AttentionTensors(*arguments[:_TENSOR_FIELDS]), options, arguments[-1])

    def in_order(self) -> tuple[Any, ...]:
        """The arguments in the schema's order; no property, which PyTorch 2.10 does not trace on a tuple."""
        return (*(getattr(self.tensors, name) for name in _NAMES[:_TENSOR_FIELDS]), *self.options, self.backend)


_kept = Decisions[Known]()


def keep(call: Call, lse: torch.Tensor, known: Known) -> None:
    """Remember the decision for the backward of this call."""
    _kept.keep(_kind(call), lse, known)


def _kept_for(call: Call, lse: torch.Tensor) -> Known:
    return _kept.find(_kind(call), lse) or known_of(*call)


def _kind(call: Call) -> tuple[Any, ...]:
    return (kind_of(call.tensors), call.options, call.backend)


def _forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = Call.of(args)
    known = known_of(*call)
    tensors = compute.with_contiguous_rows(call.tensors)
    vars(tensors)["kept"] = known.kept
    output = compute.forward(known, tensors)
    if known.request.is_training:
        keep(call, output.lse, known)
    return output.out, output.lse


def _backward(
    dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, ...]:
    call = Call.of(args)
    residuals = Residuals(compute.with_contiguous_rows(call.tensors), out, lse)
    dq, dk, dv, dbias = compute.backward(_kept_for(call, lse), residuals, dout, dlse)
    return dq, dk, dv, out.new_empty(0) if dbias is None else dbias


def _forward_fake(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = Call.of(args)
    request_of(call.tensors, call.options)  # so that a wrong argument is an error while tracing
    q, v = call.tensors.q, call.tensors.v
    lse_shape = LAYOUTS[call.options.qkv_format].lse_shape(q.shape)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(lse_shape, dtype=lse_dtype(q.dtype))


def _backward_fake(
    dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, ...]:
    call = Call.of(args)
    q, k, v = call.tensors.q, call.tensors.k, call.tensors.v
    bias = call.tensors.bias if call.options.bias_requires_grad else None
    dbias = out.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dbias


class _Attention(torch.autograd.Function):
    """The gradient of ``attention_forward``.

    It is registered as a kernel of the autograd key and not through ``torch.library.register_autograd``, which walks
    the schema at every call: that costs 0.25 ms, and silently drops forward-mode tangents.
    """

    @staticmethod
    def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            return attention_forward(*args)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        is_tensor = [x is None or isinstance(x, torch.Tensor) for x in inputs[:_TENSOR_FIELDS]]
        ctx.values = [None if saved else x for saved, x in zip(is_tensor, inputs, strict=False)]
        ctx.values += inputs[_TENSOR_FIELDS:]
        ctx.saved_names = [name for name, saved in zip(_NAMES, is_tensor, strict=False) if saved]
        ctx.save_for_backward(*output, *(x for x, saved in zip(inputs, is_tensor, strict=False) if saved))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * len(_NAMES)
        out, lse, *saved = ctx.saved_tensors
        arguments = dict(zip(_NAMES, ctx.values, strict=True)) | dict(zip(ctx.saved_names, saved, strict=True))
        dout = torch.zeros_like(out) if dout is None else dout
        gradients = attention_backward(dout, dlse, out, lse, *arguments.values())
        given = dict(zip(("q", "k", "v", "bias"), gradients, strict=True))
        if not arguments["bias_requires_grad"]:
            del given["bias"]
        return tuple(given.get(name) for name in _NAMES)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        raise NotImplementedError(
            "attention has no forward-mode derivative (jvp); use reverse mode: torch.autograd.grad or backward()"
        )


def _autograd_forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = [x for x in args[:_TENSOR_FIELDS] if isinstance(x, torch.Tensor)]
    has_gradient = records_gradients() and any(x.requires_grad for x in tensors)
    if has_gradient or torch.autograd.forward_ad._current_level >= 0:
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                "attention does not support torch.func's grad, vjp, jvp and functions built on them; use "
                "torch.autograd.grad or backward()"
            )
        return _Attention.apply(*args)  # type: ignore[no-any-return, no-untyped-call]
    return _Attention.forward(*args)


def _no_second_derivative(ctx: Any, *grads: torch.Tensor | None) -> None:
    raise NotImplementedError(
        "attention has no second derivative here; for create_graph=True use an attention of plain PyTorch operations"
    )


_library.impl("attention_forward", _forward, "CompositeExplicitAutograd")
_library.impl("attention_forward", _autograd_forward, "Autograd")
_library.impl("attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("mla_plugin::attention_forward", _forward_fake, lib=_library)
torch.library.register_fake("mla_plugin::attention_backward", _backward_fake, lib=_library)
torch.library.register_autograd("mla_plugin::attention_backward", _no_second_derivative, lib=_library)
for _name in ("attention_forward", "attention_backward"):
    loop_under_vmap(_library, _name)

attention_forward = torch.ops.mla_plugin.attention_forward.default
attention_backward = torch.ops.mla_plugin.attention_backward.default
