"""The entry: an attention call that names a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.options import CallOptions
from mla_plugin.context_parallel.call import Call
from mla_plugin.context_parallel.checks import WAYS, checked_request
from mla_plugin.context_parallel.group import Group, process_group_of
from mla_plugin.context_parallel.operator import context_parallel_forward
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, request_of
from mla_plugin.operations.attention import operator as plain
from mla_plugin.operations.attention.run import is_traced, run_said

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def attention(
    tensors: AttentionTensors,
    options: CallOptions,
    backend: str | None,
    cp_group: dist.ProcessGroup | DeviceMesh,
    cp_comm_type: str,
) -> AttentionOutput:
    """Attention of this rank's queries over the keys of all ranks of a group; of one rank it is the plain call.

    Args:
        tensors: this rank's tokens, placed as ``partition.shard`` places them; offsets are those of whole sequences.
        options: of the call.
        backend: use this backend and no other.
        cp_group: the ranks that share the sequences.
        cp_comm_type: ``p2p``, ``all_gather`` or ``a2a``.

    Returns:
        out and lse of this rank's tokens, differentiable in q, k and v.

    Raises:
        ValueError, TypeError: an argument is off; nothing was sent.
        NoBackendError: no backend takes a section.
        ContextParallelError: the ranks call with different arguments, or one of them failed.
    """
    process_group = process_group_of(cp_group)
    if process_group.size() == 1:
        return run_said(tensors, options, backend)
    options = options.completed(tensors)
    if not is_traced():  # the operator's own errors, and what it converts in silence, depend on its schema
        checked_request(tensors, options, process_group.size(), cp_comm_type)
    arguments = plain.Call(tensors, options, backend).arguments
    out, lse, _ = context_parallel_forward(*arguments, process_group.group_name, cp_comm_type)
    return AttentionOutput(out, lse)


def sections_of_call(
    tensors: AttentionTensors,
    options: CallOptions,
    cp_group: dist.ProcessGroup | DeviceMesh,
    cp_comm_type: str,
) -> tuple[str | None, tuple[AttentionRequest, ...]]:
    """What ``attention`` would ask backends for on this rank, and the way in words; arguments and errors as there.

    Nothing is sent or computed. A group of one rank makes the plain request, and there is no way to name.
    """
    if process_group_of(cp_group).size() == 1:
        return None, (request_of(tensors, options),)
    group = Group.of(cp_group)
    request = checked_request(tensors, options, group.size, cp_comm_type)
    asked = WAYS[cp_comm_type].requests(Call(group, tensors, request, None))
    sections = "1 section" if len(asked) == 1 else f"{len(asked)} kinds of sections"
    return f"context parallel, {cp_comm_type}, rank {group.rank} of {group.size}: {sections}", asked
