"""Context parallelism: one attention call over tokens distributed over the ranks of a group.

``mla_plugin.attention``, ``latent_attention`` and ``decode`` call this package when ``cp_group=`` is given.
``partition`` shards a batch for the first two, ``interleave`` distributes the tokens of a cache for the third. There
is one module per ``cp_comm_type`` for K and V (``p2p``, ``a2a``, ``all_gather``), ``latent/`` for latents, and
``decode``. They share ``group`` (ranks), ``sections`` (which queries see which keys), ``transport`` (messages),
``order`` (tokens by rank and by sequence), ``merge`` (merges softmaxes), and ``agreement`` and ``failure`` (checks
across ranks). docs/context_parallel.md says which ``cp_comm_type`` to choose.
"""

from mla_plugin.context_parallel.failure import ContextParallelError
from mla_plugin.context_parallel.interleave import held_positions, held_tokens
from mla_plugin.context_parallel.partition import packed_position_ids, pad_lengths, position_ids, shard, unshard

__all__ = [
    "ContextParallelError",
    "held_positions",
    "held_tokens",
    "packed_position_ids",
    "pad_lengths",
    "position_ids",
    "shard",
    "unshard",
]
