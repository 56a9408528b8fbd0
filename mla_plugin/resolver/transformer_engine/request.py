"""Converts our request and platform to the inputs of TransformerEngine's selection."""

from __future__ import annotations

from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.hooks.types import Platform
from mla_plugin.resolver.transformer_engine.flash import DISTRIBUTIONS, compared_version
from mla_plugin.resolver.transformer_engine.release import nearest_release, read_release


def te_params(request: AttentionRequest) -> dict[str, object]:
    """The request as TransformerEngine's AttentionParams by field; ``bhsd``, which it lacks, becomes ``bshd``."""
    letters = "bshd" if request.qkv_format == "bhsd" else request.qkv_format
    cache = {"is_paged": request.page_size is not None, "page_size": request.page_size}
    return {
        "qkv_dtype": str(request.dtype).removeprefix("torch."),
        "qkv_layout": request.qkv_layout or f"{letters}_{letters}_{letters}",
        "batch_size": request.batch_size,
        "num_heads": request.num_heads,
        "num_gqa_groups": request.num_kv_heads,
        "max_seqlen_q": request.max_seqlen_q,
        "max_seqlen_kv": request.max_seqlen_kv,
        "head_dim_qk": request.head_dim_qk,
        "head_dim_v": request.head_dim_v,
        "attn_mask_type": request.attn_mask_type,
        "window_size": list(request.window_size),
        "bottom_right_diagonal": request.bottom_right_diagonal,
        "alibi_slopes_shape": None,
        "core_attention_bias_type": request.bias_type,
        "core_attention_bias_shape": request.bias_shape,
        "core_attention_bias_requires_grad": request.bias_requires_grad,
        "pad_between_seqs": request.pad_between_seqs,
        "attention_dropout": request.dropout_p,
        "context_parallel": request.context_parallel,
        "cp_comm_type": request.cp_comm_type,
        "cp_size": request.cp_size,
        "deterministic": request.deterministic,
        "is_training": request.is_training,
        "inference_params": cache if request.has_kv_cache else None,
        "softmax_type": request.softmax_type,
        "return_max_logit": request.return_max_logit,
        "cuda_graph": request.cuda_graph,
        "num_splits": request.num_splits,
        "checkpoint_core_attention": request.checkpoint_core_attention,
        "has_score_mod": request.has_score_mod,
        "has_score_mod_bprop": request.has_score_mod_bprop,
    }


def te_platform(platform: Platform, release: str) -> dict[str, object]:
    """The platform for the selection of a TransformerEngine release; rule 42 answers its cuDNN query."""
    _, minor = read_release(release)
    return {
        "compute_capability": list(platform.compute_capability or (0, 0)),
        "cudnn_version": list(platform.cudnn_version or (0, 0, 0)),
        "flash_attn": {
            backend[-1]: compared_version(backend, platform.version(distribution), minor)
            for backend, distribution in DISTRIBUTIONS.items()
        },
        "nvidia_cutlass_dsl": platform.version("nvidia-cutlass-dsl"),
        "fused_supported": "cudnn",
    }


def installed_release(host: str, platform: Platform) -> str:
    """The release whose rules apply: within TransformerEngine the installed or nearest known one, else the newest."""
    return nearest_release(platform.version("transformer-engine") if host == "transformer_engine" else None)
