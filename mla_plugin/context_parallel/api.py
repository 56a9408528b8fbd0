"""``mla_plugin.attention`` with ``cp_group``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.options import CallOptions
from mla_plugin.context_parallel.checks import checked_request
from mla_plugin.context_parallel.group import process_group_of
from mla_plugin.context_parallel.operator import context_parallel_forward
from mla_plugin.hooks.attention import AttentionOutput
from mla_plugin.operations.attention import operator as plain
from mla_plugin.operations.attention.run import is_traced, run_call

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def attention(
    tensors: AttentionTensors,
    options: CallOptions,
    backend: str | None,
    cp_group: dist.ProcessGroup | DeviceMesh,
    cp_comm_type: str,
) -> AttentionOutput:
    """Attention of this rank's queries over the keys of all ranks of a group; with one rank, the plain call.

    Args:
        tensors: this rank's tokens, as ``partition.shard`` cuts them; offsets are those of whole sequences.
        options: of the call.
        backend: use only this backend.
        cp_group: the ranks that share the sequences.
        cp_comm_type: ``p2p``, ``all_gather`` or ``a2a``.

    Returns:
        out and lse of this rank's tokens, differentiable in q, k and v.

    Raises:
        ValueError, TypeError: an argument is invalid; nothing was sent.
        NoBackendError: no backend takes a section.
        ContextParallelError: the ranks call with different arguments, or one of them failed.
    """
    process_group = process_group_of(cp_group)
    if process_group.size() == 1:
        return run_call(tensors, options, backend)
    options = options.completed(tensors)
    if not is_traced():  # the operator's schema would raise less clear errors, or convert silently
        checked_request(tensors, options, process_group.size(), cp_comm_type)
    arguments = plain.Call(tensors, options, backend).in_order()
    out, lse, _ = context_parallel_forward(*arguments, process_group.group_name, cp_comm_type)
    return AttentionOutput(out, lse)
