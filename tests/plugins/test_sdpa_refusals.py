"""What the fallback refuses, and which of its routes it announces."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_plugin import Platform
from mla_plugin.hooks.types import Accepted, Refused
from mla_plugin.plugins import sdpa
from mla_plugin.plugins.sdpa import efficient
from tests.plugins.calls import request

CPU, CUDA = Platform(), Platform("cuda", (9, 0))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device_type": "mps"}, "device_type='mps', expected 'cpu' or 'cuda'"),
        ({"device_type": "cuda"}, "device_type='cuda' on a platform of device_type='cpu'"),
        ({"dtype": torch.float8_e4m3fn}, "dtype=torch.float8_e4m3fn"),
        ({"fp8": True}, "fp8=True"),
        ({"bias_type": "alibi"}, "bias_type='alibi'"),
        ({"dropout_p": 0.1, "cuda_graph": True}, "dropout_p=0.1 with cuda_graph=True"),
        ({"softmax_type": "off-by-one"}, "softmax_type='off-by-one'"),
        ({"has_score_mod": True}, "score_mod=True"),
        ({"has_score_mod_bprop": True}, "score_mod_bprop=True"),
        ({"return_max_logit": True}, "return_max_logit=True"),
        ({"num_splits": 0}, "num_splits=0, expected 1"),
        ({"has_kv_cache": True}, "has_kv_cache=True"),
        ({"context_parallel": True, "cp_size": 4}, "cp_size=4"),
    ],
)
def test_a_refusal_says_what_was_found(changes: dict[str, Any], reason: str) -> None:
    decision = sdpa.select_backend(request(**changes), CPU)
    assert isinstance(decision, Refused)
    assert any(reason in given for given in decision.reasons)


def test_every_reason_is_given() -> None:
    decision = sdpa.select_backend(request(fp8=True, num_splits=2, has_kv_cache=True), CPU)
    assert isinstance(decision, Refused)
    assert len(decision.reasons) == 3


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({}, "CPU flash kernel"),
        ({"dtype": torch.float64}, "CPU flash kernel"),
        ({"window_size": (7, 0)}, "window_size=(7, 0)"),
        ({"attn_mask_type": "no_mask", "window_size": (-1, 3)}, "window_size=(-1, 3)"),
        ({"dropout_p": 0.5, "bias_type": "pre_scale_bias"}, "bias_type='pre_scale_bias', dropout_p=0.5"),
        ({"attn_mask_type": "arbitrary"}, "attn_mask_type='arbitrary'"),
        ({"device_type": "cuda"}, "memory-efficient CUDA kernel"),
        ({"device_type": "cuda", "dtype": torch.bfloat16, "head_dim_qk": 13}, "memory-efficient CUDA kernel"),
        ({"device_type": "cuda", "window_size": (7, 0)}, "memory-efficient CUDA kernel"),
        ({"device_type": "cuda", "dtype": torch.float64}, "dtype=torch.float64"),
        ({"device_type": "cuda", "batch_size": 65_536}, "batch_size=65536 > 65535"),
        ({"device_type": "cuda", "num_heads": 65_600, "num_kv_heads": 65_600}, "num_heads=65600 > 65535"),
    ],
)
def test_the_note_names_the_route(changes: dict[str, Any], note: str) -> None:
    call = request(**changes)
    decision = sdpa.select_backend(call, CUDA if call.device_type == "cuda" else CPU)
    assert isinstance(decision, Accepted)
    assert note in decision.notes[0]


@pytest.mark.parametrize(
    ("changes", "is_taken"),
    [
        ({"window_size": (7, 0), "max_seqlen_kv": 80}, True),
        ({"window_size": (7, 0), "max_seqlen_kv": 50}, False),  # rows whose window is after the last key
        ({"attn_mask_type": "causal_bottom_right", "window_size": (7, 0)}, True),
        ({"attn_mask_type": "causal_bottom_right", "window_size": (7, 0), "max_seqlen_kv": 80}, False),
        ({"attn_mask_type": "padding_causal", "window_size": (7, 0)}, False),
        ({"attn_mask_type": "padding_causal_bottom_right"}, True),
        ({"attn_mask_type": "no_mask", "window_size": (7, 7)}, False),
        ({"attn_mask_type": "no_mask", "window_size": (7, -1)}, False),
    ],
)
def test_windows_that_the_cuda_kernel_computes(changes: dict[str, Any], is_taken: bool) -> None:
    assert efficient.takes_band(request(device_type="cuda", **changes)) == is_taken
