"""FlashAttention 4 on Hopper and Blackwell: 192/128 natively, dense and packed.

Found by the version of the distribution ``flash-attn-4``: FlashAttention 2 ships an old ``flash_attn/cute`` of its own.
The kernels compile at their first call.

TransformerEngine selects FlashAttention 4 where it then fails (docs/te_selection.md); those requests are refused here.
Sources: ``_validate_head_dims`` and the assertions in ``flash_attn/cute/interface.py`` and the kernels it calls, and
TransformerEngine's rules 17 to 21 and 31.

A request that trains on lse gets its backward from ``sdpa``, because only newer releases take the gradient of lse.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from math import gcd
from typing import Any

import torch
from packaging.version import Version

from mla_plugin.arguments.attention import (
    AttentionTensors,
)
from mla_plugin.device import FLASH_ATTENTION_PROVIDERS
from mla_plugin.hooks import hookimpl
from mla_plugin.hooks.attention import (
    AttentionOutput,
    AttentionRequest,
    Gradients,
    Plan,
    Residuals,
)
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.types import (
    Accepted,
    Platform,
    Refused,
)
from mla_plugin.plugins.shared.packed import Rows, addressable
from mla_plugin.plugins.shared.refusals import NO_DECODE, beyond_flash_attention, beyond_packed_sequences, off_cuda

((DISTRIBUTION, MODULE),) = FLASH_ATTENTION_PROVIDERS["fa4"]
MARK = "_validate_head_dims"
"""What its module has since the first version, and the one that flash-attn ships has not."""
FIRST_VERSION = "4.0.0b5"
NEEDS_NEW_CUTLASS, CUTLASS_MINIMUM = "4.0.0b24", "4.6.2"
BLACKWELL_DIMS = {(192, 128): FIRST_VERSION, (64, 512): "4.0.0b9", (256, 256): "4.0.0b11"}
"""Pairs that compute capability 10 and 11 take beside 8..128 each, and the first release that does."""


def _platform_refusals(request: AttentionRequest, platform: Platform) -> Iterator[str]:
    version, cutlass = platform.version(DISTRIBUTION), platform.version("nvidia-cutlass-dsl")
    if version is None:
        yield f"{DISTRIBUTION} is not installed"
    elif Version(version) < Version(FIRST_VERSION):
        yield f"{DISTRIBUTION} {version} < {FIRST_VERSION}"
    elif version == NEEDS_NEW_CUTLASS and cutlass is not None and Version(cutlass) < Version(CUTLASS_MINIMUM):
        yield f"{DISTRIBUTION} {version} with nvidia-cutlass-dsl {cutlass} < {CUTLASS_MINIMUM}"
    off_device = tuple(off_cuda(request.device_type, platform.device_type))
    yield from off_device
    if off_device:
        return
    if platform.compute_capability is None or not (9, 0) <= platform.compute_capability < (13, 0):
        yield f"compute_capability={platform.compute_capability}, accepted is (9, 0) to (12, x)"


def _head_dim_refusals(request: AttentionRequest, platform: Platform) -> Iterator[str]:
    dims = (request.head_dim_qk, request.head_dim_v)
    found = f"head_dim_qk={dims[0]}, head_dim_v={dims[1]} on compute_capability={platform.compute_capability}"
    if platform.compute_capability is None or platform.compute_capability < (9, 0):
        return
    major = platform.compute_capability[0]
    largest = 256 if major == 9 else 128
    if dims[0] % 8 or dims[1] % 8:
        yield f"{found}, accepted are multiples of 8"
    if max(dims) <= largest:
        return
    since = BLACKWELL_DIMS.get(dims) if major in (10, 11) else None
    version = platform.version(DISTRIBUTION)
    if since is None:
        pairs = "".join(f", or exactly {qk} and {v}" for qk, v in BLACKWELL_DIMS) if major in (10, 11) else ""
        yield f"{found}, accepted are at most {largest} each{pairs}"
    elif version is not None and Version(version) < Version(since):
        yield f"{found} with {DISTRIBUTION} {version} < {since}"


def _training_refusals(request: AttentionRequest, platform: Platform) -> Iterator[str]:
    dim_qk, dim_v = request.head_dim_qk, request.head_dim_v
    found, capability = f"head_dim_qk={dim_qk}, head_dim_v={dim_v}", platform.compute_capability or (0, 0)
    if capability[0] == 9 and dim_qk != dim_v and request.num_heads != request.num_kv_heads:
        yield (
            f"training with {found}, num_heads={request.num_heads}, num_kv_heads={request.num_kv_heads} on "
            f"compute_capability={capability}: the backward takes grouped heads with equal head dims only"
        )
    if capability[0] in (10, 11) and dim_v > 256:
        yield f"training with {found}, the backward takes head_dim_v up to 256"
    if capability[0] in (10, 11) and dim_qk != dim_v and dim_qk >= 128 and _stores_miss(dim_qk, dim_v):
        yield f"training with {found}: the backward stores dV in steps that miss its end"
    if request.deterministic and (capability[0] == 12 or (capability[0] != 9 and dim_qk == 256)):
        yield f"deterministic=True in training with {found} on compute_capability={capability}"


def _stores_miss(dim_qk: int, dim_v: int) -> bool:
    """Rule 20: the step is derived from dK, and half of dV must be a multiple of it."""
    half_qk, half_v = (-(-dim // 16) * 8 for dim in (dim_qk, dim_v))
    return half_v % gcd(32, half_qk) != 0


def _equal_256_refusals(request: AttentionRequest, platform: Platform) -> Iterator[str]:
    """Rules 19 and 31: a kernel of its own on compute capability 10 and 11."""
    capability = platform.compute_capability or (0, 0)
    if (request.head_dim_qk, request.head_dim_v) != (256, 256) or capability[0] not in (10, 11):
        return
    if request.max_seqlen_q != request.max_seqlen_kv or request.lengths_may_differ:
        yield (
            f"head dims 256 with max_seqlen_q={request.max_seqlen_q}, max_seqlen_kv={request.max_seqlen_kv}, "
            f"lengths_may_differ={request.lengths_may_differ}, accepted are equal lengths"
        )
    if request.has_sliding_window:
        yield f"head dims 256 with window_size={request.window_size}, accepted is (-1, -1) or (-1, 0)"


def refusals(request: AttentionRequest, platform: Platform) -> Iterator[str]:
    """Every reason why this backend cannot compute the request."""
    yield from _platform_refusals(request, platform)
    yield from _head_dim_refusals(request, platform)
    yield from _equal_256_refusals(request, platform)
    if request.is_training:
        yield from _training_refusals(request, platform)
    yield from beyond_flash_attention(request)
    yield from beyond_packed_sequences(request)


@hookimpl
def select_backend(request: AttentionRequest | DecodeRequest, platform: Platform) -> Accepted | Refused:
    """Take dense and packed sequences from compute capability 9.0 on."""
    if isinstance(request, DecodeRequest):
        return NO_DECODE
    reasons = tuple(refusals(request, platform))
    if reasons:
        return Refused(reasons)
    version = f"{DISTRIBUTION} {platform.version(DISTRIBUTION)}"
    if request.is_training and request.return_lse:
        notes = (version, "not every release takes a gradient of lse, so sdpa runs the backward")
        return Accepted(backward_by="sdpa", notes=notes)
    return Accepted(notes=(version,))


def _library() -> Any:
    """The module, if it is FlashAttention 4's and not that of flash-attn, which can overwrite it."""
    try:
        library = importlib.import_module(MODULE)
        getattr(library, MARK)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"{DISTRIBUTION} is installed, but {MODULE} is not its module ({error}): "
            f"pip install --force-reinstall --no-deps {DISTRIBUTION}, or leave it out with MLA_PLUGIN_BLOCK=fa4"
        ) from error
    return library


def _options(request: AttentionRequest, softmax_scale: float, rows: Rows) -> dict[str, Any]:
    """Keyword arguments that both passes take."""
    options = {"softmax_scale": softmax_scale, "causal": request.band.is_causal}
    if rows.q is None or rows.kv is None:
        return options
    offsets = {"cu_seqlens_q": rows.q.starts, "cu_seqlens_k": rows.kv.starts}
    return {**options, **offsets, "max_seqlen_q": request.max_seqlen_q, "max_seqlen_k": request.max_seqlen_kv}


def _window(request: AttentionRequest) -> tuple[int | None, int | None]:
    left, right = (None if size < 0 else size for size in (request.band.left, request.band.right))
    return left, right


@hookimpl
def forward(plan: Plan, tensors: AttentionTensors) -> AttentionOutput:
    """Attention by keyword: ``qv`` is the fourth positional argument of the library's functions."""
    request, library = plan.request, _library()
    rows = Rows.of(request, tensors)
    q, k, v = (addressable(rows.of_tensor(x)) for x in (tensors.q, tensors.k, tensors.v))
    function = library.flash_attn_func if rows.q is None else library.flash_attn_varlen_func
    options = _options(request, tensors.softmax_scale, rows)
    out, lse = function(q, k, v, **options, window_size=_window(request), return_lse=True)
    return AttentionOutput(rows.queries(out), rows.lse(lse))


@hookimpl
def backward(plan: Plan, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
    """Gradients of q, k and v.

    Raises:
        ValueError: dlse is given; a request with return_lse=True plans its backward on ``sdpa``.
    """
    if dlse is not None:
        raise ValueError("fa4's backward takes no dlse; plan the request with return_lse=True, sdpa then runs it")
    request, tensors = plan.request, residuals.tensors
    rows = Rows.of(request, tensors)
    inputs = (tensors.q, tensors.k, tensors.v, residuals.out, dout)
    left, right = _window(request)
    dq, dk, dv, *_ = _library()._flash_attn_bwd(
        *(addressable(rows.of_tensor(x)) for x in inputs),
        rows.of_lse(residuals.lse),
        **_options(request, tensors.softmax_scale, rows),
        window_size_left=left,
        window_size_right=right,
        deterministic=request.deterministic,
    )
    return Gradients(rows.queries(dq), rows.keys(dk), rows.keys(dv))
