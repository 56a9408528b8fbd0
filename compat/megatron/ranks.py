"""Megatron's context-parallel settings: the group of a layer or a call, and how its ranks exchange K and V."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed import ProcessGroup

from mla_plugin.context_parallel.checks import WAYS

LENGTHS_OF_QUERIES: dict[str, Any] = {"cu_seqlens_kv": None, "cu_seqlens_kv_padded": None}
"""Self-attention: using one tensor for queries and keys shows that their lengths are equal, without reading them."""


def group_of_layer(config: TransformerConfig, pg_collection: ProcessGroupCollection | None) -> ProcessGroup | None:
    """The ranks that share the sequences of a layer; None where ``context_parallel_size`` is 1, as in Megatron.

    Raises:
        ValueError: the group is missing, or is not of ``context_parallel_size`` ranks.
    """
    size = config.context_parallel_size
    if size == 1:
        return None
    if pg_collection is None:
        group: ProcessGroup | None = parallel_state.get_context_parallel_group(check_initialized=False)
    else:
        group = getattr(pg_collection, "cp", None)
    if group is None or group.size() != size:
        found = "missing" if group is None else f"of {group.size()} ranks"
        raise ValueError(
            f"MLACoreAttention: context_parallel_size={size} and the context-parallel group is {found}; pass a "
            "pg_collection with cp, or call initialize_model_parallel(context_parallel_size=...) first"
        )
    return group


def check_layer(cp_comm_type: str, attention_dropout: float) -> None:
    """Check the options of a layer with context parallelism.

    Raises:
        ValueError: another exchange than those of ``mla_plugin.attention``, or dropout.
    """
    if cp_comm_type not in WAYS:
        raise ValueError(
            f"MLACoreAttention: cp_comm_type={cp_comm_type!r}, expected {', '.join(map(repr, WAYS))}; set "
            "config.cp_comm_type (--cp-comm-type) to one of them"
        )
    if attention_dropout:
        raise ValueError(
            f"MLACoreAttention: attention_dropout={attention_dropout} with context parallelism, expected 0; set "
            "config.attention_dropout (--attention-dropout) to 0.0"
        )


def group_of_call(params: PackedSeqParams | None, group_of_layer: ProcessGroup | None) -> ProcessGroup | None:
    """The ranks that share the sequences of one call: a packed batch may have its own group, or none.

    Raises:
        ValueError: ``local_cp_size`` is not that of the group.
    """
    group, size = getattr(params, "cp_group", None), getattr(params, "local_cp_size", None)
    if group is None and size is None:
        return group_of_layer
    found = 1 if group is None else group.size()
    if size is not None and size != found:
        given = "no cp_group" if group is None else f"a cp_group of {found} ranks"
        raise ValueError(
            f"packed_seq_params.local_cp_size={size} with {given}; give a packed_seq_params.cp_group of as many ranks, "
            "or neither"
        )
    return group if found > 1 else None


def check_mask(mask_type: str, *, is_packed: bool) -> None:
    """Check that the mask needs no mask tensor, which context parallelism does not support.

    Raises:
        ValueError: ``padding`` or ``arbitrary`` in a batch that is not packed.
    """
    if not is_packed and mask_type in ("padding", "arbitrary"):
        raise ValueError(
            f"attn_mask_type={mask_type} with context parallelism: attention_mask would have to be cut by ranks; use "
            "causal, or packed sequences (packed_seq_params) in place of padding"
        )


def tokens_on_a_rank(seqlen: int, size: int) -> int:
    """Number of tokens of a sequence on each rank.

    Raises:
        ValueError: the sequence cannot be divided.
    """
    if seqlen % (2 * size):
        raise ValueError(f"seqlen={seqlen} over {size} context-parallel ranks; expected a multiple of {2 * size}")
    return seqlen // size
