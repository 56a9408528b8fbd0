"""Megatron-Core: the core attention of its layers, for Multi-head Latent Attention with and without TransformerEngine.

Three ways to use it, from the most explicit to the least:

- ``MLACoreAttention`` is a ``core_attention`` for a layer spec: ``with_core_attention(spec)`` inserts it;
- ``mla_gpt_layer_spec()`` is Megatron's own local spec of an MLA GPT layer with it, which needs no TransformerEngine;
- ``register()`` inserts it into every dense MLA layer that is built afterwards, whatever spec the program uses.

What differs between the supported versions of Megatron-Core:

========================  ==================  ========================  ==============================================
                          0.16, 0.17          0.18                      0.19
========================  ==================  ========================  ==============================================
V of a packed batch       its own width       zeros appended up to q's  as 0.18 (Megatron-LM PR #3003)
                                              width, output trimmed
sparse (DSA) layers of a  none                ``MLASelfAttention``      ``AbsorbedMLASelfAttention``
hybrid model
dense MLA layers next to the configuration   the configuration         the spec decides for each layer
sparse ones               decides for all     decides for all
``pad_between_seqs`` of   none                none                      followed
a packed batch
========================  ==================  ========================  ==============================================

With DeepSeek-V3's head dimensions the zeros add a sixth of the FLOPs (Megatron-LM issue #6240). The module knows the
true width from its constructor: it removes the zeros and returns the true width, which Megatron's trimming accepts.
After ``register()`` they are not appended at all.

Sources: ``TEDotProductAttention`` and ``DotProductAttention`` of Megatron-Core, whose constructor and call these are.
"""

from __future__ import annotations

from packaging.version import Version

MINIMUM_VERSION = "0.16"

try:
    import megatron.core
except ImportError as error:
    raise ImportError(
        f'mla_plugin.compat.megatron needs megatron-core >= {MINIMUM_VERSION}: pip install "mla-plugin[megatron]"'
    ) from error

if Version(megatron.core.__version__) < Version(MINIMUM_VERSION):
    raise ImportError(
        f"megatron-core {megatron.core.__version__} is installed, mla_plugin needs >= {MINIMUM_VERSION}: "
        "pip install --upgrade megatron-core"
    )

from mla_plugin.compat.megatron.core_attention import MLACoreAttention  # noqa: E402 - after the version is known
from mla_plugin.compat.megatron.registration import register  # noqa: E402
from mla_plugin.compat.megatron.specs import mla_gpt_layer_spec, with_core_attention  # noqa: E402

__all__ = ["MINIMUM_VERSION", "MLACoreAttention", "mla_gpt_layer_spec", "register", "with_core_attention"]
