"""Dense calls of the FlashAttention backends, without padding: the first call of a kind finds out what all need.

The library's function, with everything but q, k and v given to it, is kept for all calls of the kind
(``AttentionTensors.kept``). A later call only checks that its tensors start at a multiple of 16 bytes.

A library that takes packed sequences only gets the rows of a dense batch concatenated, another takes dense tensors with
their lengths. Offsets and lengths are tensors, so the function is kept for the default stream, whose later work sees
them written, and not while a CUDA graph is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.layout import has_addressable_strides, start_aligned
from mla_plugin.hooks.attention import AttentionOutput
from mla_plugin.plugins.shared.packed import Rows

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]
"""Of q, k and v, [B, S, H, D] or concatenated [B * S, H, D]: out, lse, and whatever else the library returns."""


def kept_forward(backend: str, tensors: AttentionTensors) -> Callable[[AttentionTensors], AttentionOutput] | None:
    """The forward that ``keep_forward`` kept, if these tensors can be read where they are."""
    kept = tensors.kept
    forward = None if kept is None else kept.get(backend)
    return forward if forward is not None and start_aligned(tensors.q, tensors.k, tensors.v) else None


def kept_forward_on_stream(
    backend: str, tensors: AttentionTensors
) -> Callable[[AttentionTensors], AttentionOutput] | None:
    """``kept_forward`` for a function that holds tensors."""
    key = key_of_stream(backend, tensors.q)
    kept = tensors.kept
    forward = None if kept is None or key is None else kept.get(key)
    return forward if forward is not None and start_aligned(tensors.q, tensors.k, tensors.v) else None


def keep_forward(
    backend: str, tensors: AttentionTensors, rows: Rows, make: Callable[[], Run], *, has_lengths: bool = False
) -> None:
    """Keep what ``make`` makes for calls of this kind, if they are dense and their strides need no copy.

    Args:
        backend: which keeps it.
        tensors: of the call.
        rows: of the call.
        make: gives the library's function of q, k and v as ``rows`` describes them.
        has_lengths: that function holds a tensor of lengths.
    """
    kept, request = tensors.kept, rows.request
    if kept is None or request.layout.is_packed or request.has_padding:
        return
    if not has_addressable_strides(tensors.q, tensors.k, tensors.v):
        return
    if rows.q is None and not has_lengths:
        kept[backend] = _forward(make(), rows)
    elif (key := key_of_stream(backend, tensors.q)) is not None:
        kept[key] = _forward(make(), rows) if rows.q is None else _concatenated_forward(make(), rows, tensors)


def key_of_stream(backend: str, x: torch.Tensor) -> str | None:
    """The key under which tensors are kept for later calls on the default stream, which sees them written.

    None on other streams, and while a CUDA graph is captured, which must own what it reads: see ``packed.row_lengths``.
    """
    if x.is_cuda and (torch._C._cuda_getCurrentRawStream(x.device.index) or torch._C._cuda_isCurrentStreamCapturing()):
        return None
    return f"{backend}'s tensors"


def _forward(run: Run, rows: Rows) -> Callable[[AttentionTensors], AttentionOutput]:
    layout = rows.request.layout
    if rows.request.qkv_format == "bshd" and rows.request.every_query_sees_a_key:  # the results are the library's own

        def forward_as_it_is(tensors: AttentionTensors) -> AttentionOutput:
            out, lse, *_ = run(tensors.q, tensors.k, tensors.v)
            return AttentionOutput(out, lse)

        return forward_as_it_is

    def forward(tensors: AttentionTensors) -> AttentionOutput:
        found = run(layout.to_bshd(tensors.q), layout.to_bshd(tensors.k), layout.to_bshd(tensors.v))
        return AttentionOutput(layout.from_bshd(found[0]), rows.lse(found[1]))

    return forward


def _concatenated_forward(
    run: Run, rows: Rows, tensors: AttentionTensors
) -> Callable[[AttentionTensors], AttentionOutput]:
    concatenate_q, concatenate_k, concatenate_v = (_concatenation(rows, x) for x in (tensors.q, tensors.k, tensors.v))
    request, layout = rows.request, rows.request.layout
    shape = (request.batch_size, request.max_seqlen_q, request.num_heads, request.head_dim_v)

    def forward(tensors: AttentionTensors) -> AttentionOutput:
        found = run(concatenate_q(tensors.q), concatenate_k(tensors.k), concatenate_v(tensors.v))
        return AttentionOutput(layout.from_bshd(found[0].view(shape)), rows.lse(found[1]))

    return forward


def _concatenation(rows: Rows, x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """``rows.of_tensor`` for tensors with the shape and strides of x.

    Where the concatenated rows are a view, ``view`` takes half the time of ``flatten``, which has to find that out.
    """
    merged = rows.of_tensor(x)
    if rows.request.qkv_format != "bshd" or merged.data_ptr() != x.data_ptr():
        return rows.of_tensor
    shape = merged.shape
    return lambda x: x.view(shape)
