"""FlashAttention 2, which has one head dimension: the narrower of (Q, K) and V is zero-padded and results are trimmed.

Zero columns of Q and K add nothing to a score; zero columns of V only produce columns of out that are trimmed. The
scale stays that of the original head_dim_qk. Each pass copies once what it pads (192/128: V, and in the backward out
and dout); benchmarks/flash_padding.py measures that. Only this plugin pads, and FlashAttention 2 only gets padded
tensors. Rows outside the sequences may hold anything: both passes clear their tiles there.

The backward has no input for the gradient of the log-sum-exp. One of the added columns carries it: with V = 1, out = 0
and dout = dlse there, dlse is added to dout @ V.T, delta = rowsum(dout * out) is unchanged, so P * dlse is added to dS.

Sources of the refusals: TransformerEngine's rules 15 and 21, and PyTorch's ``flash_api.cpp`` and ``sdp_utils.cpp``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.layout import aligned
from mla_plugin.hooks import hookimpl
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, Gradients, Plan, Residuals
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.types import Accepted, Platform, Refused
from mla_plugin.plugins.fa2 import providers
from mla_plugin.plugins.shared.dense import Run, keep_forward, kept_forward
from mla_plugin.plugins.shared.flash_family import Options
from mla_plugin.plugins.shared.packed import Rows
from mla_plugin.plugins.shared.refusals import NO_DECODE, beyond_flash_attention, beyond_packed_sequences, off_cuda

MAX_HEAD_DIM = 256
MAX_HEAD_DIM_EVERYWHERE = 192
WIDE_CAPABILITIES = ((8, 0), (9, 0), (10, 0), (12, 0))
SMALL_SHARED_MEMORY = (12, 0)
MOST_ZEROS = 1 << 22
"""Zeros that are kept, 8 MiB. Up to so many, zero columns are concatenated, which takes one launch instead of two and,
on an H200, half of the device's time: 13 us for V of 2^23 elements. Above, two copies write the columns.

``python -m benchmarks.flash_padding --ways`` measures every way, host and device, over sizes.
"""


def _width(request: AttentionRequest, carries_dlse: bool) -> int:
    """The head dimension that the kernel sees, a multiple of 8 if the larger of the two is one."""
    width = max(request.head_dim_qk, request.head_dim_v + carries_dlse)
    return width if width == request.head_dim_qk else -(-width // 8) * 8


def _platform_refusals(request: AttentionRequest, platform: Platform) -> Iterator[str]:
    capability = platform.compute_capability
    off_device = tuple(off_cuda(request.device_type, platform.device_type))
    yield from off_device
    if off_device:
        return
    if platform.cuda_version is None:
        yield "cuda_version=None: this PyTorch is not a CUDA build"
    if capability is None or capability < (8, 0):
        yield f"compute_capability={capability} < (8, 0)"
    provider = providers.find(platform)
    if request.deterministic and request.is_training and not provider.is_deterministic:
        yield (
            f"deterministic=True in training: {provider.name} does not promise it, {providers.DISTRIBUTION} from "
            f"{providers.FIRST_VERSION} below {providers.BELOW_VERSION} does"
        )


def _head_dim_refusals(request: AttentionRequest, platform: Platform) -> Iterator[str]:
    found = f"head_dim_qk={request.head_dim_qk}, head_dim_v={request.head_dim_v}"
    if max(request.head_dim_qk, request.head_dim_v) % 8:
        yield f"{found}, expected a multiple of 8 as the larger one"
        return
    carries_dlse = request.is_training and request.return_lse
    width, capability = _width(request, carries_dlse), platform.compute_capability
    found += f" padded to {width}" + (" to carry the gradient of lse" if carries_dlse else "")
    if width > MAX_HEAD_DIM:
        yield f"{found} > {MAX_HEAD_DIM}"
    elif width > MAX_HEAD_DIM_EVERYWHERE and capability not in WIDE_CAPABILITIES:
        yield f"{found} > {MAX_HEAD_DIM_EVERYWHERE} on compute_capability={capability}"
    elif (
        width > MAX_HEAD_DIM_EVERYWHERE
        and request.is_training
        and capability == SMALL_SHARED_MEMORY
        and isinstance(providers.find(platform), providers.PyTorch)
    ):
        yield f"{found} > {MAX_HEAD_DIM_EVERYWHERE} in training on compute_capability={capability} [PyTorch]"


def _size_refusals(request: AttentionRequest) -> Iterator[str]:
    """The dense backward sums dq in a float32 tensor, rows rounded up to 128, whose 32-bit offsets can overflow.

    Seen on an H200 with PyTorch 2.11: an illegal memory access. The forward and packed sequences are right there.
    """
    if not request.is_training or request.layout.is_packed:
        return
    rows = -(-request.max_seqlen_q // 128) * 128
    elements = request.batch_size * rows * request.num_heads * _width(request, request.return_lse)
    if elements >= 2**31:
        yield (
            f"batch_size={request.batch_size}, max_seqlen_q={request.max_seqlen_q}, num_heads={request.num_heads} in "
            f"training: its dense backward addresses {elements} elements with 32 bits, expected fewer than 2**31"
        )


def _window_refusals(request: AttentionRequest) -> Iterator[str]:
    """With more queries than keys, the kernel's right window side may differ from the caller's.

    It drops a side of max_seqlen_kv or more; then it uses max_seqlen_kv as the right side if a left one remains.
    """
    left, right, longest_kv = request.band.left, request.band.right, request.max_seqlen_kv
    unlimited = request.max_seqlen_q - 1  # the first query sees the last key
    wanted = unlimited if right < 0 else min(right, unlimited)
    dropped = longest_kv if 0 <= left < longest_kv else unlimited
    found = right if 0 <= right < longest_kv else dropped
    if min(found, unlimited) != wanted:
        yield (
            f"window_size={request.window_size} with max_seqlen_q={request.max_seqlen_q} > "
            f"max_seqlen_kv={longest_kv}: the kernel ends the window {found} keys right of the diagonal, not {wanted}"
        )


def refusals(request: AttentionRequest, platform: Platform) -> Iterator[str]:
    """Every reason why this backend cannot compute the request."""
    yield from _platform_refusals(request, platform)
    yield from _head_dim_refusals(request, platform)
    yield from beyond_flash_attention(request)
    yield from beyond_packed_sequences(request)
    yield from _size_refusals(request)
    yield from _window_refusals(request)


@hookimpl
def select_backend(request: AttentionRequest | DecodeRequest, platform: Platform) -> Accepted | Refused:
    """Take dense and packed sequences from compute capability 8.0 on, V padded."""
    if isinstance(request, DecodeRequest):
        return NO_DECODE
    reasons = tuple(refusals(request, platform))
    if reasons:
        return Refused(reasons)
    notes = [providers.find(platform).name]
    for name in ("head_dim_qk", "head_dim_v"):
        width = _width(request, request.is_training and request.return_lse)
        if getattr(request, name) < width:
            notes.append(f"{name} padded from {getattr(request, name)} to {width}")
    return Accepted(notes=tuple(notes))


def _widened(x: torch.Tensor, width: int) -> torch.Tensor:
    """x zero-padded to the width; x itself if it has that width and is aligned."""
    columns = x.shape[-1]
    if columns == width:
        return aligned(x)
    if x.numel() // columns * (width - columns) <= MOST_ZEROS:
        return _concatenated(x, width - columns)
    wide = x.new_empty((*x.shape[:-1], width))
    wide[..., :columns] = x
    wide[..., columns:] = 0
    return wide


def _concatenated(x: torch.Tensor, columns: int) -> torch.Tensor:
    """x with so many columns of zeros, by one launch; ``constant_pad_nd`` takes two, as making the zeros anew would.

    So they are kept, on the default stream as ``packed.row_lengths``. One zero expanded would do, but is read four
    times as slowly.
    """
    is_kept = x.is_cuda and not torch._C._cuda_getCurrentRawStream(x.device.index)
    if not is_kept or torch.cuda.is_current_stream_capturing():
        return torch.constant_pad_nd(x, (0, columns))
    return torch.cat((x, _zeros((*x.shape[:-1], columns), x.dtype, x.device)), -1)


@functools.lru_cache(maxsize=256)
def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return _kept_zeros(dtype, device)[: math.prod(shape)].view(shape)


@functools.lru_cache(maxsize=16)
def _kept_zeros(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(MOST_ZEROS, dtype=dtype, device=device)


def _options(request: AttentionRequest, softmax_scale: float, rows: Rows) -> Options:
    options = Options.of(request, softmax_scale, rows)
    # With grouped heads and max_seqlen_q = 1 the packed kernel takes T for B; the length only sizes its grid.
    return options if rows.q is None else options._replace(max_seqlen_q=max(2, options.max_seqlen_q))


@hookimpl
def forward(plan: Plan, tensors: AttentionTensors) -> AttentionOutput:
    """Attention over the padded head dimension."""
    known = kept_forward("fa2", tensors)
    if known is not None:
        return known(tensors)
    request, width = plan.request, _width(plan.request, carries_dlse=False)
    rows = Rows.of(request, tensors)
    options = _options(request, tensors.softmax_scale, rows)
    run = _padded(providers.find(plan.platform).forward_with(options), request)
    keep_forward("fa2", tensors, rows, lambda: run)
    q, k, v = [rows.of_tensor(x) for x in (tensors.q, tensors.k, tensors.v)]
    found = run(*[aligned(x) if x.shape[-1] == width else x for x in (q, k, v)])
    return AttentionOutput(rows.queries(found[0]), rows.lse(found[1]))


def _padded(run: Run, request: AttentionRequest) -> Run:
    """``run``, of one head dimension, for the request's two; tensors of the wider one are aligned."""
    width, dim_qk, dim_v = _width(request, carries_dlse=False), request.head_dim_qk, request.head_dim_v
    if dim_qk == dim_v == width:
        return run
    # out is to be contiguous in the end: at once, unless its axes are permuted before
    trimmed = torch.narrow_copy if request.layout.is_packed or request.layout.heads == 2 else torch.narrow

    def padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if dim_qk < width:
            q, k = _widened(q, width), _widened(k, width)
        if dim_v == width:
            found = run(q, k, v)
            return found[0], found[1]
        found = run(q, k, _widened(v, width))
        return trimmed(found[0], -1, 0, dim_v), found[1]

    return padded


@hookimpl
def backward(plan: Plan, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
    """Gradients of q, k and v."""
    request, tensors, dim_v = plan.request, residuals.tensors, plan.request.head_dim_v
    width = _width(request, carries_dlse=dlse is not None)
    rows = Rows.of(request, tensors)
    inputs = (dout, tensors.q, tensors.k, tensors.v, residuals.out)
    dout, q, k, v, out = [_widened(rows.of_tensor(x), width) for x in inputs]
    if dlse is not None:  # the width is more than dim_v, so v and dout are fresh tensors
        v[..., dim_v] = 1
        # where no key is seen it may be infinite, and a weight of 0 times that is NaN
        dout[..., dim_v] = dlse.masked_fill(residuals.lse.isneginf(), 0.0).transpose(-1, -2)
    options = _options(request, tensors.softmax_scale, rows)
    dq, dk, dv = providers.find(plan.platform).backward(dout, q, k, v, out, rows.of_lse(residuals.lse), options)
    dim_qk = request.head_dim_qk
    if width > dim_qk:
        dq, dk = dq[..., :dim_qk], dk[..., :dim_qk]
    dv = dv[..., :dim_v] if width > dim_v else dv
    return Gradients(rows.queries(dq), rows.keys(dk), rows.keys(dv))
