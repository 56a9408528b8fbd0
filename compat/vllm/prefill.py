"""Prefill of vLLM's MLA layers: expanded keys and values, packed, by ``mla_plugin.attention``.

vLLM splits the context that is already in the cache (chunked prefill, prefix caching) into chunks, and merges the
outputs of the chunks and of the new tokens by their log-sum-exp.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from vllm import envs
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

import mla_plugin
from mla_plugin.compat.vllm import releases

HAS = releases.installed()


class _Packed(NamedTuple):
    """Lengths of the requests side by side in q, and in k and v: int32 [B + 1], and the longest of each."""

    query_start_loc: torch.Tensor
    cu_seq_lens: torch.Tensor
    max_query_len: int
    max_seq_len: int


class MLAPluginPrefillBackend(MLAPrefillBackend):  # type: ignore[misc]
    """Attention of a prefill's new tokens, among themselves and to chunks of their context."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]

    @staticmethod
    def get_name() -> str:
        """The name in logs, wherever the class is registered."""
        return "MLA_PLUGIN"

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        """Ampere and newer; None where there is no such thing, on a CPU."""
        return device_capability is None or tuple(device_capability)[:2] >= (8, 0)

    @classmethod
    def is_available(cls) -> bool:
        """The kernels were not compiled for AMD."""
        return torch.version.hip is None

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Causal attention of each request's new tokens.

        Args:
            q: [T, H, head_dim_qk].
            k: [T, H, head_dim_qk].
            v: [T, H, head_dim_v], with any strides.
            return_softmax_lse: also return the log-sum-exp.
            out, output_scale: never given, because ``supports_out`` and ``supports_quant_output`` are False.

        Returns:
            out [T, H, head_dim_v]; with ``return_softmax_lse`` also lse [H, T], natural log, float32.
        """
        of = self._prefill_metadata
        packed = _Packed(of.query_start_loc, of.query_start_loc, of.max_query_len, of.max_query_len)
        return self._run(q, k, v, packed, "padding_causal", return_softmax_lse)

    def run_prefill_context_chunk(
        self,
        *,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        chunk: Any = None,
        chunk_idx: int | None = None,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the new tokens to a chunk of the context, without a mask.

        Args:
            q: [T, H, head_dim_qk].
            k: [keys of the chunk, H, head_dim_qk].
            v: [keys of the chunk, H, head_dim_v].
            chunk: the chunk, from vLLM 0.28 on; q then has the requests that it covers.
            chunk_idx: before, its place in the metadata; q has all requests, and those without context in the chunk
                give out 0 and lse -inf.
            out: never given.

        Returns:
            out [T, H, head_dim_v] and lse [H, T], natural log, float32.
        """
        packed = chunk if HAS.chunk else self._chunk_at(chunk_idx)
        return self._run(q, k, v, packed, "padding", True)  # type: ignore[return-value]

    def _chunk_at(self, index: int | None) -> _Packed:
        of = self._prefill_metadata
        context = of.chunked_context
        return _Packed(of.query_start_loc, context.cu_seq_lens[index], of.max_query_len, context.max_seq_lens[index])

    def _run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: Any, mask: str, return_lse: bool
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        result = mla_plugin.attention(
            q,
            k,
            v,
            softmax_scale=self.scale,
            qkv_format="thd",
            attn_mask_type=mask,
            cu_seqlens_q=packed.query_start_loc,
            cu_seqlens_kv=packed.cu_seq_lens,
            max_seqlen_q=packed.max_query_len,
            max_seqlen_kv=packed.max_seq_len,
            return_lse=return_lse,
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
        )
        if isinstance(result, tuple):
            out, lse = result
            return out, lse.contiguous()
        return result
