"""Which decode kernel the backend ``triton`` says will run, without running it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mla_plugin import Platform
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.types import Accepted
from mla_plugin.plugins.triton import decode
from tests.requests import A100, H100

REQUEST = DecodeRequest(torch.bfloat16, "cuda", 64, 1, 128, 512, 64, 4096, page_size=64, has_seqlens_kv=True)


def note(platform: Platform, **changes: object) -> str:
    accepted = decode.select(REQUEST.replace(**changes), platform)
    assert isinstance(accepted, Accepted)
    assert all(name.startswith("not by the ") for name in accepted.notes[1:])
    return accepted.notes[0]


@pytest.mark.parametrize(
    "changes",
    [
        *({}, {"page_size": None}, {"seqlen_q": 4, "num_heads": 16, "causal": True}),
        *({"page_size": 1}, {"page_size": 96}, {"kv_cache_format": "fp8", "return_lse": True}),
        *({"kv_cache_format": "fp8", "page_size": 16}, {"kv_cache_format": "fp8_ds_mla", "page_size": 16}),
    ],
)
def test_the_hopper_kernel(changes: dict) -> None:
    assert note(H100, **changes) == "by the Hopper kernel"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "torch.float32, the Hopper kernel needs bfloat16 or float16"),
        (
            {"kv_cache_format": "fp8_ds_mla"},
            "kv_cache_format='fp8_ds_mla' with page_size=64, where the Hopper kernel is slower",
        ),
        (
            {"kv_cache_format": "fp8_ds_mla", "page_size": None},
            "kv_cache_format='fp8_ds_mla' with page_size=None, where the Hopper kernel is slower",
        ),
        ({"kv_lora_rank": 256}, "kv_lora_rank=256, qk_rope_head_dim=64, the Hopper kernel needs 512 and 64"),
        ({"qk_rope_head_dim": 0}, "kv_lora_rank=512, qk_rope_head_dim=0, the Hopper kernel needs 512 and 64"),
        (
            {"has_leftpad_kv": True},
            "leftpad_kv, which the Hopper kernel takes with batch_invariant=True alone",
        ),
        *(
            (
                {"batch_invariant": True, "kv_cache_format": "fp8_ds_mla", "page_size": page_size},
                "batch_invariant=True with kv_cache_format='fp8_ds_mla': for some page sizes the Hopper kernel is "
                "slower, and the page size must not decide about the kernel",
            )
            for page_size in (16, 64)
        ),
        (
            {"batch_invariant": True, "has_aligned_rows": False},
            "rows of the cache that do not start on 16 bytes, the Hopper kernel needs them to",
        ),
        (
            {"has_aligned_rows": False},
            "rows of the cache that do not start on 16 bytes, the Hopper kernel needs them to",
        ),
        ({"num_heads": 16}, "16 (query, head) pairs of a sequence, the Hopper kernel needs more than 16"),
    ],
)
def test_the_plain_kernel_and_why(changes: dict, reason: str) -> None:
    assert note(H100, **changes) == f"by the plain kernel: {reason}"


@pytest.mark.parametrize(
    "changes",
    [
        *({}, {"num_heads": 1}, {"num_heads": 16, "seqlen_q": 4, "causal": True}, {"page_size": 1}),
        *({"batch_size": 1, "max_seqlen_kv": 1}, {"kv_cache_format": "fp8"}),
        {"page_size": None, "has_leftpad_kv": True},
    ],
)
def test_every_size_by_the_same_kernel_if_batch_invariant(changes: dict) -> None:
    """Few heads, few keys and left padding, too: the choice of a kernel must not change a bit."""
    assert note(H100, batch_invariant=True, **changes) == "by the Hopper kernel"


def test_another_triton() -> None:
    platform = dataclasses.replace(H100, packages=(("triton", "3.5.1"),))
    assert note(platform) == "by the plain kernel: Triton 3.5.1, the Hopper kernel needs 3.6 or 3.7"


@pytest.mark.parametrize(("batch_size", "max_seqlen_kv"), [(0, 0), (1, 1), (1, 8384), (66, 64)])
def test_few_keys_by_the_same_kernel(batch_size: int, max_seqlen_kv: int) -> None:
    assert note(H100, batch_size=batch_size, max_seqlen_kv=max_seqlen_kv) == "by the Hopper kernel"


@pytest.mark.parametrize("platform", [A100, dataclasses.replace(H100, compute_capability=(10, 0))])
def test_other_gpus_have_one_kernel(platform: Platform) -> None:
    accepted = decode.select(REQUEST, platform)
    assert isinstance(accepted, Accepted)
    assert accepted.notes == ()
