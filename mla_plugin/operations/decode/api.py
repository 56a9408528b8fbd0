"""``mla_plugin.decode``: checks the arguments and runs the call."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mla_plugin.arguments import decode_checks
from mla_plugin.arguments.cache_format import PLAIN, check_format, check_no_scale, split_quantised
from mla_plugin.arguments.checks import bound_arguments, is_traced, plain_number
from mla_plugin.arguments.decode import DecodeLengths, DecodeTensors
from mla_plugin.arguments.decode_layout import DecodeCall, known_of
from mla_plugin.operations.decode.operator import run, run_traced

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def decode(
    q_nope_abs: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    *,
    softmax_scale: float,
    page_table: torch.Tensor | None = None,
    seqlens_kv: torch.Tensor | DecodeLengths | None = None,
    leftpad_kv: torch.Tensor | None = None,
    causal: bool = True,
    backend: str | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    kv_cache_format: str = "plain",
    kv_scale: torch.Tensor | None = None,
    host: str = "direct",
    cp_group: ProcessGroup | DeviceMesh | None = None,
    cp_interleave: int = 1,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """MLA decode with weight absorption over the compressed cache, on the fastest installed backend.

    out = softmax(softmax_scale * (q_nope_abs @ c_kv.T + q_rope @ k_rope.T) + mask) @ c_kv, per head; all heads read
    the same cache, and per-head keys and values are never materialised (weight absorption, DeepSeek-V2, 2024). Multiply
    q_nope by W_UK before and out by W_UV after. The new tokens' rows must be in the cache already. There is no
    backward. Autocast has no effect.

    Args:
        q_nope_abs: [B, S_q, H, R], the queries without rope multiplied by W_UK. bfloat16, float16, float32 or float64.
        q_rope: [B, S_q, H, Dr], the queries' rope part; Dr may be 0.
        kv_cache: a pair (c_kv [B, S_kv, R], k_rope [B, S_kv, Dr]), or one tensor [B, S_kv, R + Dr]; with ``page_table``
            pages instead of sequences: [pages, page_size, ..]. The last dimension is contiguous, other strides are
            free. Initialise it with torch.zeros: some backends multiply rows beyond a length by a weight of 0, and
            0 * NaN is NaN.
        softmax_scale: positive; required, because R is not the original head_dim_qk: usually
            (qk_nope_head_dim + qk_rope_head_dim) ** -0.5.
        page_table: int32 [B, n], each sequence's pages in order; entries beyond its length are never followed.
        seqlens_kv: int32 [B], all keys of each sequence, the new tokens' included; None: S_kv of a contiguous cache.
            A ``DecodeLengths`` that all layers of a step get lets them share one plan. It may hold the lengths on the
            host too, which backends that plan there (FlashInfer) need.
        leftpad_kv: int32 [B], keys before it are not seen: the padding of left-padded batches (FlashAttention's
            cache_leftpad). ``seqlens_kv`` still counts from the cache's first token.
        causal: the queries are the last S_q tokens: query i sees keys up to seqlens_kv[b] - S_q + i. False: all keys.
        backend: use this backend and no other; it never falls back.
        return_lse: also return the log-sum-exp. It may decide about the kernel, and so about the last bits of out.
        batch_invariant: the bits of a query's out and lse must not depend on the rest of the call: the other sequences
            and its index among them, the width of the page table, the other queries of its sequence.
        kv_cache_format: ``"plain"``: the cache is in the dtype of the queries. ``"fp8"``: uint8 or float8_e4m3fn,
            R + Dr bytes a token, as a pair or as one tensor (vLLM's ``fp8``). ``"fp8_ds_mla"``: uint8 or float8_e4m3fn,
            one tensor of 656 bytes a token, with a scale for every 128 elements of c_kv, and a bfloat16 k_rope (R
            512, Dr 64; FlashMLA, vLLM's ``fp8_ds_mla``); queries in bfloat16, float32 or float64.
            ``mla_plugin.cache.append`` writes all three.
        kv_scale: float32, one element, not negative, on the cache's device: the scale of ``"fp8"``. Only the device
            reads it, so a captured graph uses its current value.
        host: the framework that calls; for adapters.
        cp_group: ranks that share the cache's tokens (context parallelism), a ProcessGroup or a one-dimensional
            DeviceMesh. Each passes the same queries of all heads and the same ``seqlens_kv``, which is then needed, and
            ``leftpad_kv`` of whole sequences; ``kv_cache`` and ``page_table`` hold its own tokens, one after the other.
        cp_interleave: number of consecutive tokens on one rank, 1 or the page size: token t is on rank
            (t // cp_interleave) % size. ``mla_plugin.context_parallel.held_tokens`` computes how many of a
            length's tokens a rank holds.

    Returns:
        out [B, S_q, H, R], dtype of the queries; with ``return_lse`` also lse [B, H, S_q], natural log, float32
        (float64 for float64). A query that sees no key gives out 0 and lse -inf. With ``cp_group`` they are over the
        tokens of all ranks, merged in float32, and equal on all of them.

    Raises:
        ValueError, TypeError: an argument is invalid; the message says what was given and what is expected.
        NoBackendError: no backend takes the request; the message lists every backend's reasons.
        NotImplementedError: an argument requires grad, or a forward-mode derivative is requested.
        ContextParallelError: the ranks of cp_group call with different arguments, or one of them failed.
    """
    if type(softmax_scale) is not float:
        softmax_scale = plain_number(softmax_scale)
    decode_checks.check_options(softmax_scale, causal, return_lse, batch_invariant=batch_invariant)
    decode_checks.check_names(host, backend)
    decode_checks.check_queries(q_nope_abs)
    if cp_group is None and (type(cp_interleave) is not int or cp_interleave != 1):  # with a group every rank checks it
        _check_interleave(cp_interleave)
    c_kv, k_rope, kv_scale = _split(kv_cache, q_nope_abs.shape[-1], kv_cache_format, kv_scale)
    lengths = None
    if isinstance(seqlens_kv, DecodeLengths):
        lengths, seqlens_kv = seqlens_kv, seqlens_kv.seqlens_kv
    is_operator = is_traced(q_nope_abs, q_rope, c_kv, k_rope)
    tensors = (DecodeTensors if is_operator else DecodeCall)(
        q_nope_abs=q_nope_abs,
        q_rope=q_rope,
        c_kv=c_kv,
        k_rope=k_rope,
        softmax_scale=softmax_scale,
        causal=causal and q_nope_abs.shape[1] > 1,
        return_lse=return_lse,
        page_table=page_table,
        seqlens_kv=seqlens_kv,
        leftpad_kv=leftpad_kv,
        lengths=lengths,
        kv_scale=kv_scale,
        kv_cache_format=kv_cache_format,
    )
    if cp_group is not None and (name := _group_name(cp_group)) is not None:
        out, lse = _over_group(tensors, host, backend, batch_invariant, name, cp_interleave)
        return (out, lse) if return_lse else out
    if is_operator:
        if not torch.compiler.is_compiling():
            decode_checks.check_tensors(tensors)
        decode_checks.check_no_gradient(tensors)
        out, lse = run_traced(tensors, host, backend, batch_invariant)
        return (out, lse) if return_lse else out
    known = known_of(tensors)
    decode_checks.check_no_gradient(tensors)
    output = run(tensors, known, host, backend, batch_invariant)
    return output if return_lse else output.out  # type: ignore[return-value]


def _split(
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    rank: int,
    kv_cache_format: str,
    kv_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(c_kv, k_rope, kv_scale) as ``DecodeTensors`` has them."""
    if isinstance(kv_cache_format, str) and kv_cache_format == PLAIN:
        if kv_scale is not None:
            check_no_scale(kv_cache_format, kv_scale)
        return *decode_checks.split_cache(kv_cache, rank), None
    check_format(kv_cache_format)
    return split_quantised(kv_cache, rank, kv_cache_format, kv_scale)


def _group_name(cp_group: ProcessGroup | DeviceMesh) -> str | None:
    """None for a group of one rank, for which the call is a plain one."""
    from mla_plugin.context_parallel.group import process_group_of

    process_group = process_group_of(cp_group)
    return None if process_group.size() == 1 else str(process_group.group_name)


def _check_interleave(cp_interleave: object) -> None:
    from mla_plugin.context_parallel.interleave import check_interleave

    check_interleave(cp_interleave)


def _over_group(
    tensors: DecodeTensors, host: str, backend: str | None, batch_invariant: bool, name: str, interleave: int
) -> tuple[torch.Tensor, torch.Tensor]:
    from mla_plugin.context_parallel import decode as context_parallel

    interleave = context_parallel.check_interleave(interleave)
    context_parallel.check_not_batch_invariant(batch_invariant)
    if isinstance(tensors, DecodeCall):
        known_of(tensors)
    elif not torch.compiler.is_compiling():
        decode_checks.check_tensors(tensors)
    decode_checks.check_no_gradient(tensors)
    if isinstance(tensors, DecodeCall):
        return context_parallel.run(tensors, host, backend, name, interleave)
    return context_parallel.run_traced(tensors, host, backend, name, interleave)


class DescribedCall(NamedTuple):
    """A call that is not run: checked tensors, and its other arguments."""

    tensors: DecodeTensors
    host: str
    backend: str | None
    batch_invariant: bool
    cp_group: ProcessGroup | DeviceMesh | None
    cp_interleave: int


def described_call(*tensors: torch.Tensor, **arguments: Any) -> DescribedCall:
    """The call ``decode(*tensors, **arguments)``, without running it; meta tensors work too.

    Raises:
        ValueError, TypeError, NotImplementedError: as ``decode``.
    """
    arguments = bound_arguments(_SIGNATURE, "mla_plugin.decode", tensors, arguments)
    host, backend, batch_invariant = (arguments.pop(name) for name in ("host", "backend", "batch_invariant"))
    group, interleave = arguments.pop("cp_group"), arguments.pop("cp_interleave")
    decode_checks.check_options(
        arguments["softmax_scale"], arguments["causal"], arguments["return_lse"], batch_invariant=batch_invariant
    )
    decode_checks.check_names(host, backend)
    decode_checks.check_queries(arguments["q_nope_abs"])
    if group is None:
        _check_interleave(interleave)
    seqlen_q, rank = arguments["q_nope_abs"].shape[1], arguments["q_nope_abs"].shape[-1]
    cache = _split(arguments.pop("kv_cache"), rank, arguments["kv_cache_format"], arguments.pop("kv_scale"))
    c_kv, k_rope, arguments["kv_scale"] = cache
    lengths = arguments["seqlens_kv"] if isinstance(arguments["seqlens_kv"], DecodeLengths) else None
    if lengths is not None:
        arguments["seqlens_kv"] = lengths.seqlens_kv
    arguments["causal"] = arguments["causal"] and seqlen_q > 1
    call = DecodeTensors(c_kv=c_kv, k_rope=k_rope, lengths=lengths, **arguments)
    decode_checks.check_tensors(call)
    decode_checks.check_no_gradient(call)
    return DescribedCall(call, host, backend, batch_invariant, group, interleave)


_SIGNATURE = inspect.signature(decode)
