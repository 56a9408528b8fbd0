"""FlashAttention 4 on Hopper and Blackwell: 192/128 natively, dense and packed.

Found by the version of the distribution ``flash-attn-4``: FlashAttention 2 ships an old ``flash_attn/cute`` of its own.
The kernels compile at their first call.

TransformerEngine selects FlashAttention 4 where it then fails (docs/te_selection.md); those requests are refused here.
Sources: ``_validate_head_dims`` and the assertions in ``flash_attn/cute/interface.py`` and the kernels it calls, and
TransformerEngine's rules 17 to 21 and 31.

A request that trains on lse gets its backward from ``sdpa``, because only newer releases take the gradient of lse.

The kernels copy whole tiles with TMA, also past a sequence's end, and multiply those rows by weights of 0, as
FlashAttention 3's do (``fa3``); rows that are no tokens are zeroed in copies of the same tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from math import gcd
from typing import Any

import torch
from packaging.version import Version

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.layout import addressable
from mla_plugin.device import FLASH_ATTENTION_PROVIDERS
from mla_plugin.hooks import hookimpl
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, Gradients, Plan, Residuals
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.types import Accepted, Platform, Refused
from mla_plugin.plugins.fa4.launch import Repeated
from mla_plugin.plugins.shared.dense import keep_forward, kept_forward
from mla_plugin.plugins.shared.flash_family import Options, imported, not_installed
from mla_plugin.plugins.shared.packed import Rows
from mla_plugin.plugins.shared.refusals import (
    NO_DECODE,
    accepted_without_dlse,
    beyond_flash_attention,
    beyond_packed_sequences,
    off_cuda,
    refuse_dlse,
)

((DISTRIBUTION, MODULE),) = FLASH_ATTENTION_PROVIDERS["fa4"]
MARK = "_validate_head_dims"
"""A name that its module has had since the first version, and that flash-attn's copy lacks."""
FIRST_VERSION = "4.0.0b5"
NEEDS_NEW_CUTLASS, CUTLASS_MINIMUM = "4.0.0b24", "4.6.2"
BLACKWELL_DIMS = {(192, 128): FIRST_VERSION, (64, 512): "4.0.0b9", (256, 256): "4.0.0b11"}
"""Pairs that compute capability 10 and 11 support besides 8..128 each, and the first release that does."""
ONE_WIDTH = "4.0.0b30"
"""From this release on the backward's kernel rounds a head dim as its accumulators do, except up to 128 on Hopper.

Above 128 on Hopper that is to 64 (pull request 2482), on compute capability 10 and 11 to 32 (pull request 2698).
"""
GROUPED_ABOVE_128 = "4.0.0b31"
"""From this release on Hopper's backward takes grouped heads above 128, and head dims above 192 (PR 2888)."""
TRAINED_ON_HOPPER = {
    (64, 64): FIRST_VERSION,
    (96, 64): FIRST_VERSION,
    (96, 96): FIRST_VERSION,
    (128, 64): FIRST_VERSION,
    (128, 128): FIRST_VERSION,
    (192, 128): FIRST_VERSION,
    (192, 192): ONE_WIDTH,
    (256, 256): GROUPED_ABOVE_128,
}
"""Pairs of rounded head dims whose gradients on Hopper are known to be right, and the first such release.

Known by measurement on 4.0.0b36, or by FlashAttention's own tests. Many others fail to compile, such as 64/48, 128/96
and 256/192: dout's tile is laid out in steps that divide head_dim_qk's but not head_dim_v's (``major_mode_size`` in
``flash_bwd_sm90.py``).
"""
Window = tuple[int | None, int | None]


def _platform_refusals(request: AttentionRequest, platform: Platform) -> Iterator[str]:
    version, cutlass = platform.version(DISTRIBUTION), platform.version("nvidia-cutlass-dsl")
    yield from not_installed(platform, "FlashAttention 4", DISTRIBUTION)
    if version is not None and Version(version) < Version(FIRST_VERSION):
        yield f"{DISTRIBUTION} {version} < {FIRST_VERSION}"
    if version == NEEDS_NEW_CUTLASS and cutlass is not None and Version(cutlass) < Version(CUTLASS_MINIMUM):
        yield f"{DISTRIBUTION} {version} with nvidia-cutlass-dsl {cutlass} < {CUTLASS_MINIMUM}"
    off_device = tuple(off_cuda(request.device_type, platform.device_type))
    yield from off_device
    if off_device:
        return
    if platform.compute_capability is None or not (9, 0) <= platform.compute_capability < (13, 0):
        yield f"compute_capability={platform.compute_capability}, expected (9, 0) to (12, x)"


def _head_dim_refusals(request: AttentionRequest, platform: Platform) -> Iterator[str]:
    dims = (request.head_dim_qk, request.head_dim_v)
    found = f"head_dim_qk={dims[0]}, head_dim_v={dims[1]} on compute_capability={platform.compute_capability}"
    if platform.compute_capability is None or platform.compute_capability < (9, 0):
        return
    major = platform.compute_capability[0]
    largest = 256 if major == 9 else 128
    is_aligned = not (dims[0] % 8 or dims[1] % 8)
    if not is_aligned:
        yield f"{found}, expected multiples of 8"
    if max(dims) <= largest:
        if major == 9 and is_aligned:
            yield from _hopper_refusals(request, platform)
        return
    since = BLACKWELL_DIMS.get(dims) if major in (10, 11) else None
    if since is None:
        pairs = "".join(f", or exactly {qk} and {v}" for qk, v in BLACKWELL_DIMS) if major in (10, 11) else ""
        yield f"{found}, expected at most {largest} each{pairs}"
    else:
        yield from _older(found, platform, since)


def _rounded(dim: int, step: int) -> int:
    return -(-dim // step) * step


def _hopper_refusals(request: AttentionRequest, platform: Platform) -> Iterator[str]:
    """Head dims that the kernels for compute capability 9.0 get wrong, or cannot be compiled for.

    The forward keeps out in Q's shared memory (``sO`` in ``flash_fwd_sm90.py``), and its tiles are sized by
    head_dim_qk. The backward's kernel rounds head dims up to 128 to 16 (``tile_hdim`` in ``flash_bwd_sm90.py``), but dQ
    is allocated and read back in steps of 32 (``_flash_attn_bwd``): where the two differ dQ is silently wrong, up to
    4.0.0b36 at least; pull request 2896 fixes it.
    """
    dim_qk, dim_v = request.head_dim_qk, request.head_dim_v
    found = f"head_dim_qk={dim_qk}, head_dim_v={dim_v}"
    if _rounded(dim_v, 16) > _rounded(dim_qk, 16):
        yield f"{found}, expected on Hopper head_dim_v up to head_dim_qk: out takes the shared memory of Q"
        return
    if not request.is_training:
        return
    step = 16 if dim_qk <= 128 else 64
    tile = (_rounded(dim_qk, step), _rounded(dim_v, step))
    if step == 16 and tile[0] % 32:
        yield (
            f"training with {found} on Hopper: the kernel's dQ has {tile[0]} columns, its buffer "
            f"{_rounded(dim_qk, 32)}; expected up to 128 a multiple of 32, or 8 less"
        )
        return
    since = TRAINED_ON_HOPPER.get(tile)
    if since is None:
        pairs = ", ".join(f"{qk}/{v}" for qk, v in TRAINED_ON_HOPPER)
        yield f"training with {found} on Hopper, rounded to {tile[0]}/{tile[1]}, expected {pairs}"
        return
    if tile != (dim_qk, dim_v) and step == 64:
        since = max(since, ONE_WIDTH, key=Version)
    if dim_qk > 128 and request.num_heads != request.num_kv_heads:
        since = max(since, GROUPED_ABOVE_128, key=Version)
    yield from _older(f"training with {found} on Hopper", platform, since)


def _older(found: str, platform: Platform, since: str) -> Iterator[str]:
    version = platform.version(DISTRIBUTION)
    if version is not None and Version(version) < Version(since):
        yield f"{found} with {DISTRIBUTION} {version} < {since}"


def _training_refusals(request: AttentionRequest, platform: Platform) -> Iterator[str]:
    dim_qk, dim_v = request.head_dim_qk, request.head_dim_v
    found, capability = f"head_dim_qk={dim_qk}, head_dim_v={dim_v}", platform.compute_capability or (0, 0)
    if capability[0] in (10, 11) and (dim_qk % 32 or dim_v % 32):
        yield from _older(f"training with {found} on compute_capability={capability}", platform, ONE_WIDTH)
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
    """Rules 19 and 31: a separate kernel on compute capability 10 and 11."""
    capability = platform.compute_capability or (0, 0)
    if (request.head_dim_qk, request.head_dim_v) != (256, 256) or capability[0] not in (10, 11):
        return
    if request.max_seqlen_q != request.max_seqlen_kv or request.lengths_may_differ:
        yield (
            f"head dims 256 with max_seqlen_q={request.max_seqlen_q}, max_seqlen_kv={request.max_seqlen_kv}, "
            f"lengths_may_differ={request.lengths_may_differ}, expected equal lengths"
        )
    if request.has_sliding_window:
        yield f"head dims 256 with window_size={request.window_size}, expected (-1, -1) or (-1, 0)"


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
    return accepted_without_dlse(request, f"{DISTRIBUTION} {platform.version(DISTRIBUTION)}")


def _library() -> Any:
    """The module, if it is FlashAttention 4's and not that of flash-attn, which can overwrite it."""
    remedy = f"pip install --force-reinstall --no-deps {DISTRIBUTION}, or leave it out with MLA_PLUGIN_BLOCK=fa4"
    return imported(DISTRIBUTION, MODULE, remedy, MARK)


def _options(request: AttentionRequest, softmax_scale: float, rows: Rows) -> tuple[dict[str, Any], Window]:
    """Keyword arguments that both passes take, and the window, whose open sides are None here."""
    options = Options.of(request, softmax_scale, rows)
    left, right = (None if size < 0 else size for size in options.window_size)
    return options.offsets | options.named("softmax_scale", "causal"), (left, right)


@hookimpl
def forward(plan: Plan, tensors: AttentionTensors) -> AttentionOutput:
    """Attention by keyword: ``qv`` is the fourth positional argument of the library's functions."""
    known = kept_forward("fa4", tensors)
    if known is not None:
        return known(tensors)
    request, library = plan.request, _library()
    rows = Rows.of(request, tensors)
    q, k = addressable(rows.of_tensor(tensors.q)), addressable(rows.of_tensor(tensors.k))
    v = rows.clean_keys(tensors.v)
    function = library.flash_attn_func if rows.q is None else library.flash_attn_varlen_func
    options, window = _options(request, tensors.softmax_scale, rows)
    run = functools.partial(function, **options, window_size=window, return_lse=True)
    numbers = (tensors.softmax_scale, *window)
    keep_forward("fa4", tensors, rows, lambda: Repeated(library, run, numbers))
    out, lse = run(q, k, v)
    return AttentionOutput(rows.queries(out), rows.lse(lse))


@hookimpl
def backward(plan: Plan, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
    """Gradients of q, k and v.

    Raises:
        ValueError: dlse is given; a request with return_lse=True plans its backward on ``sdpa``.
    """
    refuse_dlse("fa4", dlse)
    request, tensors = plan.request, residuals.tensors
    rows = Rows.of(request, tensors)
    dout, q = rows.clean_queries(dout), rows.clean_queries(tensors.q)
    k, v = rows.clean_keys(tensors.k), rows.clean_keys(tensors.v)
    options, (left, right) = _options(request, tensors.softmax_scale, rows)
    dq, dk, dv, *_ = _library()._flash_attn_bwd(
        q,
        k,
        v,
        addressable(rows.of_tensor(residuals.out)),
        dout,
        rows.of_lse(residuals.lse),
        **options,
        window_size_left=left,
        window_size_right=right,
        deterministic=request.deterministic,
    )
    return Gradients(rows.queries(dq), rows.keys(dk), rows.keys(dv))
