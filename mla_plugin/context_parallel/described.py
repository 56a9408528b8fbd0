"""The requests that a rank of a group would make, and a heading for them; nothing is sent or computed.

The group may be hypothetical (``Group.supposed``), so that one process can ask about many. A group of one rank gives
the plain request without a heading. Arguments and errors are those of the calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.arguments.options import CallOptions
from mla_plugin.context_parallel import decode
from mla_plugin.context_parallel.call import Call
from mla_plugin.context_parallel.checks import WAYS, checked_request
from mla_plugin.context_parallel.group import Group, process_group_of
from mla_plugin.context_parallel.interleave import check_interleave
from mla_plugin.context_parallel.latent import run as latents
from mla_plugin.hooks.attention import AttentionRequest, request_of
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.operations.latent import plain
from mla_plugin.operations.latent.call import Call as LatentCall

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Ranks: TypeAlias = "dist.ProcessGroup | DeviceMesh | Group | None"


def of_attention(
    tensors: AttentionTensors, options: CallOptions, cp_group: Ranks, cp_comm_type: str
) -> tuple[str | None, tuple[AttentionRequest, ...]]:
    """For ``attention``; the options have their defaults filled in."""
    group = _group_of(cp_group)
    if group is None:
        return None, (request_of(tensors, options),)
    request = checked_request(tensors, options, group.size, cp_comm_type)
    asked = tuple(dict.fromkeys(WAYS[cp_comm_type].requests(Call(group, tensors, request, None))))
    return _heading(cp_comm_type, group, asked), asked


def of_latents(call: LatentCall, cp_group: Ranks, cp_comm_type: str) -> tuple[str | None, tuple[AttentionRequest, ...]]:
    """For ``latent_attention``; the call does not name the group."""
    group = _group_of(cp_group)
    if group is None:
        return None, plain.requests(call)
    asked = tuple(dict.fromkeys(latents.requests(call._replace(more=("", cp_comm_type)), group)))
    return _heading(f"latent {cp_comm_type}", group, asked), asked


def of_decode(
    tensors: DecodeTensors, host: str, batch_invariant: bool, cp_group: Ranks, interleave: int
) -> tuple[str | None, tuple[DecodeRequest, ...]]:
    """For ``decode``."""
    group, request = _group_of(cp_group), DecodeRequest.of(tensors, host=host, batch_invariant=batch_invariant)
    if group is None:
        return None, (request,)
    check_interleave(interleave, group.size)
    decode.check_not_batch_invariant(batch_invariant)
    decode.check_lengths(tensors)
    asked = (decode.local_request(request, tensors, group, interleave),)
    return _heading(f"decode of tokens interleaved {interleave} at a time", group, asked), asked


def _group_of(cp_group: Any) -> Group | None:
    """None without a group, or for a group of one rank."""
    if cp_group is None or isinstance(cp_group, Group):
        return cp_group
    return None if process_group_of(cp_group).size() == 1 else Group.of(cp_group)


def _heading(way: str, group: Group, asked: tuple[Any, ...]) -> str:
    sections = "1 section" if len(asked) == 1 else f"{len(asked)} kinds of sections"
    return f"context parallel, {way}, rank {group.rank} of {group.size}: {sections}"
