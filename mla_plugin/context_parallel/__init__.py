"""Context parallelism: one attention call over tokens that lie on the ranks of a group.

``mla_plugin.attention(..., cp_group=)`` comes here. ``partition`` cuts a batch as the calls need it. The other modules
are the parts: ``group`` (ranks), ``sections`` (which queries see which keys), ``transport`` (messages), ``merge`` (sums
of softmaxes), ``agreement`` and ``failure`` (what ranks tell each other), one module for each way (``p2p``, ``a2a``,
``all_gather``), and the operator that torch.compile sees. docs/context_parallel.md says which way when.
"""

from mla_plugin.context_parallel.failure import ContextParallelError
from mla_plugin.context_parallel.partition import packed_position_ids, pad_lengths, position_ids, shard, unshard

__all__ = ["ContextParallelError", "packed_position_ids", "pad_lengths", "position_ids", "shard", "unshard"]
