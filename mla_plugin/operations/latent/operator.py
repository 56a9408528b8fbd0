"""The operators that torch.compile, profilers and dispatch modes see of a latent attention call, and their gradient."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple, get_type_hints

import torch

from mla_plugin.arguments.attention import LENGTHS, AttentionTensors
from mla_plugin.arguments.latent import DIFFERENTIABLE, LatentSizes, LatentTensors, check_latent_tensors
from mla_plugin.arguments.layout import lse_dtype
from mla_plugin.arguments.options import CallOptions
from mla_plugin.arguments.schema import schema_of
from mla_plugin.hooks.attention import AttentionOutput, request_of
from mla_plugin.operations.decisions import Decisions
from mla_plugin.operations.latent import plain
from mla_plugin.operations.latent.compute import Decision

_HINTS = get_type_hints(LatentTensors)
_TENSORS = {field.name: _HINTS[field.name] for field in fields(LatentTensors)}
_DECLARED = {**_TENSORS, **get_type_hints(CallOptions), "backend": str | None}
_GIVEN: dict[str, Any] = {"dout": torch.Tensor, "dlse": torch.Tensor | None, "out": torch.Tensor, "lse": torch.Tensor}
_GIVEN |= {"wants_latents": bool, "wants_weights": bool}
"""What a backward gets before the forward's arguments."""

_library = torch.library.Library("mla_plugin", "FRAGMENT")
_library.define(f"latent_attention_forward{schema_of(_DECLARED)} -> (Tensor out, Tensor lse)")
_library.define(
    f"latent_attention_backward{schema_of(_GIVEN | _DECLARED)} "
    "-> (Tensor dq, Tensor dc_kv, Tensor dk_rope, Tensor dw_uk, Tensor dw_uv)"
)


class Call(NamedTuple):
    """An operator's arguments, by name; the options are complete."""

    tensors: LatentTensors
    options: CallOptions
    backend: str | None

    @classmethod
    def of(cls, arguments: tuple[Any, ...]) -> Call:
        """From the arguments in the schema's order."""
        options = CallOptions(*arguments[len(_TENSORS) : -1])
        if options.window_size is not None:  # the dispatcher makes a list of it
            options = options._replace(window_size=tuple(options.window_size))  # type: ignore[arg-type]
        return cls(LatentTensors(*arguments[: len(_TENSORS)]), options, arguments[-1])

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments in the schema's order."""
        return (*(getattr(self.tensors, name) for name in _TENSORS), *self.options, self.backend)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What calls with one decision have in common."""
        return self.tensors.kind, self.options, self.backend

    def decide(self) -> Decision:
        """Check the call and say which backends compute it."""
        check_call(self.tensors, self.options)
        return plain.decide(*self)

    def forward(self, decision: Decision) -> AttentionOutput:
        """out and lse, with a decision about this call."""
        with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            return plain.forward(self.tensors, self.options, decision)

    def backward(
        self,
        decision: Decision,
        output: AttentionOutput,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        wants_latents: bool,
        wants_weights: bool,
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradients in the order of ``DIFFERENTIABLE``; None where none is wanted."""
        wants = {"wants_latents": wants_latents, "wants_weights": wants_weights}
        with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            return plain.backward(self.tensors, self.options, decision, output, dout, dlse, **wants)


_kept = Decisions[Decision]()


def _forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = Call.of(args)
    decision = call.decide()
    output = call.forward(decision)
    if call.options.is_training:
        _kept.keep(call.kind, output.lse, decision)
    return output.out, output.lse


def _backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    wants_latents: bool,
    wants_weights: bool,
    *args: Any,
) -> tuple[torch.Tensor, ...]:
    call = Call.of(args)
    decision = _kept.find(call.kind, lse) or call.decide()
    found = call.backward(decision, AttentionOutput(out, lse), dout, dlse, wants_latents, wants_weights)
    return tuple(out.new_empty(0) if x is None else x for x in found)


def _forward_fake(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tensors, options, _ = Call.of(args)
    check_call(tensors, options)
    q, sizes = tensors.q, LatentSizes.of(tensors, options.qkv_format)
    lse = q.new_empty(sizes.layout.lse_shape(q.shape), dtype=lse_dtype(q.dtype))
    return q.new_empty((*q.shape[:-1], sizes.head_dim_v)), lse


def check_call(tensors: LatentTensors, options: CallOptions) -> None:
    """A wrong argument is an error, before K and V are there and while a call is traced too."""
    check_latent_tensors(tensors, options.qkv_format, options.attn_mask_type)
    q, sizes = tensors.q, LatentSizes.of(tensors, options.qkv_format)
    batch = 0 if sizes.layout.batch is None else tensors.c_kv.shape[sizes.layout.batch]
    shape = sizes.layout.shape(batch, sizes.num_heads, tensors.c_kv.shape[sizes.tokens_axis], 1)
    k, v = (q.new_empty(()).expand(*shape[:-1], width) for width in (sizes.head_dim_qk, sizes.head_dim_v))
    request_of(AttentionTensors(q, k, v, tensors.softmax_scale, **tensors.lengths), options)


def _backward_fake(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    wants_latents: bool,
    wants_weights: bool,
    *args: Any,
) -> tuple[torch.Tensor, ...]:
    wanted = (True, wants_latents, wants_latents, wants_weights, wants_weights)
    given = Call.of(args).tensors.differentiable
    return tuple(x.new_empty(x.shape) if wants else out.new_empty(0) for x, wants in zip(given, wanted, strict=True))


class LatentAttention(torch.autograd.Function):
    """The gradient of a call, eager or behind the operator.

    It keeps q, the latents, the weights, out and lse, and neither K nor V.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Call, decision: Decision | None, *differentiable: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """With a decision the call is computed here, without one behind the operator."""
        if decision is None:
            with torch._C._AutoDispatchBelowAutograd():
                out, lse = latent_attention_forward(*call.arguments)
        else:
            output = call.forward(decision)
            out, lse = output.out, output.lse
        tensors = call.tensors
        ctx.save_for_backward(out, lse, *differentiable, *tensors.lengths.values())
        ctx.said = (tensors.softmax_scale, call.options, call.backend, decision)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The gradients of what ``forward`` was given."""
        if dout is None and dlse is None:
            return (None,) * (2 + len(DIFFERENTIABLE))
        softmax_scale, options, backend, decision = ctx.said
        out, lse, *saved = ctx.saved_tensors
        names = (*DIFFERENTIABLE, *LENGTHS)
        tensors = LatentTensors(softmax_scale=softmax_scale, **dict(zip(names, saved, strict=True)))
        call = Call(tensors, options, backend)
        needed = ctx.needs_input_grad[2:]
        wants_latents, wants_weights = needed[1] or needed[2], needed[3] or needed[4]
        dout = torch.zeros_like(out) if dout is None else dout
        if decision is None or torch.is_grad_enabled():  # the operator says no when a second derivative is taken
            if decision is not None:
                _kept.keep(call.kind, lse, decision)
            arguments = (dout, dlse, out, lse, wants_latents, wants_weights, *call.arguments)
            found = latent_attention_backward(*arguments)
        else:
            found = call.backward(decision, AttentionOutput(out, lse), dout, dlse, wants_latents, wants_weights)
        return None, None, *(x if is_needed else None for x, is_needed in zip(found, needed, strict=True))

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """There is none."""
        raise NotImplementedError(
            "latent_attention has no forward-mode derivative (jvp); use reverse mode: torch.autograd.grad or backward()"
        )


def _autograd_forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = Call.of(args)
    if call.tensors.needs_gradient or torch.autograd.forward_ad._current_level >= 0:
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                "torch.func's grad, vjp, jvp and what is made of them do not go through latent_attention; use "
                "torch.autograd.grad or backward()"
            )
        return LatentAttention.apply(call, None, *call.tensors.differentiable)  # type: ignore[no-any-return, no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        return latent_attention_forward(*args)  # type: ignore[no-any-return]


def _no_second_derivative(ctx: Any, *grads: torch.Tensor | None) -> None:
    raise NotImplementedError(
        "latent_attention has no second derivative here; for create_graph=True use an attention of plain PyTorch "
        "operations"
    )


_library.impl("latent_attention_forward", _forward, "CompositeExplicitAutograd")
_library.impl("latent_attention_forward", _autograd_forward, "Autograd")
_library.impl("latent_attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("mla_plugin::latent_attention_forward", _forward_fake, lib=_library)
torch.library.register_fake("mla_plugin::latent_attention_backward", _backward_fake, lib=_library)
torch.library.register_autograd("mla_plugin::latent_attention_backward", _no_second_derivative, lib=_library)

latent_attention_forward = torch.ops.mla_plugin.latent_attention_forward.default
latent_attention_backward = torch.ops.mla_plugin.latent_attention_backward.default
