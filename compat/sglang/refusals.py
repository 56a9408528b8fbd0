"""Unsupported server arguments, models and devices, with reasons; checked at start and again with the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from mla_plugin.compat.sglang import releases
from mla_plugin.compat.sglang.releases import SINCE

NAME = "mla_plugin"
"""The backend's name in SGLang."""
DTYPES = (torch.bfloat16, torch.float16)
CACHE_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3")
QUANTISED = torch.float8_e4m3fn
"""Of a cache in ``fp8_e4m3``, and in ``auto`` of a checkpoint that asks for it."""
MINIMUM_CAPABILITY = (8, 0)
PREFIX_CAPABILITY = (8, 9)
"""Where Triton, in which SGLang reads a prefix that is to be expanded, knows e4m3."""
PREFILL_GRAPHS = ("disabled", "tc_piecewise")
"""CUDA graph modes of a prefill that do not capture its attention."""
CHAINS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
"""Speculative algorithms whose drafts are chains if top-k is 1."""
DRAFT_BACKENDS = ("flashinfer", "fa3")
"""Backends for draft models: an MLA layer gives a draft's queries in the two parts that the target's backend takes."""


def raise_if(reasons: Iterable[str]) -> None:
    """Raise ValueError with all reasons, if there are any."""
    refused = list(reasons)
    if refused:
        raise ValueError(f"--attention-backend {NAME} cannot serve this: {'; '.join(refused)}")


def of_arguments(args: Any) -> Iterator[str]:
    """Reasons in SGLang's ``ServerArgs``; an argument that the release does not have is not set."""
    dtype = args.kv_cache_dtype
    if dtype not in CACHE_DTYPES:
        yield f"kv_cache_dtype={dtype!r}, expected one of {', '.join(CACHE_DTYPES)}: the kernels read no other numbers"
    yield from _of_speculation(args)
    if args.attn_cp_size > 1:
        yield f"attn_cp_size={args.attn_cp_size}, expected 1: there is no context parallelism of the prefill"
    if args.dllm_algorithm is not None:
        yield f"dllm_algorithm={args.dllm_algorithm!r}, expected None: diffusion models see later tokens"
    if getattr(args, "dcp_size", 1) > 1 and not releases.installed().shared_cache:
        yield f"dcp_size={args.dcp_size}, expected 1: decode context parallelism needs sglang >= {SINCE.shared_cache}"
    prefill = getattr(getattr(args, "cuda_graph_config", None), "prefill", None)
    graph = getattr(args, "cuda_graph_backend_prefill", None) or getattr(prefill, "backend", "disabled")
    if graph not in PREFILL_GRAPHS:
        yield (
            f"cuda_graph_config[prefill].backend={graph!r}, expected one of {', '.join(PREFILL_GRAPHS)}: a prefill "
            "reads its lengths on the host"
        )


def _of_speculation(args: Any) -> Iterator[str]:
    algorithm = args.speculative_algorithm
    if algorithm is None:
        return
    if algorithm not in CHAINS:
        yield (
            f"speculative_algorithm={algorithm!r}, expected one of {', '.join(CHAINS)}: drafts that are trees have "
            "masks, and the kernels have none"
        )
        return
    if (topk := args.speculative_eagle_topk) is not None and topk > 1:
        yield f"speculative_eagle_topk={topk}, expected 1: a tree of drafts has a mask, and the kernels have none"
    if (draft := args.speculative_draft_attention_backend) not in DRAFT_BACKENDS:
        yield (
            f"speculative_draft_attention_backend={draft!r}, expected one of {', '.join(DRAFT_BACKENDS)}: it verifies "
            "drafts and does not compute them"
        )
    if getattr(args, "dcp_size", 1) > 1:
        yield (
            f"speculation with dcp_size={args.dcp_size}, expected 1: a rank does not know which of its keys are before "
            "which query"
        )


def of_runner(runner: Any) -> Iterator[str]:
    """Reasons in the model, its cache and the device of SGLang's ``ModelRunner``."""
    if not runner.use_mla_backend:
        yield "a model without MLA, or served without it"
        return
    if runner.is_draft_worker:
        yield f"a draft model: pass --speculative-draft-attention-backend {DRAFT_BACKENDS[0]}"
    if runner.dtype not in DTYPES:
        yield f"dtype={runner.dtype}, expected bfloat16 or float16"
    elif runner.kv_cache_dtype not in (runner.dtype, QUANTISED):
        yield (
            f"a cache of {runner.kv_cache_dtype} for a model in {runner.dtype}, expected the same dtype or {QUANTISED}"
        )
    elif getattr(runner.server_args, "dcp_size", 1) > 1 and not expands_prefixes(runner):
        yield (
            f"dcp_size={runner.server_args.dcp_size} with a cache of {QUANTISED} below compute capability 8.9: "
            "prefixes are absorbed there, expected dcp_size=1 or another cache"
        )
    if getattr(runner.model_config.hf_config, "index_topk", None) is not None:
        yield "sparse attention (DSA), expected dense: there is no sparse kernel"
    if getattr(runner.model_config.hf_config, "llama_4_scaling", None) is not None:
        yield "llama_4_scaling, expected none: SGLang scales the queries only for the backends that it names"
    if torch.version.hip is not None:
        yield "an AMD device, expected NVIDIA's: the kernels were not compiled for AMD"
    elif runner.device == "cuda" and (capability := torch.cuda.get_device_capability()) < MINIMUM_CAPABILITY:
        yield f"compute capability {capability[0]}.{capability[1]}, expected 8.0 or newer"


def expands_prefixes(runner: Any) -> bool:
    """SGLang can read prefixes from this cache to expand them: it loads e4m3 in Triton."""
    if runner.kv_cache_dtype != QUANTISED or runner.device != "cuda":
        return True
    return torch.cuda.get_device_capability() >= PREFIX_CAPABILITY


def is_of_one_half(args: Any) -> bool:
    """Prefill or decode has a backend of another name."""
    return _halves(args) != (NAME, NAME)


def is_chosen(args: Any) -> bool:
    """Prefill or decode has this backend."""
    return NAME in _halves(args)


def _halves(args: Any) -> tuple[str | None, str | None]:
    """The names of the backends of prefill and decode."""
    given = (getattr(args, f"{half}attention_backend", None) for half in ("", "prefill_", "decode_"))
    both, prefill, decode = given
    return prefill or both, decode or both
