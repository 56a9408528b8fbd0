"""Context parallelism: one attention call over tokens that lie on the ranks of a group.

``mla_plugin.attention``, ``latent_attention`` and ``decode`` come here with ``cp_group=``. ``partition`` cuts a batch
as the first two need it, ``interleave`` shares out the tokens of a cache for the third. The other modules are the
parts: ``group`` (ranks), ``sections`` (which queries see which keys), ``transport`` (messages), ``order`` (tokens by
rank and by sequence), ``merge`` (sums of softmaxes), ``agreement`` and ``failure`` (what ranks tell each other), one
module for each way of K and V (``p2p``, ``a2a``, ``all_gather``), ``latent/`` for those of latents, ``decode``, and the
operators that torch.compile sees. docs/context_parallel.md says which way when.
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
