"""Decode over a cache whose tokens are distributed over the ranks of a group, as ``interleave`` says.

Each rank attends with all heads to its own rows, and the parts are merged: with lse_r of rank r,

    lse = log sum over r of e^lse_r,    out = sum over r of out_r e^(lse_r - lse)

in float32. lse is gathered, one value per head and query, and the weighted parts of out are summed by an all-reduce. A
rank without a visible row has lse -inf and out 0, and contributes nothing.

Query i of S_q sees seqlens_kv - S_q + 1 + i first tokens, hence a prefix of each rank's rows. The prefixes of two
queries may be equal, which a causal mask cannot express: each query becomes a separate sequence over the same pages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch

from mla_plugin import environment
from mla_plugin.arguments import decode_checks
from mla_plugin.arguments.checks import may_read
from mla_plugin.arguments.decode import OPERATOR_FIELDS, DecodeLengths, DecodeTensors, Profile
from mla_plugin.arguments.decode_layout import DecodeCall, known_of
from mla_plugin.arguments.layout import lse_dtype
from mla_plugin.arguments.schema import schema_of
from mla_plugin.arguments.transforms import refuse_derivatives
from mla_plugin.context_parallel import transport
from mla_plugin.context_parallel.agreement import NO_VALUES, Fingerprint, Values, fingerprint_of
from mla_plugin.context_parallel.failure import Watch
from mla_plugin.context_parallel.group import Group
from mla_plugin.context_parallel.interleave import check_interleave, held_tokens
from mla_plugin.hooks.decode import DecodeOutput, DecodeRequest
from mla_plugin.operations.decode.operator import run as run_alone

__all__ = [
    "check_interleave",
    "check_not_batch_invariant",
    "context_parallel_decode",
    "local_call",
    "run",
    "run_traced",
]

_library = torch.library.Library("mla_plugin", "FRAGMENT")
_MORE = {"host": str, "backend": str | None, "cp_group": str, "cp_interleave": int}
_library.define(f"context_parallel_decode{schema_of(OPERATOR_FIELDS | _MORE)} -> (Tensor out, Tensor lse)")


def run(
    tensors: DecodeCall, host: str, backend: str | None, cp_group: str, interleave: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse over the keys of all ranks, the same on each.

    Args:
        tensors: queries and lengths of whole sequences, equal on all ranks; cache and pages of this rank.
        host, backend: as in ``mla_plugin.decode``.
        cp_group, interleave: who holds which tokens; the group by its name.

    Raises:
        ValueError, TypeError: an argument is invalid; nothing was sent.
        NoBackendError: no backend takes this rank's part.
        ContextParallelError: the ranks call with different arguments, or one of them failed.
    """
    check_not_batch_invariant(environment.is_batch_invariance_requested())
    known, group = known_of(tensors), Group.named(cp_group)
    check_lengths(tensors)
    q = tensors.q_nope_abs
    watch = Watch(group, q.device, _fingerprint(tensors, host, backend, group, interleave))
    call = None if known.has_no_query else watch.prepare(local_call, tensors, group, interleave)
    watch.begin()
    if known.has_no_query:
        return q.new_zeros(q.shape), _no_keys(tensors)
    part = None if call is None else watch.attempt(_part, call, tensors.lse_shape, host, backend)
    if part is None:  # the other ranks still expect a tensor of this shape
        part = DecodeOutput(q.new_zeros(q.shape), _no_keys(tensors))
    out, lse = _merged(part, group)
    watch.close()
    return out, lse


def run_traced(
    tensors: DecodeTensors, host: str, backend: str | None, cp_group: str, interleave: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``run`` through the operator, which takes the group's name."""
    arguments = {name: getattr(tensors, name) for name in OPERATOR_FIELDS}
    more = {"host": host, "backend": backend, "cp_group": cp_group, "cp_interleave": interleave}
    out, lse = context_parallel_decode(**arguments, **more)
    return out, lse


def check_not_batch_invariant(batch_invariant: bool) -> None:
    """Check that ``batch_invariant`` is not set.

    Raises:
        ValueError: it is set.
    """
    if batch_invariant:
        raise ValueError(
            "batch_invariant=True with cp_group: the sum over the ranks may have another order in another "
            "batch; leave one of them out"
        )


def check_lengths(tensors: DecodeTensors) -> None:
    """Check that the lengths of whole sequences are given: a rank's part of the cache does not determine them.

    Raises:
        ValueError: they are missing.
    """
    if tensors.seqlens_kv is None:
        raise ValueError(
            "decode with cp_group needs seqlens_kv: the lengths of whole sequences, int32 [B], of which a rank holds a "
            "part (mla_plugin.context_parallel.held_tokens)"
        )


def _part(call: DecodeCall, lse_shape: tuple[int, int, int], host: str, backend: str | None) -> DecodeOutput:
    """out [B, S_q, H, R] and lse [B, H, S_q] over this rank's rows."""
    out, lse = run_alone(call, known_of(call), host, backend)
    assert lse is not None  # the call asks for it
    batch, heads, seqlen_q = lse_shape
    if out.shape[0] == batch:
        return DecodeOutput(out, lse)
    of_queries = lse.reshape(batch, seqlen_q, heads).transpose(1, 2)
    return DecodeOutput(out.reshape(batch, seqlen_q, heads, -1), of_queries)


def local_call(tensors: DecodeTensors, group: Group, interleave: int) -> DecodeCall:
    """What this rank computes: the queries over its rows, each query a separate sequence where their prefixes differ.

    Raises:
        ValueError: lengths that the host may read do not fit this rank's cache.
    """
    batch, seqlen_q = tensors.q_nope_abs.shape[:2]
    is_split = _is_split(tensors.causal, seqlen_q, tensors.capacity)
    local = functools.partial(_rows, seqlen_q if is_split else 1, group, interleave)
    assert tensors.seqlens_kv is not None  # checked
    _check_room(tensors, group, interleave)
    q_nope_abs, q_rope, page_table = tensors.q_nope_abs, tensors.q_rope, tensors.page_table
    if is_split:
        q_nope_abs, q_rope = (q.flatten(0, 1).unsqueeze(1) for q in (q_nope_abs, q_rope))
        if page_table is None:  # a contiguous cache is passed as pages, one per row
            page_table = torch.arange(batch, device=q_rope.device, dtype=torch.int32)[:, None]
        page_table = page_table.repeat_interleave(seqlen_q, 0)
    lengths, seqlens_kv = tensors.lengths, None
    if lengths is not None:
        key = ("context_parallel", group.name, interleave, seqlen_q if is_split else 1)
        lengths = _local_lengths(lengths, key, lambda x: local(x, are_ends=True))
        seqlens_kv = lengths.seqlens_kv
    else:
        seqlens_kv = local(tensors.seqlens_kv, are_ends=True)
    return DecodeCall(
        q_nope_abs=q_nope_abs,
        q_rope=q_rope,
        c_kv=tensors.c_kv,
        k_rope=tensors.k_rope,
        softmax_scale=tensors.softmax_scale,
        causal=False,
        return_lse=True,
        page_table=page_table,
        seqlens_kv=seqlens_kv,
        leftpad_kv=None if tensors.leftpad_kv is None else local(tensors.leftpad_kv),
        lengths=lengths,
        kv_scale=tensors.kv_scale,
        kv_cache_format=tensors.kv_cache_format,
    )


def _rows(
    seqlen_q: int, group: Group, interleave: int, lengths: torch.Tensor, *, are_ends: bool = False
) -> torch.Tensor:
    """Number of this rank's rows among the first tokens of each sequence; with ``seqlen_q`` one entry per query."""
    if seqlen_q > 1:
        before = torch.arange(seqlen_q - 1, -1, -1, device=lengths.device, dtype=lengths.dtype)
        lengths = (lengths[:, None] - before if are_ends else lengths[:, None].expand(-1, seqlen_q)).flatten()
    return held_tokens(lengths.clamp(min=0), group.size, group.rank, interleave=interleave).to(torch.int32)


def _is_split(causal: bool, seqlen_q: int, capacity: int) -> bool:
    return causal and seqlen_q > 1 and capacity > 0


def local_request(request: DecodeRequest, tensors: DecodeTensors, group: Group, interleave: int) -> DecodeRequest:
    """The request of ``local_call``.

    Args:
        request: of this rank's tensors.
        tensors, group, interleave: as for ``local_call``.
    """
    capacity, host = tensors.capacity, tensors.host_lengths
    is_split = _is_split(request.causal, request.seqlen_q, capacity)
    if host is not None:
        held = _rows(request.seqlen_q if is_split else 1, group, interleave, host, are_ends=True)
        request = request.replace(profile=Profile.of(held.tolist()))
    if is_split:
        pages = capacity if request.page_size is None else request.page_size
        request = request.replace(batch_size=request.batch_size * request.seqlen_q, seqlen_q=1, page_size=pages)
    return request.replace(causal=False, return_lse=True)


def _local_lengths(whole: DecodeLengths, key: Hashable, local: Callable[[torch.Tensor], torch.Tensor]) -> DecodeLengths:
    """This rank's part of the lengths of a step, shared by its layers.

    Lengths that only the device knows are divided there, once in each graph.
    """
    if whole.host is not None:
        return whole.schedule(key, lambda held: _LocalLengths(held, local)).lengths
    shared = whole.shared(key)
    if shared is not None and shared.value is not None:
        return shared.value  # type: ignore[no-any-return]
    lengths = DecodeLengths(seqlens_kv=local(whole.seqlens_kv))
    if shared is not None:
        shared.keep(lengths)
    return lengths


class _LocalLengths:
    """This rank's part of lengths that the host knows; updated with ``DecodeLengths.update``."""

    def __init__(self, whole: DecodeLengths, local: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._local = local
        with torch.inference_mode(False):  # lengths made in a step under inference_mode are updated outside of it too
            self.lengths = DecodeLengths(self._of_host(whole), seqlens_kv=local(whole.seqlens_kv))

    def _of_host(self, whole: DecodeLengths) -> torch.Tensor:
        assert whole.host is not None
        return self._local(whole.host)

    def renew(self, whole: DecodeLengths) -> bool:
        """As ``Schedule.renew``."""
        self.lengths.update(self._of_host(whole))
        return True


def _check_room(tensors: DecodeTensors, group: Group, interleave: int) -> None:
    seqlens_kv = tensors.seqlens_kv
    assert seqlens_kv is not None
    if not may_read(seqlens_kv):
        return
    held = held_tokens(seqlens_kv, group.size, group.rank, interleave=interleave).tolist()
    if any(length > tensors.capacity for length in held) or any(length < 0 for length in seqlens_kv.tolist()):
        raise ValueError(
            f"seqlens_kv={seqlens_kv.tolist()} with cp_interleave={interleave} are {held} tokens on rank {group.rank} "
            f"of {group.size}; its cache has room for 0 to {tensors.capacity} a sequence"
        )


def _merged(part: DecodeOutput, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    assert part.lse is not None
    wide = part.lse.dtype
    lse = part.lse.contiguous()
    total = transport.gather(group, lse).logsumexp(0)
    weight = (lse - total.masked_fill(total.isneginf(), 0)).exp()  # no visible key on any rank: e^-inf instead of NaN
    out = part.out.to(wide) * weight.transpose(1, 2).unsqueeze(-1)
    return transport.add_up(group, out).to(part.out.dtype), total


def _no_keys(tensors: DecodeTensors) -> torch.Tensor:
    q = tensors.q_nope_abs
    return q.new_full(tensors.lse_shape, -torch.inf, dtype=lse_dtype(q.dtype))


def _fingerprint(tensors: DecodeTensors, host: str, backend: str | None, group: Group, interleave: int) -> Fingerprint:
    q = tensors.q_nope_abs
    key = (
        *("decode", tuple(q.shape), q.dtype, tensors.q_rope.shape[-1], float(tensors.softmax_scale), tensors.causal),
        *("none" if tensors.leftpad_kv is None else "given", interleave, backend, host, tensors.kv_cache_format),
    )
    return fingerprint_of(group, "decode", key, lambda: dict(zip(_COMPARED, key[1:], strict=True)), _values(tensors))


_COMPARED = (
    *("q_nope_abs.shape", "dtype", "qk_rope_head_dim", "softmax_scale", "causal"),
    *("leftpad_kv", "cp_interleave", "backend", "host", "kv_cache_format"),
)


def _values(tensors: DecodeTensors) -> Values:
    """The lengths, as far as the host knows them."""
    if tensors.lengths is not None and tensors.lengths.host is not None and tensors.leftpad_kv is None:
        return tensors.lengths.schedule("context_parallel", _KnownLengths).values  # once for all layers of a step
    given = {"seqlens_kv": tensors.seqlens_kv, "leftpad_kv": tensors.leftpad_kv}
    known = {name: x.tolist() for name, x in given.items() if x is not None and may_read(x)}
    return Values.of(known) if known else NO_VALUES


class _KnownLengths:
    """The lengths of a step as the ranks compare them; updated with ``DecodeLengths.update``."""

    def __init__(self, whole: DecodeLengths) -> None:
        self.renew(whole)

    def renew(self, whole: DecodeLengths) -> bool:
        """As ``Schedule.renew``."""
        assert whole.host is not None
        self.values = Values.of({"seqlens_kv": whole.host.tolist()})
        return True


def _operator(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *given, host, backend, cp_group, interleave = arguments
    tensors = DecodeCall(**dict(zip(OPERATOR_FIELDS, given, strict=True)))
    return run(tensors, host, backend, cp_group, interleave)


def _fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = DecodeTensors(**dict(zip(OPERATOR_FIELDS, arguments, strict=False)))
    decode_checks.check_tensors(tensors)
    check_lengths(tensors)
    q = tensors.q_nope_abs
    return q.new_empty(q.shape), q.new_empty(tensors.lse_shape, dtype=lse_dtype(q.dtype))


_library.impl("context_parallel_decode", _operator, "CompositeExplicitAutograd")
torch.library.register_fake("mla_plugin::context_parallel_decode", _fake, lib=_library)
refuse_derivatives(_library, "context_parallel_decode", decode_checks.NO_DERIVATIVE)

context_parallel_decode = torch.ops.mla_plugin.context_parallel_decode.default
