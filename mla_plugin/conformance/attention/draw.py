"""Random tensors in memory laid out as a case says, within a larger piece that holds NaN elsewhere, or alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from mla_plugin.arguments.layout import LAYOUTS, Layout

Storage = Literal[
    "contiguous",
    "transposed",
    "batch_inside",
    "sliced_heads",
    "sliced_tokens",
    "sliced_dims",
    "odd_rows",
    "offset",
    "packed",
    "expanded_heads",
    "expanded_batch",
    "expanded_tokens",
    "expanded_dims",
    "expanded",
    "strided",
]

GUARD = 64
"""Elements of NaN before and after a tensor; a multiple of 16 bytes, so that they change no alignment."""


class Draw:
    """Draws tensors on one device from one generator.

    Args:
        dtype: of the tensors, unless told otherwise.
        device: where they lie.
        generator: CPU generator; None for PyTorch's own.
        is_guarded: memory goes on before and after each tensor. Otherwise each begins where its memory does, as most
            tensors do.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        generator: torch.Generator | None,
        *,
        is_guarded: bool = True,
    ) -> None:
        self.dtype, self.device, self.generator = dtype, device, generator
        self.is_guarded, self._guard = is_guarded, GUARD if is_guarded else 0

    def normal(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Standard normal numbers, contiguous, without guards."""
        dtype = dtype or self.dtype
        drawn = torch.float64 if dtype == torch.float64 else torch.float32
        return torch.randn(tuple(shape), generator=self.generator, dtype=drawn).to(self.device, dtype)

    def uniform(self, shape: Sequence[int]) -> torch.Tensor:
        """Numbers from 0 to 1."""
        return torch.rand(tuple(shape), generator=self.generator).to(self.device)

    def mask(self, shape: Sequence[int]) -> torch.Tensor:
        """A third of the positions hidden, and of rows that differ the first, a middle one and the last entirely.

        Of others only the last keys are seen, or only the first ones, so that whole tiles of them are hidden.
        """
        mask = self.uniform(shape) < 1 / 3
        if len(shape) > 1 and shape[-2] > 1:
            mask[..., 1::7, : -(-3 * shape[-1] // 4)] = True
            mask[..., 3::7, shape[-1] // 4 :] = True
            for row in {0, shape[-2] // 2, shape[-2] - 1}:
                mask[..., row, :] = True
        return mask

    def placed(self, values: torch.Tensor, storage: Storage, layout: Layout | None = None) -> torch.Tensor:
        """The values in guarded memory that is laid out as ``storage`` says.

        Args:
            values: any tensor; where the storage is expanded, the first entry stands for all.
            storage: which memory.
            layout: of the values, for the storages that name heads, tokens or batch; None for scores.
        """
        if storage == "expanded":
            return self._like(values, ()).copy_(values.flatten()[0]).expand(values.shape)
        if storage.startswith("expanded_"):
            layout = LAYOUTS["bhsd"] if layout is None else layout  # scores are [B, H, S_q, S_kv]
            last, name = values.dim() - 1, storage.removeprefix("expanded_")
            axis = last if name == "dims" else getattr(layout, name)
            if axis is None:
                return self.placed(values, "contiguous")
            first = values.narrow(axis, 0, min(1, values.shape[axis]))
            return self._like(first, first.shape).copy_(first).expand(values.shape)
        return self._view(values, storage, layout).copy_(values)

    def all_placed(
        self, values: Sequence[torch.Tensor], storages: Sequence[Storage], layout: Layout
    ) -> list[torch.Tensor]:
        """``placed`` for each, allocated in order with guards and in reverse without, so that no order is certain."""
        order = range(len(values)) if self.is_guarded else reversed(range(len(values)))
        found = {index: self.placed(values[index], storages[index], layout) for index in order}
        return [found[index] for index in sorted(found)]

    def _view(self, values: torch.Tensor, storage: Storage, layout: Layout | None) -> torch.Tensor:
        shape, last = list(values.shape), values.dim() - 1
        tokens, heads = (last - 1, last - 2) if layout is None else (layout.tokens, layout.heads)
        if storage == "transposed":
            a, b = (last, last - 1) if layout is None else (tokens, heads)
            return self._exchanged(values, a, b)
        if storage == "batch_inside":
            batch = 0 if layout is None else layout.batch
            return self._like(values, shape) if batch is None else self._exchanged(values, batch, tokens)
        if storage in ("sliced_heads", "sliced_tokens", "strided"):
            axis = {"sliced_heads": heads, "sliced_tokens": tokens, "strided": last}[storage]
            shape[axis] *= 2
            return self._like(values, shape)[(slice(None),) * axis + (slice(None, None, 2),)]
        if storage in ("sliced_dims", "odd_rows"):
            extra = 8 if storage == "sliced_dims" else 1
            return self._like(values, (*shape[:-1], shape[-1] + extra))[..., extra:]
        return self._like(values, shape, shift=1 if storage == "offset" else 0)

    def _exchanged(self, values: torch.Tensor, a: int, b: int) -> torch.Tensor:
        """Two axes in the other order in memory."""
        shape = list(values.shape)
        shape[a], shape[b] = shape[b], shape[a]
        return self._like(values, shape).transpose(a, b)

    def _like(self, values: torch.Tensor, shape: Sequence[int], shift: int = 0) -> torch.Tensor:
        return self._guarded(shape, values.dtype, shift)

    def _guarded(self, shape: Sequence[int], dtype: torch.dtype | None = None, shift: int = 0) -> torch.Tensor:
        """Uninteresting memory: NaN, or what an integer or a bool has at its edges."""
        size, dtype = math.prod(shape), dtype or self.dtype
        fill = torch.nan if dtype.is_floating_point else True if dtype == torch.bool else torch.iinfo(dtype).max
        memory = torch.full((size + shift + 2 * self._guard,), fill, dtype=dtype, device=self.device)
        return memory[self._guard + shift :][:size].view(tuple(shape))

    def split(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The values side by side in the last dimension of one tensor."""
        widths = [x.shape[-1] for x in values]
        whole = self._like(values[0], (*values[0].shape[:-1], sum(widths)))
        views = list(torch.split_with_sizes(whole, widths, -1))
        for view, x in zip(views, values, strict=True):
            view.copy_(x)
        return views
