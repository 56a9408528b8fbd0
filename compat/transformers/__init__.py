"""Hugging Face transformers: the attention implementation ``mla_plugin``, for every model of the library.

Importing this module registers an attention function and a mask function under that name, so that
``from_pretrained(..., attn_implementation="mla_plugin")`` and ``model.set_attn_implementation("mla_plugin")`` work.

The mask function describes a batch in the form that costs least:

==========================  ============================  =========================================================
batch                       mask                          runs as
==========================  ============================  =========================================================
causal, nothing padded      None                          causal, the diagonal ends at the last query and key
causal, padding or unused   bool [B, n]                   the tokens of each row moved to the front, with lengths
cache slots
causal over latents, few    int32 [1, 1, 1 or 2, B],      absorbed, over the latents (``latent.attend``)
queries, padding on the     the keys of each row
left or unused slots
causal, packed sequences    bool [B, 1, S_q, S_kv] with   packed (thd); so do ``cu_seq_lens_q`` without a mask
                            an attribute ``packing``
any other pattern           bool [B, 1, S_q, S_kv]        arbitrary mask; so does a 4-D mask of the caller
sparse (DSA) model          additive, of the same shape   arbitrary mask, narrowed by the keys that the layer chose;
                                                          few queries: absorbed, over the latents of those keys
==========================  ============================  =========================================================

A query that sees no key gives 0. Eager attention averages over all values there; such queries are padding in both.

What differs between the supported versions of transformers:

====================  ===================================  ============================================================
                      4.57                                 5.15 and newer
====================  ===================================  ============================================================
queries               ``cache_position``, a tensor         ``q_length`` and ``q_offset``, a tensor for a static cache
packed sequences      found in every batch without mask    found where ``position_ids`` start again
cache of an MLA       expanded K and V                     latents, which ``latent`` takes over
sparse (DSA) models   none                                 pass ``indices``; before they do, they add the mask to other
                                                           scores, or, in newer versions, also take a bool
====================  ===================================  ============================================================

The contract is that of transformers' ``AttentionInterface`` and ``AttentionMaskInterface``.
"""

from __future__ import annotations

from packaging.version import Version

try:
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface
except ImportError as error:
    raise ImportError(
        'mla_plugin.compat.transformers needs transformers >= 4.57: pip install "mla-plugin[transformers]"'
    ) from error

from mla_plugin.compat.transformers.attention import attention_forward
from mla_plugin.compat.transformers.latent import NAME
from mla_plugin.compat.transformers.masks import attention_mask_for
from mla_plugin.compat.transformers.ranks import context_parallel, shard_batch
from mla_plugin.compat.transformers.steps import LatentSteps, latent_steps

MINIMUM_VERSION = "4.57"

__all__ = [
    "MINIMUM_VERSION",
    "NAME",
    "LatentSteps",
    "attention_forward",
    "attention_mask_for",
    "context_parallel",
    "latent_steps",
    "register",
    "shard_batch",
]


def register() -> None:
    """Register ``mla_plugin`` with transformers; calling it again changes nothing.

    Raises:
        ImportError: transformers is older than 4.57.
    """
    if Version(transformers.__version__) < Version(MINIMUM_VERSION):
        raise ImportError(
            f"transformers {transformers.__version__} is installed, mla_plugin needs >= {MINIMUM_VERSION}: "
            "pip install --upgrade transformers"
        )
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask_for)


register()
