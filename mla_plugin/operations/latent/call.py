"""A latent attention call, and the interface of the modules that compute one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.latent import LatentSizes, LatentTensors, check_latent_tensors
from mla_plugin.arguments.options import CallOptions
from mla_plugin.hooks.attention import AttentionOutput
from mla_plugin.operations.latent.compute import Decision, Wants


class Call(NamedTuple):
    """One call.

    Attributes:
        tensors: of the call.
        options: the other arguments, with defaults filled in.
        backend: use this backend and no other.
        more: further arguments of the passes, in the order in which their operator declares them.
    """

    tensors: LatentTensors
    options: CallOptions
    backend: str | None
    more: tuple[Any, ...] = ()

    @property
    def kind(self) -> tuple[Any, ...]:
        """The key of calls that share a decision."""
        return self.tensors.kind, self.options, self.backend, self.more

    @property
    def sizes(self) -> LatentSizes:
        """The sizes of a checked call."""
        return LatentSizes.of(self.tensors, self.options.qkv_format)

    def check(self) -> AttentionTensors:
        """Validate the tensors without expanding K and V.

        Returns:
            q, and stand-ins for K and V, with their shapes, that take no memory.

        Raises:
            ValueError, TypeError: an argument is invalid; the message says what was given and what is expected.
        """
        tensors = self.tensors
        check_latent_tensors(tensors, self.options.qkv_format, self.options.attn_mask_type)
        sizes = self.sizes
        layout = sizes.layout
        batch = 0 if layout.batch is None else tensors.c_kv.shape[layout.batch]
        shape = layout.shape(batch, sizes.num_heads, tensors.c_kv.shape[sizes.tokens_axis], 1)
        number = tensors.q.new_empty(())
        k, v = (number.expand(*shape[:-1], width) for width in (sizes.head_dim_qk, sizes.head_dim_v))
        return AttentionTensors(tensors.q, k, v, tensors.softmax_scale, **tensors.lengths)


class Gradients(NamedTuple):
    """The results of a backward, with the inputs' shapes and dtypes; None for gradients that are not needed."""

    dq: torch.Tensor
    dc_kv: torch.Tensor | None
    dk_rope: torch.Tensor | None
    dw_uk: torch.Tensor | None
    dw_uv: torch.Tensor | None


class Forward(NamedTuple):
    """The results of a forward.

    Attributes:
        output: out and lse.
        kept: tensors saved for the backward in place of q, out and lse; empty if those are saved.
        decision: for the backward.
    """

    output: AttentionOutput
    kept: list[torch.Tensor]
    decision: Decision


class Passes(Protocol):
    """A module that computes calls of one kind."""

    def check(self, call: Call) -> None:
        """Raise the errors of ``forward`` that depend on shapes and options only, for tracing."""

    def forward(self, call: Call) -> Forward:
        """Check, decide and compute.

        Raises:
            ValueError, TypeError: an argument is invalid; the message says what was given and what is expected.
            NoBackendError: no backend takes the expanded call.
        """

    def backward(
        self,
        call: Call,
        decision: Decision | None,
        saved: Sequence[torch.Tensor],
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        wants: Wants,
    ) -> Gradients:
        """The gradients.

        Args:
            call: of the forward; if that kept tensors, only the shape of q is valid.
            decision: of the forward; None if it was lost.
            saved: what the forward kept, or q, out and lse.
            dout, dlse: of out's and lse's shape.
            wants: which gradients are needed.
        """

    def kept_shapes(self, call: Call) -> list[tuple[int, ...]]:
        """Shapes of the tensors that the forward keeps: in q's dtype, the last one in lse's."""
