"""FlashMLA's dense decode on the CPU: both forms of its schedule, its demands, and the oracle inside.

Written after ``flash_mla/flash_mla_interface.py`` and ``csrc/api/dense_decode.h`` of deepseek-ai/FlashMLA, SGLang's
``sgl-flash-mla`` and ``sgl_kernel.flash_mla``. What the library would refuse or get wrong fails an assertion: a
schedule of other lengths too. A query that sees no key has lse +inf, and beneath a scale of 7e-4 neither out nor lse is
right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch

from mla_plugin import reference
from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.hooks.types import Platform
from mla_plugin.plugins.flashmla import providers
from tests.plugins.flash_libraries import check_tile_addresses, install
from tests.plugins.judged_for_cuda import JudgedForCuda

LEAST_SCALE = 1e-3 / 1.4426950408889634
FLASH_MLA_REFUSES = MappingProxyType(
    {
        "fp32": "dtype=torch.float32",
        **dict.fromkeys(
            [
                f"ranks={ranks}"
                for ranks in ("256/64", "256/32", "128/64", "96/16", "320/64", "72/8", "640/128", "13/7", "8/8")
            ],
            "kv_lora_rank=",
        ),
        "ranks=512/0": "qk_rope_head_dim=0",
        "ranks=512/32": "qk_rope_head_dim=32",
        "ranks=128/0": "kv_lora_rank=128",
        "contiguous": "page_size=None",
        **{f"page_size={size}": f"page_size={size}" for size in (1, 3, 16, 256)},
        "leftpad": "has_leftpad_kv=True",
        "pair_of_caches": "has_joined_rows=False",
    }
)
"""What the conformance suite must find refused, by its tags."""
made: list[list[int]] = []
"""The lengths of every schedule that was worked out."""


@dataclass
class FlashMLASchedMeta:
    """Of the releases that work it out in the first call."""

    lengths: torch.Tensor | None = None
    config: tuple[Any, ...] | None = None


def earlier_metadata(
    cache_seqlens: torch.Tensor, num_q_tokens_per_head_k: int, num_heads_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    assert num_heads_k == 1
    made.append(cache_seqlens.tolist())
    return torch.tensor([num_q_tokens_per_head_k], dtype=torch.int32), cache_seqlens.clone()


def later_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    return FlashMLASchedMeta(), None


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    softmax_scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_tile_addresses(q, k_cache.squeeze(2))
    assert (q.shape[-1], head_dim_v) == (576, 512)
    assert k_cache.shape[1:] == (64, 1, 576)
    for x in (cache_seqlens, block_table):
        assert x.dtype == torch.int32
    assert cache_seqlens.is_contiguous()
    assert block_table.stride(-1) == 1
    assert block_table.shape[1] > 0
    c_kv, k_rope = k_cache.squeeze(2).split([512, 64], -1)
    found = reference.decode(
        DecodeTensors(
            *q.split([512, 64], -1),
            c_kv,
            k_rope,
            softmax_scale,
            causal=causal and q.shape[1] > 1,
            page_table=block_table,
            seqlens_kv=cache_seqlens,
        )
    )
    assert found.lse is not None
    out = found.out
    if softmax_scale < LEAST_SCALE:
        out = out.masked_fill(found.lse.isneginf().transpose(1, 2)[..., None], 7.0)
        return out.to(q.dtype), found.lse.float().nan_to_num(neginf=-1e27)
    return out.to(q.dtype), found.lse.float().nan_to_num(neginf=torch.inf)


def earlier_call(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor,
    num_splits: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert tile_scheduler_metadata.item() == q.shape[1] * q.shape[2]
    assert torch.equal(num_splits, cache_seqlens)
    assert softmax_scale is not None
    return attend(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal)


def later_call(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert num_splits is None
    assert block_table is not None
    assert cache_seqlens is not None
    assert softmax_scale is not None
    config = (*q.shape[:3], *k_cache.shape[1:3], causal)
    if tile_scheduler_metadata.lengths is None:
        tile_scheduler_metadata.lengths, tile_scheduler_metadata.config = cache_seqlens.clone(), config
        made.append(cache_seqlens.tolist())
    assert torch.equal(tile_scheduler_metadata.lengths, cache_seqlens)
    assert tile_scheduler_metadata.config == config
    return attend(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal)


def frozen_call(*args: Any, enable_batch_invariant: bool = False, use_legacy: bool = False, **options: Any) -> Any:
    """SGLang's package, whose other kernels have no dense decode."""
    assert use_legacy
    assert not enable_batch_invariant
    return later_call(*args, **options)


def sparse_call(*args: Any, enable_batch_invariant: bool = False) -> Any:
    """DeepSeek's releases from 2026-09-30 on."""
    raise AssertionError("Sparse attention is required")


EARLIER, LATER = (earlier_metadata, earlier_call), (later_metadata, later_call)
LIBRARIES: dict[str, tuple[str, tuple[Callable[..., Any], Callable[..., Any]]]] = {
    "flash-mla of 2025": ("flash-mla", EARLIER),
    "flash-mla of 2026": ("flash-mla", LATER),
    "sgl-flash-mla": ("sgl-flash-mla", (later_metadata, frozen_call)),
    "vllm": ("vllm", LATER),
    "sglang-kernel": ("sglang-kernel", EARLIER),
    "sgl-kernel": ("sgl-kernel", EARLIER),
}
"""Name to distribution and functions."""


def hopper(distribution: str = "vllm", version: str = "0.25.1") -> Platform:
    """A machine with one of them."""
    return Platform("cuda", (9, 0), ((distribution, version),), multi_processor_count=132)


def use(monkeypatch: pytest.MonkeyPatch, name: str) -> Platform:
    """Put the emulation where the library would be; a machine that has it."""
    distribution, (metadata, call) = LIBRARIES[name]
    (provider,) = (x for x in providers.PROVIDERS if x.distribution == distribution)
    install(monkeypatch, provider.module, get_mla_metadata=metadata, flash_mla_with_kvcache=call)
    made.clear()
    return hopper(distribution)


class EmulatedFlashMLA(JudgedForCuda):
    """Of a Hopper with vLLM's."""

    @pytest.fixture(autouse=True)
    def _library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        use(monkeypatch, "vllm")

    def platform(self) -> Platform:
        return hopper()
