from dataclasses import replace

import pytest
import torch

from mla_plugin import Platform
from mla_plugin.resolver.preference import order, triton_opt_in_obstacles
from tests.requests import A100, CPU, H100, mla_request

BUILTIN = ("triton", "flashinfer", "fa3", "fa4", "fa2", "cudnn", "sdpa")


def tried(request: object, environ: dict[str, str], survivors: tuple[str, ...] | None, **priorities: int) -> list[str]:
    return order(request, A100, environ, survivors, priorities, BUILTIN)


def test_the_cascades_order_is_kept_and_triton_stands_before_the_fallback() -> None:
    with_package = replace(H100, packages=(("flash-attn", "2.8.3"), ("flash-attn-3", "3.0.0")))
    names = order(mla_request(), with_package, {}, ("cudnn", "fa3", "fa2", "sdpa"), {}, BUILTIN)
    assert names == ["cudnn", "fa3", "fa2", "triton", "sdpa"]


@pytest.mark.parametrize(
    ("platform", "packages", "environ", "outside"),
    [
        (A100, {}, {}, ["triton", "fa2"]),
        (A100, {"flash-attn": "2.8.3"}, {}, ["triton"]),
        (A100, {"flash-attn": "2.9.0"}, {}, ["triton", "fa2"]),
        (A100, {}, {"NVTE_FLASH_ATTN_V2": "0"}, ["triton"]),
        (A100, {}, {"NVTE_FLASH_ATTN": "0"}, ["triton"]),
        (A100, {}, {"NVTE_FLASH_ATTN_V3": "0"}, ["triton", "fa2"]),
        (A100, {}, {"NVTE_MLA_TRITON": "0"}, ["fa2"]),
        (A100, {}, {"MLA_PLUGIN_STRICT_TE": "1"}, []),
        (H100, {"vllm": "0.25.1"}, {}, ["fa3", "triton", "fa2"]),
        (H100, {"sgl-kernel": "0.3.21"}, {}, ["fa3", "triton", "fa2"]),
        (H100, {"vllm": "0.25.1", "flash-attn-3": "3.0.0"}, {}, ["triton", "fa2"]),
        (H100, {"vllm": "0.25.1"}, {"NVTE_FLASH_ATTN_V3": "0"}, ["triton", "fa2"]),
        (CPU, {}, {}, []),
    ],
)
def test_what_transformer_engine_does_not_know_of_is_tried_before_the_fallback(
    platform: Platform, packages: dict[str, str], environ: dict[str, str], outside: list[str]
) -> None:
    """The flash versions that its cascade removed for a reason stay removed."""
    names = order(
        mla_request(), replace(platform, packages=tuple(packages.items())), environ, ("cudnn", "sdpa"), {}, BUILTIN
    )
    assert names == ["cudnn", *outside, "sdpa"]


def test_nvte_mla_triton_one_puts_triton_first() -> None:
    assert tried(mla_request(), {"NVTE_MLA_TRITON": "1"}, ("cudnn", "sdpa")) == ["triton", "cudnn", "fa2", "sdpa"]


@pytest.mark.parametrize("text", ["true", "2", "", " 1", "01", "on"])
def test_only_the_string_one_opts_in_and_nothing_raises(text: str) -> None:
    assert tried(mla_request(), {"NVTE_MLA_TRITON": text}, ("cudnn", "sdpa")) == ["cudnn", "triton", "fa2", "sdpa"]


def test_zero_keeps_triton_off() -> None:
    assert tried(mla_request(), {"NVTE_MLA_TRITON": "0"}, ("sdpa",)) == ["fa2", "sdpa"]


@pytest.mark.parametrize("environ", [{"MLA_PLUGIN_STRICT_TE": "1"}, {}])
def test_transformer_engine_gets_its_own_choice_and_nothing_more(environ: dict[str, str]) -> None:
    host = "direct" if environ else "transformer_engine"
    request = mla_request(host=host)
    assert tried(request, environ, ("cudnn", "sdpa")) == ["cudnn", "sdpa"]
    assert tried(request, environ, ("cudnn",)) == ["cudnn"]
    assert tried(request, {**environ, "NVTE_MLA_TRITON": "1"}, ("cudnn",)) == ["triton", "cudnn"]


def test_the_user_can_switch_the_fallback_off() -> None:
    assert tried(mla_request(), {"NVTE_UNFUSED_ATTN": "0"}, ("cudnn",)) == ["cudnn", "triton", "fa2"]


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
    assert tried(request, {"NVTE_MLA_TRITON": "1"}, ("cudnn", "sdpa")) == ["cudnn", "triton", "fa2", "sdpa"]


def test_the_opt_in_holds_for_plain_mla() -> None:
    for changes in ({}, {"qkv_format": "sbhd"}, {"attn_mask_type": "no_mask"}, {"dtype": torch.float32}):
        assert triton_opt_in_obstacles(mla_request(**changes), A100) == []
    assert triton_opt_in_obstacles(mla_request(), CPU) == ["compute capability None < (8, 0)"]
    interpreter = replace(CPU, tools=frozenset({"triton-interpreter"}))
    assert triton_opt_in_obstacles(mla_request(), interpreter) == []


LOCAL = {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}
"""What Megatron-Core sets for ``attention_backend=local``: no TransformerEngine, its own attention instead."""


@pytest.mark.parametrize(
    ("host", "environ", "names"),
    [
        ("megatron", LOCAL, ["triton", "sdpa"]),
        ("megatron", {**LOCAL, "NVTE_MLA_TRITON": "0"}, ["sdpa"]),
        ("megatron", {**LOCAL, "MLA_PLUGIN_STRICT_TE": "1"}, []),
        ("megatron", {**LOCAL, "NVTE_FUSED_ATTN": "1"}, ["triton"]),
        ("megatron", {**LOCAL, "NVTE_FLASH_ATTN": "1"}, ["triton", "fa2"]),
        ("direct", LOCAL, ["triton"]),
        ("transformer_engine", LOCAL, []),
    ],
)
def test_megatrons_local_attention_is_the_fallback_too(host: str, environ: dict[str, str], names: list[str]) -> None:
    assert tried(mla_request(host=host), environ, ()) == names
