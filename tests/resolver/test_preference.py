from dataclasses import replace

import pytest
import torch

from mla_plugin.resolver.preference import order, triton_opt_in_obstacles
from tests.requests import A100, CPU, mla_request

BUILTIN = ("triton", "flashinfer", "fa3", "fa4", "fa2", "cudnn", "sdpa")


def tried(request: object, environ: dict[str, str], survivors: tuple[str, ...] | None, **priorities: int) -> list[str]:
    return order(request, A100, environ, survivors, priorities, BUILTIN)


def test_the_cascades_order_is_kept() -> None:
    assert tried(mla_request(), {}, ("cudnn", "fa3", "fa2", "sdpa")) == ["cudnn", "fa3", "fa2", "sdpa"]


def test_nvte_mla_triton_one_puts_triton_first() -> None:
    assert tried(mla_request(), {"NVTE_MLA_TRITON": "1"}, ("cudnn", "sdpa")) == ["triton", "cudnn", "sdpa"]


@pytest.mark.parametrize("text", ["true", "2", "", " 1", "01", "on"])
def test_only_the_string_one_opts_in_and_nothing_raises(text: str) -> None:
    assert tried(mla_request(), {"NVTE_MLA_TRITON": text}, ("cudnn", "sdpa")) == ["cudnn", "sdpa"]


@pytest.mark.parametrize("environ", [{"MLA_PLUGIN_STRICT_TE": "1"}, {}])
def test_transformer_engine_gets_its_own_choice_and_nothing_more(environ: dict[str, str]) -> None:
    host = "direct" if environ else "transformer_engine"
    request = mla_request(host=host)
    assert tried(request, environ, ("cudnn", "sdpa")) == ["cudnn", "sdpa"]
    assert tried(request, environ, ("cudnn",)) == ["cudnn"]
    assert tried(request, {**environ, "NVTE_MLA_TRITON": "1"}, ("cudnn",)) == ["triton", "cudnn"]


def test_the_user_can_switch_the_fallback_off() -> None:
    assert tried(mla_request(), {"NVTE_UNFUSED_ATTN": "0"}, ("cudnn", "sdpa")) == ["cudnn"]


def test_where_the_cascade_does_not_apply_every_builtin_is_asked() -> None:
    names = order(mla_request(device_type="cpu"), CPU, {}, None, {}, BUILTIN)
    assert sorted(names) == sorted(set(BUILTIN) - {"triton"})  # whose interpreter is for tests
    assert names[-1] == "sdpa"


def test_packed_sequences_are_no_case_for_the_opt_in() -> None:
    reasons = triton_opt_in_obstacles(mla_request(qkv_format="thd"), A100)
    assert reasons == ["attn_mask_type=padding_causal", "qkv_format=thd, not bshd or sbhd"]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"fp8": True}, "FP8"),
        ({"dropout_p": 0.1}, "dropout_p=0.1"),
        ({"context_parallel": True}, "context parallelism"),
        ({"bias_type": "alibi"}, "alibi"),
        ({"bias_type": "post_scale_bias", "bias_shape": "1hss"}, "post_scale_bias"),
        ({"attn_mask_type": "padding_causal"}, "padding_causal"),
        ({"attn_mask_type": "arbitrary"}, "arbitrary"),
        ({"window_size": (128, 0)}, "(128, 0)"),
        ({"has_kv_cache": True}, "KV cache"),
        ({"qkv_format": "bhsd"}, "bhsd"),
        ({"head_dim_v": 192}, "192"),
    ],
)
def test_each_condition_of_the_opt_in(changes: dict[str, object], word: str) -> None:
    request = mla_request(**changes)
    reasons = triton_opt_in_obstacles(request, A100)
    assert len(reasons) == 1
    assert word in reasons[0]
    assert tried(request, {"NVTE_MLA_TRITON": "1"}, ("cudnn", "sdpa")) == ["cudnn", "sdpa"]


def test_the_opt_in_holds_for_plain_mla() -> None:
    for changes in ({}, {"qkv_format": "sbhd"}, {"attn_mask_type": "no_mask"}, {"dtype": torch.float32}):
        assert triton_opt_in_obstacles(mla_request(**changes), A100) == []
    assert triton_opt_in_obstacles(mla_request(), CPU) == ["compute capability None < (8, 0)"]
    interpreter = replace(CPU, tools=frozenset({"triton-interpreter"}))
    assert triton_opt_in_obstacles(mla_request(), interpreter) == []
