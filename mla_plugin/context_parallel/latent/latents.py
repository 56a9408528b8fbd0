"""The latents of all ranks, and their gradients back to the ranks that own them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mla_plugin.arguments.latent import LatentSizes, LatentTensors
from mla_plugin.arguments.layout import LAYOUTS, Layout
from mla_plugin.context_parallel.group import Group
from mla_plugin.context_parallel.order import by_rank, in_order, order_of
from mla_plugin.context_parallel.transport import exchange, gather
from mla_plugin.operations.latent import rows


@dataclass(frozen=True)
class Latents:
    """Gathers c_kv and k_rope over the ranks, and scatters their gradients.

    Attributes:
        group: the ranks.
        tensors: of this rank; offsets are those of whole sequences.
        sizes: of the call.
    """

    group: Group
    tensors: LatentTensors
    sizes: LatentSizes

    @property
    def leading(self) -> tuple[int, ...]:
        """The leading dimensions of the latents of all ranks."""
        shape = list(self.tensors.c_kv.shape[:-1])
        shape[self.sizes.tokens_axis] *= self.group.size
        return tuple(shape)

    def gather(self) -> torch.Tensor:
        """[c_kv, k_rope] of whole sequences, [..., R + Dr]; padding is 0."""
        own = rows.join(self.tensors)
        whole = in_order(gather(self.group, own), self._layout, self._order())
        return rows.clear_padding(whole, self.tensors, self.sizes)

    def scatter(self, dx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """dc_kv and dk_rope of this rank's tokens, summed over all ranks in the dtype of dx.

        Args:
            dx: float32 (float64), the shape of ``gather``'s result: this rank's contribution for all tokens.
        """
        order = self._order()
        inverse = None if order is None else order.argsort()
        parts = exchange(self.group, by_rank(dx, self._layout, self.group.size, inverse))
        return rows.split(parts.sum(0).flatten(0, -2), self.tensors)

    @property
    def _layout(self) -> Layout:
        """The layout of latents, which have no heads."""
        return LAYOUTS["bshd"] if self.sizes.layout.name == "bhsd" else self.sizes.layout

    def _order(self) -> torch.Tensor | None:
        given, layout = self.tensors, self.sizes.layout
        return order_of(given.c_kv, layout, given.cu_seqlens_kv, given.cu_seqlens_kv_padded, self.group.size)
