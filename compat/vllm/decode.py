"""Decode of vLLM's MLA layers: ``forward_mqa`` by ``mla_plugin.decode``, over vLLM's own paged cache.

The layer multiplies by W_UK before and by W_UV after, vLLM writes the new tokens' rows, and lengths and block tables
stay on the device, so that full CUDA graphs cover every step whose requests all have the same number of query tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf

import mla_plugin
from mla_plugin.compat.vllm import releases

HAS = releases.installed()
DTYPES = (torch.bfloat16, torch.float16)
UNQUANTISED = ("auto", "bfloat16", "float16")
CACHE_FORMATS = {"fp8": "fp8", "fp8_e4m3": "fp8"} | ({"fp8_ds_mla": "fp8_ds_mla"} if HAS.packed else {})
"""vLLM's names of quantised caches, and ours."""
CACHE_DTYPES = (*UNQUANTISED, *CACHE_FORMATS)
TOKEN_BYTES = 656
"""Of ``fp8_ds_mla``."""
PAGE_SIZE = 64
MINIMUM_CAPABILITY = (8, 0)

_logger = init_logger("vllm.mla_plugin.decode")


class MLAPluginMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):  # type: ignore[misc]
    """vLLM's metadata, unchanged; steps with the same number of query tokens per request count as decode."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM
    supports_non_causal_multi_token_decode: ClassVar[bool] = HAS.causal

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        # each rank's own lengths do not follow the draft's steps
        self.supports_draft_decode_metadata_update = self.dcp_world_size == 1

    def update_draft_decode_metadata(self, metadata: MLACommonMetadata) -> None:
        """A draft has changed the lengths in place: the layers of its next pass plan anew."""
        _forget_lengths(metadata)


class MLAPluginBackend(MLACommonBackend):  # type: ignore[misc]
    """The properties by which vLLM selects the decode backend."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        """The name in logs, wherever the class is registered."""
        return "MLA_PLUGIN"

    @staticmethod
    def get_impl_cls() -> type[MLAPluginImpl]:
        """Class of each layer's part."""
        return MLAPluginImpl

    @staticmethod
    def get_builder_cls() -> type[MLAPluginMetadataBuilder]:
        """Class that builds a step's metadata."""
        return MLAPluginMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Tokens per page."""
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Pages of 64 unless the user sets another size: vLLM's default of 16 takes up to a quarter more time."""
        return default_block_size if default_block_size % PAGE_SIZE == 0 else PAGE_SIZE

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Before vLLM 0.29: [pages, page_size, columns], in bytes where a token holds its scales."""
        return num_blocks, block_size, TOKEN_BYTES if cache_dtype_str == "fp8_ds_mla" else head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Before vLLM 0.29: pages first, also where all layers share one tensor; any strides of pages are read."""
        return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Ampere and newer; None where there is no such thing, on a CPU."""
        return capability is None or tuple(capability)[:2] >= MINIMUM_CAPABILITY

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """``VLLM_BATCH_INVARIANT=1`` is passed on."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Drafts whose tokens see each other."""
        return bool(HAS.causal)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Whether drafts may be cut to unequal numbers on the device, from vLLM 0.28 on: decode takes equally many."""
        return False

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Reasons with the given and the expected value, besides vLLM's own short ones from the methods above."""
        reasons = _refusals(cls, head_size, dtype, kv_cache_dtype, has_sink, use_sparse, device_capability)
        return "; ".join(reasons) or None


def _refusals(
    backend: type[MLAPluginBackend],
    head_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: str | None,
    has_sink: bool,
    use_sparse: bool,
    capability: Any,
) -> Iterator[str]:
    """No reason for the block size: vLLM's selector looks for its own wording."""
    if torch.version.hip is not None:
        yield "mla-plugin: an AMD device, expected NVIDIA's: the kernels were not compiled for AMD"
    if not backend.supports_compute_capability(capability):
        yield f"mla-plugin: compute capability {capability.major}.{capability.minor}, expected 8.0 or newer"
    if not backend.supports_head_size(head_size):
        sizes = ", ".join(map(str, backend.get_supported_head_sizes()))
        yield f"mla-plugin: head_size={head_size}, expected one of {sizes}, which vLLM's MLA metadata take"
    if dtype not in DTYPES:
        yield f"mla-plugin: dtype={dtype}, expected bfloat16 or float16"
    if kv_cache_dtype not in (None, *CACHE_DTYPES):
        yield (
            f"mla-plugin: kv_cache_dtype={kv_cache_dtype!r}, expected one of {', '.join(CACHE_DTYPES)}; without "
            "MLA_PLUGIN_VLLM_OVERRIDE and --attention-backend vLLM takes its own backend"
        )
    elif kv_cache_dtype == "fp8_ds_mla" and (head_size, dtype) != (576, torch.bfloat16):
        yield (
            f"mla-plugin: kv_cache_dtype='fp8_ds_mla' with head_size={head_size} and dtype={dtype}, expected 576 and "
            "bfloat16, which its tokens are made of: pass fp8"
        )
    elif kv_cache_dtype in UNQUANTISED[1:] and kv_cache_dtype != str(dtype).removeprefix("torch."):
        yield f"mla-plugin: kv_cache_dtype={kv_cache_dtype!r} of a model in {dtype}, expected the same: pass auto"
    if has_sink:
        yield "mla-plugin: attention sinks, expected a plain softmax"
    if use_sparse:
        yield "mla-plugin: sparse attention (DSA), expected dense: there is no sparse kernel"


class MLAPluginImpl(MLACommonImpl[MLACommonMetadata]):  # type: ignore[misc]
    """Decode of one layer."""

    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_arguments: Any,
    ) -> None:
        refused = [
            f"{name}={value!r}, expected {expected}"
            for name, value, expected, is_taken in (
                ("alibi_slopes", alibi_slopes, "None", alibi_slopes is None),
                ("sliding_window", sliding_window, "None", sliding_window is None),
                ("logits_soft_cap", logits_soft_cap, "None or 0", not logits_soft_cap),
                ("attn_type", attn_type, repr(AttentionType.DECODER.value), attn_type == AttentionType.DECODER),
                ("kv_cache_dtype", kv_cache_dtype, " or ".join(CACHE_DTYPES), kv_cache_dtype in CACHE_DTYPES),
            )
            if not is_taken
        ]
        if refused:
            raise NotImplementedError(f"mla-plugin cannot compute this layer: {'; '.join(refused)}")
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_arguments,
        )
        self.supports_quant_query_input = False
        self._batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        if self._batch_invariant:
            _turn_prefix_caching_off()
        _logger.info_once("mla-plugin %s computes MLA decode.", mla_plugin.__version__)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Absorbed attention over the paged cache; the host reads nothing of the device.

        Args:
            q: (q_nope_abs [T, H, R], q_rope [T, H, Dr]) or both as one tensor [T, H, R + Dr]; the T tokens are those
                of B requests, equally many of each. H counts the heads of all ranks that share the cache.
            kv_c_and_k_pe_cache: [pages, page_size, R + Dr], the new tokens' rows included; of ``fp8_ds_mla``
                [pages, page_size, 656].
            attn_metadata: of the step; its ``decode`` has block_table [B, n] and seq_lens [B], int32. A length of 0 is
                a request that pads the batch.
            layer: its ``_k_scale``, float32 on the device, is what a cache in ``fp8`` is multiplied by.

        Returns:
            out [T, H, R] and, where ranks share the cache, lse [T, H], natural log, float32; otherwise None. A query
            that sees no key gives out 0 and lse -inf.

        Raises:
            ValueError: T is no multiple of B.
            NotImplementedError: several query tokens of a request over a cache that ranks share.
        """
        q_nope_abs, q_rope = q if isinstance(q, tuple) else q.split((self.kv_lora_rank, self.qk_rope_head_dim), -1)
        lengths, page_table = _lengths_of(attn_metadata, self), attn_metadata.decode.block_table
        batch, tokens = len(lengths), q_nope_abs.shape[0]
        if tokens % batch:
            raise ValueError(f"{tokens} query tokens of {batch} requests; equally many of each are needed")
        seqlen_q = tokens // batch
        if seqlen_q > 1 and self.dcp_world_size > 1:
            raise NotImplementedError(
                f"{seqlen_q} query tokens of a request with decode context parallelism over {self.dcp_world_size} "
                "ranks; one is expected: a rank does not know which of its keys are before which query"
            )
        kv_format = CACHE_FORMATS.get(self.kv_cache_dtype, "plain")
        result = mla_plugin.decode(
            q_nope_abs.unflatten(0, (batch, seqlen_q)),
            q_rope.unflatten(0, (batch, seqlen_q)),
            kv_c_and_k_pe_cache,
            softmax_scale=self.scale,
            page_table=page_table,
            seqlens_kv=lengths,
            causal=bool(attn_metadata.causal) if HAS.causal else True,
            return_lse=self.need_to_return_lse_for_decode,
            batch_invariant=self._batch_invariant,
            kv_cache_format=kv_format,
            kv_scale=layer._k_scale if kv_format == "fp8" else None,
        )
        if isinstance(result, tuple):
            out, lse = result
            return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1).contiguous()
        return result.flatten(0, 1), None


class _Pass(NamedTuple):
    """A pass over the layers, which all have the same metadata.

    Attributes:
        lengths: one object for all of them, so that the first one plans for all; only the device knows the values.
        layers: those that have had it, by ``id``.
    """

    lengths: mla_plugin.DecodeLengths
    layers: set[int]


_PASS = "_mla_plugin_pass"  # attribute of vLLM's metadata


def _lengths_of(metadata: MLACommonMetadata, layer: MLAPluginImpl) -> mla_plugin.DecodeLengths:
    """The lengths of a step. A layer that comes again begins another pass, before which they may have changed."""
    decode = metadata.decode
    found: _Pass | None = getattr(decode, _PASS, None)
    if found is None or found.lengths.seqlens_kv is not decode.seq_lens or id(layer) in found.layers:
        found = _Pass(mla_plugin.DecodeLengths(seqlens_kv=decode.seq_lens), set())
        setattr(decode, _PASS, found)
    found.layers.add(id(layer))
    return found.lengths


def _forget_lengths(metadata: MLACommonMetadata) -> None:
    if metadata.decode is not None:
        setattr(metadata.decode, _PASS, None)


def _turn_prefix_caching_off() -> None:
    """As vLLM does for TRITON_MLA with batch invariance: a prefix from the cache is summed up apart from new tokens."""
    cache = get_current_vllm_config().cache_config
    if cache is not None and cache.enable_prefix_caching:
        cache.enable_prefix_caching = False
        _logger.warning_once("mla-plugin turns prefix caching off: with it, outputs would depend on what is cached.")
