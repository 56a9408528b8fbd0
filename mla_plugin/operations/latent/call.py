"""A latent attention call as its passes get it, and what every kind of them offers."""

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
        options: what is said beside them, completed.
        backend: use this backend and no other.
        more: what passes of this kind need besides, in the order in which their operator declares it.
    """

    tensors: LatentTensors
    options: CallOptions
    backend: str | None
    more: tuple[Any, ...] = ()

    @property
    def kind(self) -> tuple[Any, ...]:
        """What calls with one decision have in common."""
        return self.tensors.kind, self.options, self.backend, self.more

    @property
    def sizes(self) -> LatentSizes:
        """The sizes of a checked call."""
        return LatentSizes.of(self.tensors, self.options.qkv_format)

    def check(self) -> AttentionTensors:
        """Find what is wrong with the tensors alone, without making K and V of them.

        Returns:
            q, and K and V as far as a request depends on them: their values take no memory.

        Raises:
            ValueError, TypeError: an argument is invalid; the message says what was given and what is accepted.
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
    """What a backward returns, like what they are gradients of; None where none is wanted."""

    dq: torch.Tensor
    dc_kv: torch.Tensor | None
    dk_rope: torch.Tensor | None
    dw_uk: torch.Tensor | None
    dw_uv: torch.Tensor | None


class Forward(NamedTuple):
    """What a forward returns.

    Attributes:
        output: out and lse.
        kept: what the backward gets in place of q, out and lse; empty where it gets them.
        decision: for the backward.
    """

    output: AttentionOutput
    kept: list[torch.Tensor]
    decision: Decision


class Passes(Protocol):
    """A module that computes calls of one kind."""

    def check(self, call: Call) -> None:
        """Errors as ``forward``, from what is known while a call is traced: shapes and options."""

    def forward(self, call: Call) -> Forward:
        """Check, decide and compute.

        Raises:
            ValueError, TypeError: an argument is invalid; the message says what was given and what is accepted.
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
            call: of the forward; where that kept something, q is of the right shape and nothing more.
            decision: of the forward; None where it is lost.
            saved: what the forward kept, or q, out and lse.
            dout, dlse: of out's and lse's shape.
            wants: what is needed.
        """

    def kept_shapes(self, call: Call) -> list[tuple[int, ...]]:
        """Shapes of what the forward keeps; all of q's dtype but the last, which is lse's."""
