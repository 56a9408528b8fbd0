"""How SGLang's MLA layers call the backend: expanded keys in a prefill, absorbed queries in all other steps."""

from __future__ import annotations

from functools import partial
from typing import Any

from sglang.srt.models.deepseek_common import attention_backend_handler as handlers
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS

from mla_plugin.compat.sglang.refusals import NAME


def register(*, expands_prefixes: bool) -> None:
    """Make the layers of this process ask ``method_of``, and pass absorbed queries in two parts, not concatenated.

    Args:
        expands_prefixes: as for ``method_of``.
    """
    handlers.AttentionBackendRegistry.register(NAME, partial(method_of, expands_prefixes=expands_prefixes))
    if NAME not in FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
        FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(NAME)


def method_of(attn: Any, forward_batch: Any, *, expands_prefixes: bool = True) -> Any:
    """The method of an MLA layer for this step.

    SGLang's rule for ``trtllm_mla`` expands every prefill that it does not capture, the prefix in chunks. Where prefix
    and new tokens fit into one chunk they are expanded together: one call, and nothing to merge.

    Args:
        attn: SGLang's layer.
        forward_batch: of the step.
        expands_prefixes: False: new tokens are absorbed where a request has a prefix.
    """
    method = handlers.handle_attention_trtllm_mla(attn, forward_batch)
    lengths = forward_batch.seq_lens_cpu
    if method is not AttnForwardMethod.MHA_CHUNKED_KV or lengths is None:
        return method
    if not expands_prefixes and any(forward_batch.extend_prefix_lens_cpu or ()):
        return AttnForwardMethod.MLA
    fits = int(lengths.sum()) <= forward_batch.get_max_chunk_capacity()
    return AttnForwardMethod.MHA_ONE_SHOT if fits else method
