"""Dense calls of the FlashAttention backends, without padding: the first call of a kind finds out what all need.

The library's function, with everything but q, k and v given to it, is kept for all calls of the kind
(``AttentionTensors.kept``). A later call only asks whether its tensors start on 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.layout import has_addressable_strides, start_aligned
from mla_plugin.hooks.attention import AttentionOutput
from mla_plugin.plugins.shared.packed import Rows

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]
"""Of q, k and v [B, S, H, D]: out, lse [B, H, S_q], and whatever else the library returns."""


def kept_forward(backend: str, tensors: AttentionTensors) -> Callable[[AttentionTensors], AttentionOutput] | None:
    """The forward that ``keep_forward`` kept, if these tensors can be read where they are."""
    kept = tensors.kept
    forward = None if kept is None else kept.get(backend)
    return forward if forward is not None and start_aligned(tensors.q, tensors.k, tensors.v) else None


def keep_forward(backend: str, tensors: AttentionTensors, rows: Rows, make: Callable[[], Run]) -> None:
    """Keep what ``make`` makes for calls of this kind, if they are dense and their strides need no copy."""
    kept = tensors.kept
    if kept is None or rows.q is not None or not has_addressable_strides(tensors.q, tensors.k, tensors.v):
        return
    run, layout = make(), rows.request.layout

    def forward(tensors: AttentionTensors) -> AttentionOutput:
        found = run(layout.to_bshd(tensors.q), layout.to_bshd(tensors.k), layout.to_bshd(tensors.v))
        return AttentionOutput(layout.from_bshd(found[0]), rows.lse(found[1]))

    kept[backend] = forward
