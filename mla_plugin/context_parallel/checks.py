"""Checks of a context-parallel call; every rank runs them before its first message."""

from __future__ import annotations

import functools
import itertools
from types import ModuleType

import torch

from mla_plugin import environment
from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.checks import check_choice
from mla_plugin.arguments.options import COMM_TYPES, CallOptions
from mla_plugin.context_parallel import a2a, all_gather, p2p
from mla_plugin.hooks.attention import AttentionRequest, request_of

WAYS: dict[str, ModuleType] = dict(zip(COMM_TYPES, (p2p, all_gather, a2a), strict=True))
"""The module of each ``cp_comm_type``."""


def checked_request(tensors: AttentionTensors, options: CallOptions, size: int, cp_comm_type: str) -> AttentionRequest:
    """Check one rank's call and return its request, whose longest sequences are slots on this rank.

    Args:
        tensors: this rank's tokens; offsets are those of whole sequences.
        options: of the call, completed; the longest sequences are whole ones with their padding.
        size: ranks of the group.
        cp_comm_type: the communication type.

    Raises:
        ValueError, TypeError: an argument is invalid; the message says what was given and what is expected.
    """
    check_choice("cp_comm_type", cp_comm_type, COMM_TYPES)
    if options.batch_invariant or environment.is_batch_invariance_requested():
        raise ValueError(
            "batch_invariant=True with cp_group: sections and their sums depend on the lengths and the ranks; leave "
            "one of them out"
        )
    longest = (options.max_seqlen_q, options.max_seqlen_kv)
    request = request_of(tensors, options._replace(max_seqlen_q=None, max_seqlen_kv=None))
    try:
        hash((request, longest))
    except TypeError:  # sizes are symbolic, or an option is not a number
        return _of_slots(request, *longest, size, cp_comm_type)
    return _known_of_slots(request, *longest, size, cp_comm_type)


def _of_slots(
    request: AttentionRequest, longest_q: int | None, longest_kv: int | None, size: int, cp_comm_type: str
) -> AttentionRequest:
    """The request with the longest sequences on a rank, checked."""
    longest = (longest_q, longest_kv)
    _refuse(_beyond(request))
    slots = []
    for side, whole, tokens in zip(("q", "kv"), longest, (request.max_seqlen_q, request.max_seqlen_kv), strict=True):
        if tokens % 2 and not request.layout.is_packed:
            raise ValueError(
                f"{tokens} tokens of {'q' if side == 'q' else 'k and v'} on a rank; sequences are cut into {2 * size} "
                f"chunks and each rank holds two: pad them to a multiple of {2 * size}"
            )
        slots.append(_slots(side, whole, tokens, size, request))
    request = request.replace(max_seqlen_q=slots[0], max_seqlen_kv=slots[1])
    _refuse([f"cp_comm_type={cp_comm_type!r} with {reason}" for reason in WAYS[cp_comm_type].refusals(request, size)])
    return request


_known_of_slots = functools.lru_cache(maxsize=4096, typed=True)(_of_slots)


def _beyond(request: AttentionRequest) -> list[str]:
    """Reasons that apply to every communication type."""
    found = []
    if request.dropout_p:
        found.append(f"dropout_p={request.dropout_p}; context parallelism takes 0")
    if request.bias_type != "no_bias":
        found.append(f"core_attention_bias_type={request.bias_type!r}; context parallelism takes 'no_bias'")
    if request.attn_mask_type == "arbitrary":
        found.append("attn_mask_type='arbitrary'; context parallelism takes all other masks")
    return found


def _refuse(reasons: list[str]) -> None:
    if reasons:
        raise ValueError("; ".join(reasons))


def _slots(side: str, whole: int | None, tokens: int, size: int, request: AttentionRequest) -> int:
    """The longest sequence's slots on a rank, an even number."""
    if whole is not None and (isinstance(whole, bool) or not isinstance(whole, (int, torch.SymInt))):
        raise TypeError(f"max_seqlen_{side}={whole!r}; expected an int or None")
    if not request.layout.is_packed:
        if whole is not None and whole != tokens * size and not (request.has_padding and 0 <= whole <= tokens * size):
            raise ValueError(
                f"max_seqlen_{side}={whole} with {tokens} tokens on each of {size} ranks; expected "
                f"{tokens * size}, the whole sequence, or None"
            )
        return tokens
    if whole is None:
        return tokens + tokens % 2
    if whole < 0:
        raise ValueError(f"max_seqlen_{side}={whole}; expected the longest sequence with its padding")
    return -(-whole // (2 * size)) * 2


def check_values(tensors: AttentionTensors, request: AttentionRequest, size: int) -> None:
    """Check that offsets start at 0, never decrease and fit the tokens, and that padded lengths divide by 2 size.

    It reads values, which synchronises with a CUDA device; ``compute.reads_lengths`` says when to do so.

    Raises:
        ValueError: an offset violates that; the message says which.
    """
    for side, x, most, cu, padded in (
        ("q", tensors.q, request.max_seqlen_q, tensors.cu_seqlens_q, tensors.cu_seqlens_q_padded),
        ("kv", tensors.k, request.max_seqlen_kv, tensors.cu_seqlens_kv, tensors.cu_seqlens_kv_padded),
    ):
        if cu is None:
            continue
        lengths, room = _differences(f"cu_seqlens_{side}", cu), x.shape[request.layout.tokens] * size
        if not request.layout.is_packed:
            if max(lengths, default=0) > room:
                raise ValueError(f"cu_seqlens_{side} gives lengths {lengths}; a row holds {room} tokens on all ranks")
            continue
        name = f"cu_seqlens_{side}" if padded is None else f"cu_seqlens_{side}_padded"
        slots = lengths if padded is None else _differences(name, padded)
        if any(slot % (2 * size) for slot in slots):
            raise ValueError(
                f"{name} gives lengths {slots}; each sequence must be padded to a multiple of {2 * size}, twice the "
                "number of ranks: mla_plugin.context_parallel.pad_lengths computes the padded offsets"
            )
        if any(length > slot for length, slot in zip(lengths, slots, strict=True)):
            raise ValueError(f"lengths {lengths} do not fit {name}, which has room for {slots} tokens")
        if not request.pad_between_seqs and slots[:-1] != lengths[:-1]:
            raise ValueError(
                f"pad_between_seqs=False with lengths {lengths} and {name} of {slots} tokens: sequences start "
                "elsewhere in memory; pass pad_between_seqs=True, or leave it out"
            )
        if sum(slots) > room:
            raise ValueError(f"{name} ends at {sum(slots)}; {room} tokens are on all ranks")
        if max(slots, default=0) > most * size:
            raise ValueError(
                f"max_seqlen_{side} says {most * size} and {name} gives {slots}; expected the longest sequence with "
                "its padding"
            )


def _differences(name: str, offsets: torch.Tensor) -> list[int]:
    values = offsets.tolist()
    found = [after - before for before, after in itertools.pairwise(values)]
    if values[0] != 0 or min(found, default=0) < 0:
        raise ValueError(f"{name}={values}; offsets start at 0 and never decrease")
    return found
