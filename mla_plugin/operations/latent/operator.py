"""The torch.library operators of latent attention, for torch.compile, profilers and dispatch modes, and its gradient.

There is one pair, forward and backward, for each implementation: on one device here, over the ranks of a group in
``context_parallel``. Their schemas are generated from the fields of ``LatentTensors`` and ``CallOptions``, the
backend's name and further arguments of the implementation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

import torch

from mla_plugin.arguments.attention import LENGTHS
from mla_plugin.arguments.latent import DIFFERENTIABLE, LatentTensors
from mla_plugin.arguments.layout import lse_dtype
from mla_plugin.arguments.options import CallOptions
from mla_plugin.arguments.schema import schema_of
from mla_plugin.arguments.transforms import is_batched, is_batched_by_autograd, loop_under_vmap
from mla_plugin.operations.attention.run import is_observed
from mla_plugin.operations.decisions import Decisions
from mla_plugin.operations.edges import edge_to
from mla_plugin.operations.latent import plain
from mla_plugin.operations.latent.call import Call, Forward, Gradients, Passes
from mla_plugin.operations.latent.compute import Decision, Wants

_HINTS = get_type_hints(LatentTensors)
_TENSORS = {field.name: _HINTS[field.name] for field in fields(LatentTensors)}
_OPTIONS = get_type_hints(CallOptions)
_GIVEN: dict[str, Any] = {"dout": torch.Tensor, "dlse": torch.Tensor | None, "saved": list[torch.Tensor]}
_GIVEN |= {"wants_latents": bool, "wants_weights": bool}
"""The backward's arguments before those of the forward."""

_library = torch.library.Library("mla_plugin", "FRAGMENT")


class Operator:
    """The two operators of one implementation, and how to call them.

    Args:
        name: of the operators, ``<name>_forward`` and ``<name>_backward``.
        passes: the implementation.
        more: names and types of its further arguments.
    """

    def __init__(self, name: str, passes: Passes, more: Mapping[str, Any]) -> None:
        self.passes = passes
        self.decisions = Decisions[Decision]()
        declared = {**_TENSORS, **_OPTIONS, "backend": str | None, **more}
        gradients = ", ".join(f"Tensor {name}" for name in Gradients._fields)
        forward, backward = f"{name}_forward", f"{name}_backward"
        _library.define(f"{forward}{schema_of(declared)} -> (Tensor out, Tensor lse, Tensor[] kept)")
        _library.define(f"{backward}{schema_of(_GIVEN | declared)} -> ({gradients})")
        _library.impl(forward, self._forward, "CompositeExplicitAutograd")
        _library.impl(forward, self._autograd_forward, "Autograd")
        _library.impl(backward, self._backward, "CompositeExplicitAutograd")
        torch.library.register_fake(f"mla_plugin::{forward}", self._forward_fake, lib=_library)
        torch.library.register_fake(f"mla_plugin::{backward}", self._backward_fake, lib=_library)
        torch.library.register_autograd(f"mla_plugin::{backward}", _no_second_derivative, lib=_library)
        loop_under_vmap(_library, forward)
        loop_under_vmap(_library, backward)
        self.forward_operator = getattr(torch.ops.mla_plugin, forward).default
        self.backward_operator = getattr(torch.ops.mla_plugin, backward).default

    def run(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse, differentiable; through the operator only if the call ``is_observed``."""
        if is_observed(*call.tensors.differentiable):
            out, lse, _ = self.forward_operator(*arguments_of(call))
            return out, lse
        if call.options.is_training:
            return _LatentAttention.apply(self, call, False, _edge(call), *call.tensors.differentiable)  # type: ignore[no-any-return, no-untyped-call]
        with torch.no_grad():
            output = self.compute(call).output
        return output.out, output.lse

    def compute(self, call: Call) -> Forward:
        """The forward, without autograd and autocast."""
        with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            return self.passes.forward(call)

    def differentiate(
        self,
        call: Call,
        decision: Decision | None,
        saved: list[torch.Tensor],
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        wants: Wants,
    ) -> Gradients:
        """The backward, without autograd and autocast."""
        with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            return self.passes.backward(call, decision, saved, dout, dlse, wants)

    def _forward(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        call = call_of(args)
        found = self.compute(call)
        if call.options.is_training:
            self.decisions.keep(call.kind, found.kept[-1] if found.kept else found.output.lse, found.decision)
        return found.output.out, found.output.lse, found.kept

    def _backward(
        self,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        saved: list[torch.Tensor],
        wants_latents: bool,
        wants_weights: bool,
        *args: Any,
    ) -> tuple[torch.Tensor, ...]:
        call = call_of(args)
        decision = self.decisions.find(call.kind, saved[-1])
        found = self.differentiate(call, decision, saved, dout, dlse, Wants(wants_latents, wants_weights))
        return tuple(dout.new_empty(0) if x is None else x for x in found)

    def _forward_fake(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        call = call_of(args)
        self.passes.check(call)
        q, sizes = call.tensors.q, call.sizes
        wide = lse_dtype(q.dtype)
        shapes = self.passes.kept_shapes(call) if call.options.is_training else []
        kept = [q.new_empty(shape, dtype=wide if shape is shapes[-1] else q.dtype) for shape in shapes]
        lse = q.new_empty(sizes.layout.lse_shape(q.shape), dtype=wide)
        return q.new_empty((*q.shape[:-1], sizes.head_dim_v)), lse, kept

    def _backward_fake(
        self,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        saved: list[torch.Tensor],
        wants_latents: bool,
        wants_weights: bool,
        *args: Any,
    ) -> tuple[torch.Tensor, ...]:
        wanted = (True, wants_latents, wants_latents, wants_weights, wants_weights)
        given = call_of(args).tensors.differentiable
        return tuple(x.new_empty(x.shape if wants else 0) for x, wants in zip(given, wanted, strict=True))

    def _autograd_forward(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        call = call_of(args)
        if call.tensors.needs_gradient or torch.autograd.forward_ad._current_level >= 0:
            if torch._C._are_functorch_transforms_active():
                raise NotImplementedError(
                    "latent_attention does not support torch.func's grad, vjp, jvp and functions built on them; use "
                    "torch.autograd.grad or backward()"
                )
            differentiable = call.tensors.differentiable
            return *_LatentAttention.apply(self, call, True, _edge(call), *differentiable), []  # type: ignore[no-untyped-call]
        with torch._C._AutoDispatchBelowAutograd():
            return self.forward_operator(*args)  # type: ignore[no-any-return]


def _edge(call: Call) -> torch.Tensor | None:
    """An ``edge_to`` q if the implementation may save something else in its place: those with further arguments."""
    return edge_to(call.tensors.q) if call.more else None


def call_of(arguments: tuple[Any, ...]) -> Call:
    """The call that an operator's arguments make."""
    tensors, rest = arguments[: len(_TENSORS)], arguments[len(_TENSORS) :]
    options = CallOptions(*rest[: len(_OPTIONS)])
    if options.window_size is not None:  # the dispatcher makes a list of it
        options = options._replace(window_size=tuple(options.window_size))  # type: ignore[arg-type]
    backend, *more = rest[len(_OPTIONS) :]
    return Call(LatentTensors(*tensors), options, backend, tuple(more))


def arguments_of(call: Call) -> tuple[Any, ...]:
    """The operator's arguments that a call makes."""
    return (*(getattr(call.tensors, name) for name in _TENSORS), *call.options, call.backend, *call.more)


class _LatentAttention(torch.autograd.Function):
    """The autograd function of a call, eager or inside the operator.

    K and V are not saved. Saved are q, out and lse (or what the implementation saves instead), latents and weights.
    """

    @staticmethod
    def forward(
        ctx: Any,
        operator: Operator,
        call: Call,
        is_operator: bool,
        edge: torch.Tensor | None,
        *differentiable: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        decision = None
        if is_operator:
            with torch._C._AutoDispatchBelowAutograd():
                out, lse, kept = operator.forward_operator(*arguments_of(call))
        else:
            (out, lse), kept, decision = _flat(operator.compute(call))
        tensors = call.tensors
        saved = kept or [tensors.q, out, lse]
        ctx.save_for_backward(*differentiable[1:], *tensors.lengths.values(), edge, *saved)
        ctx.call = (operator, decision, call.options, call.backend, call.more)
        ctx.of_queries = (tensors.softmax_scale, tensors.q.shape, out.shape)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        operator, decision, options, backend, more = ctx.call
        softmax_scale, q_shape, out_shape = ctx.of_queries
        names = (*DIFFERENTIABLE[1:], *LENGTHS)
        everything = ctx.saved_tensors  # read only once: activation checkpointing recomputes it each time
        given, edge, saved = everything[: len(names)], everything[len(names)], list(everything[len(names) + 1 :])
        q = saved[0]
        if q.shape != q_shape:
            number = q.new_empty(())
            q = (number if edge is None else number + edge.sum()).expand(q_shape)
        tensors = LatentTensors(q, softmax_scale=softmax_scale, **dict(zip(names, given, strict=True)))
        call = Call(tensors, options, backend, more)
        needed = ctx.needs_input_grad[4:]
        wants = Wants(needed[1] or needed[2], needed[3] or needed[4])
        if dout is None:  # only one output may have a gradient; other ranks may wait for messages even without one
            dout = q.new_zeros(out_shape)
        if is_batched_by_autograd(dout, dlse):
            raise NotImplementedError(
                "latent_attention's backward does not support is_grads_batched=True nor vectorize=True; call "
                "torch.autograd.grad once for each gradient"
            )
        if decision is None or torch.is_grad_enabled() or is_batched(dout, dlse):
            # the operator raises when a second derivative is taken, and runs once for each gradient under vmap
            if decision is not None:
                operator.decisions.keep(call.kind, saved[-1], decision)
            found = operator.backward_operator(dout, dlse, saved, *wants, *arguments_of(call))
        else:
            found = operator.differentiate(call, decision, saved, dout, dlse, wants)
        return None, None, None, None, *(x if is_needed else None for x, is_needed in zip(found, needed, strict=True))

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        raise NotImplementedError(
            "latent_attention has no forward-mode derivative (jvp); use reverse mode: torch.autograd.grad or backward()"
        )


def _flat(found: Forward) -> tuple[tuple[torch.Tensor, torch.Tensor], list[torch.Tensor], Decision]:
    return (found.output.out, found.output.lse), found.kept, found.decision


def _no_second_derivative(ctx: Any, *grads: torch.Tensor | None) -> None:
    raise NotImplementedError(
        "latent_attention has no second derivative here; for create_graph=True use an attention of plain PyTorch "
        "operations"
    )


latent_attention = Operator("latent_attention", plain, {})
