"""FlashAttention 3: its providers emulated, conformance over each, refusals on hypothetical platforms."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_plugin import Platform
from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.conformance import Case
from mla_plugin.hooks.attention import Plan, Residuals
from mla_plugin.hooks.types import Accepted, Refused
from mla_plugin.kernels.prefill import padding
from mla_plugin.plugins import fa3
from mla_plugin.plugins.fa3 import providers
from tests.plugins import flash_attention_3 as library
from tests.plugins.flash_libraries import install
from tests.plugins.flash_on_cpu import REFUSES, FlashConformance, manager_on
from tests.plugins.test_sdpa import NanPadding
from tests.plugins.test_signatures import RECORDED
from tests.requests import mla_request


def hopper(*packages: tuple[str, str]) -> Platform:
    return Platform("cuda", (9, 0), packages, (9, 13, 0), "13.0")


OWN, VLLM, SGL = hopper(("flash-attn-3", "3.0.0")), hopper(("vllm", "0.25.1")), hopper(("sgl-kernel", "0.3.21"))
DIMS = {
    "head_dims=192/256": "head_dim_v=256",
    "head_dims=136/200": "head_dim_v=200",
    "head_dims=96/64": "head_dim_v=64",
    "head_dims=128/64": "head_dim_v=64",
}
BACKWARD = {
    "deterministic training head_dims=256/256": "expected at most 192",
    "head_dims=64/512 training": "the backward takes at most 256",
}
NO_BACKWARD = {"training": "is_training=True"}
NO_WINDOWS = {"window": "with vllm, whose kernel leaves tiles of a window unmasked"}


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A build that has registered them; its module's functions are not looked at."""
    install(monkeypatch, "flash_attn_interface")
    operators = torch.library.Library("flash_attn_3", "DEF")
    for name, kernel in (("fwd", library.operator_forward), ("bwd", library.operator_backward)):
        operators.define(name + list(RECORDED["fa3"][f"flash_attn_3::{name}"])[-1])
        operators.impl(name, kernel, "CPU")
    yield
    operators._destroy()


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flash_attn_interface", **library.OLDER)


@pytest.fixture
def sgl(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "sgl_kernel.flash_attn", flash_attn_varlen_func=library.sgl_flash_attn_varlen_func)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install(monkeypatch, "vllm.vllm_flash_attn")
    with library.vllm_operator():
        yield


@pytest.mark.usefixtures("operators")
class TestFlashAttn3(FlashConformance):
    backend = "fa3"
    may_refuse = REFUSES | DIMS | BACKWARD
    manager = manager_on("fa3", fa3, OWN)


class TestFlashAttn3WithNanPadding(NanPadding, TestFlashAttn3):
    quick = True


@pytest.mark.usefixtures("older")
class TestOlderFlashAttn3(FlashConformance):
    backend = "fa3"
    may_refuse = REFUSES | DIMS | BACKWARD
    manager = manager_on("fa3", fa3, OWN)
    quick = True

    def cases(self) -> tuple[Case, ...]:
        return tuple(case for case in super().cases() if case.is_packed or case.has_padding)


@pytest.mark.usefixtures("sgl")
class TestSglKernel(FlashConformance):
    """Dense cases too, which it gets laid end to end."""

    backend = "fa3"
    may_refuse = REFUSES | DIMS | NO_BACKWARD
    manager = manager_on("fa3", fa3, SGL)
    quick = True


@pytest.mark.usefixtures("vllm")
class TestVllm(FlashConformance):
    """Dense cases too, which it gets with the lengths of their rows."""

    backend = "fa3"
    may_refuse = REFUSES | DIMS | NO_BACKWARD | NO_WINDOWS
    manager = manager_on("fa3", fa3, VLLM)
    quick = True


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        ((), None),
        ((("sgl-kernel", "1"),), "sgl-kernel"),
        ((("sgl-kernel", "1"), ("vllm", "1")), "vllm"),
        ((("flash-attn-3", "3.0.0"), ("sgl-kernel", "1"), ("vllm", "1")), "flash-attn-3"),
        ((("flash-attn", "2.8.3"), ("flash-attn-4", "4.0.0b36")), None),
    ],
)
def test_providers_are_looked_for_in_this_order(packages: tuple[tuple[str, str], ...], expected: str | None) -> None:
    provider = providers.find(hopper(*packages))
    assert (provider and provider.distribution) == expected


@pytest.mark.parametrize(
    ("platform", "changes", "reasons"),
    [
        (OWN, {}, []),
        (OWN, {"is_training": True, "num_heads": 64, "num_kv_heads": 4}, []),
        (OWN, {"qkv_format": "thd", "attn_mask_type": "padding_causal", "pad_between_seqs": True}, []),
        (OWN, {"attn_mask_type": "padding_causal"}, []),
        (OWN, {"attn_mask_type": "causal_bottom_right", "bottom_right_diagonal": True, "max_seqlen_kv": 4096}, []),
        (OWN, {"head_dim_qk": 64, "head_dim_v": 512}, []),
        (OWN, {"head_dim_qk": 256, "head_dim_v": 256, "is_training": True}, []),
        (OWN, {"head_dim_qk": 192, "head_dim_v": 192, "is_training": True, "deterministic": True}, []),
        (OWN, {"head_dim_qk": 256, "head_dim_v": 256, "deterministic": True}, []),
        (VLLM, {}, []),
        (SGL, {}, []),
        (hopper(), {}, ["none of flash-attn-3, vllm, sgl-kernel"]),
        (VLLM, {"is_training": True}, ["vllm has no backward"]),
        (SGL, {"is_training": True}, ["sgl-kernel has no backward"]),
        (Platform(packages=OWN.packages), {}, ["device_type='cpu', expected 'cuda'"]),
        (OWN, {"device_type": "cpu"}, ["device_type='cpu', expected 'cuda'"]),
        (Platform("cuda", (10, 0), OWN.packages), {}, ["compute_capability=(10, 0), expected (9, 0)"]),
        (Platform("cuda", (8, 0), OWN.packages), {}, ["compute_capability=(8, 0)"]),
        (OWN, {"head_dim_qk": 100, "head_dim_v": 100}, ["head_dim_qk=100, head_dim_v=100, expected multiples"]),
        (OWN, {"head_dim_qk": 60, "head_dim_v": 36}, ["head_dim_qk=60, head_dim_v=36, expected multiples of 8"]),
        (OWN, {"head_dim_qk": 256}, ["head_dim_qk=256, head_dim_v=128"]),
        (OWN, {"head_dim_qk": 576, "head_dim_v": 512}, ["head_dim_qk=576"]),
        (OWN, {"head_dim_qk": 64, "head_dim_v": 512, "is_training": True}, ["in training, the backward takes at most"]),
        (
            OWN,
            {"head_dim_qk": 208, "head_dim_v": 208, "is_training": True, "deterministic": True},
            ["head_dim_qk=208, head_dim_v=208, expected at most 192"],
        ),
        (VLLM, {"window_size": (512, 0)}, ["window_size=(512, 0) with vllm, whose kernel leaves tiles"]),
        (VLLM, {"attn_mask_type": "no_mask", "window_size": (-1, 7)}, ["window_size=(-1, 7) with vllm"]),
        (VLLM, {"attn_mask_type": "no_mask", "window_size": (-1, -1)}, []),
        (SGL, {"window_size": (512, 0)}, []),
        (OWN, {"window_size": (512, 0)}, []),
        (OWN, {"dropout_p": 0.1}, ["dropout_p=0.1"]),
        (OWN, {"bias_type": "alibi"}, ["bias_type='alibi'"]),
        (OWN, {"bias_type": "post_scale_bias", "bias_shape": "1hss"}, ["bias_type='post_scale_bias'"]),
        (OWN, {"dtype": torch.float32}, ["dtype=torch.float32"]),
        (OWN, {"attn_mask_type": "arbitrary", "window_size": (-1, -1)}, ["attn_mask_type='arbitrary'"]),
        (OWN, {"batch_size": 0}, ["batch_size=0"]),
        (OWN, {"max_seqlen_kv": 4096}, ["max_seqlen_kv=4096: FlashAttention aligns bottom-right"]),
        (
            OWN,
            {
                "attn_mask_type": "no_mask",
                "window_size": (64, 64),
                "bottom_right_diagonal": False,
                "max_seqlen_kv": 4096,
            },
            ["window_size=(64, 64) aligned top-left"],
        ),
        (
            OWN,
            {"qkv_format": "thd", "attn_mask_type": "padding_causal", "lengths_may_differ": True},
            ["pass one tensor as cu_seqlens_q and cu_seqlens_kv"],
        ),
        (OWN, {"fp8": True, "num_splits": 2}, ["fp8=True", "num_splits=2"]),
    ],
)
def test_refusals(platform: Platform, changes: dict[str, Any], reasons: list[str]) -> None:
    decision = fa3.select_backend(mla_request(**changes), platform)
    found = decision.reasons if isinstance(decision, Refused) else ()
    assert len(found) == len(reasons), found
    assert all(expected in reason for reason, expected in zip(found, reasons, strict=True)), found


def test_what_runs_is_shown() -> None:
    assert fa3.select_backend(mla_request(), VLLM) == Accepted(notes=("vllm 0.25.1",))
    trained = fa3.select_backend(mla_request(is_training=True, return_lse=True), OWN)
    assert isinstance(trained, Accepted)
    assert trained.backward_by == "sdpa"


def small(platform: Platform = OWN) -> tuple[Plan, AttentionTensors]:
    request = mla_request(batch_size=1, num_heads=2, num_kv_heads=1, max_seqlen_q=8, max_seqlen_kv=8, is_training=True)
    q, k, v = (torch.zeros(1, 8, heads, dim, dtype=torch.bfloat16) for heads, dim in ((2, 192), (1, 192), (1, 128)))
    return Plan(request, platform, "fa3", "fa3"), AttentionTensors(q, k, v, 0.1)


def test_a_gradient_of_lse_is_an_error() -> None:
    plan, tensors = small()
    lse = torch.zeros(1, 2, 8)
    with pytest.raises(ValueError, match="return_lse=True"):
        fa3.backward(plan, Residuals(tensors, tensors.v, lse), tensors.v, lse)


@pytest.mark.parametrize(("platform", "module"), [(OWN, "flash_attn_interface"), (VLLM, "vllm"), (SGL, "sgl_kernel")])
def test_a_package_that_does_not_import(platform: Platform, module: str) -> None:
    with pytest.raises(RuntimeError, match=rf"{module}.* cannot be imported .*MLA_PLUGIN_BLOCK=fa3"):
        fa3.forward(*small(platform))


def test_a_vllm_without_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "vllm.vllm_flash_attn")
    with pytest.raises(RuntimeError, match=r"vllm_flash_attn has no FlashAttention 3.*MLA_PLUGIN_BLOCK=fa3"):
        fa3.forward(*small(VLLM))


def test_a_plan_of_another_machine() -> None:
    with pytest.raises(RuntimeError, match="no provider of FlashAttention 3"):
        fa3.forward(*small(hopper()))


def test_a_build_that_keeps_lse_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flash_attn_interface", flash_attn_func=lambda q, k, v, softmax_scale, causal, window_size: q)
    with pytest.raises(RuntimeError, match="without the log-sum-exp"):
        fa3.forward(*small())


def test_an_operator_with_other_names_is_an_error() -> None:
    arguments = [SimpleNamespace(name="query", type="Tensor", has_default_value=lambda: False)]
    with pytest.raises(RuntimeError, match="has no argument q"):
        providers.ByPlace(Operator(arguments), ("query", "q"))
    with pytest.raises(RuntimeError, match="has no argument num_splits"):
        providers.ByPlace(Operator(arguments), ("query",), num_splits=1)


class Operator:
    """Something with a schema that returns what it is called with."""

    def __init__(self, arguments: list[Any]) -> None:
        self._schema = SimpleNamespace(arguments=arguments)

    def __call__(self, *values: Any) -> dict[str, Any]:
        return {argument.name: value for argument, value in zip(self._schema.arguments, values, strict=True)}


def test_a_longer_schema_is_filled_with_what_changes_nothing() -> None:
    operators = torch.library.Library("mla_plugin_test_fa3", "DEF")
    operators.define(f"{library.VLLM_SCHEMA.removesuffix(') -> Tensor[]')}, bool batch_invariant) -> Tensor[]")
    schema = torch.ops.mla_plugin_test_fa3.fwd.default._schema
    operators._destroy()
    operator = providers.ByPlace(Operator(list(schema.arguments)), ("q", "softmax_scale"), window_size_left=-1)
    operator(2, 0.25)
    filled = operator(1, 0.5)  # nothing is left of the call before
    assert filled["q"] == 1
    assert (filled["softmax_scale"], filled["softcap"], filled["window_size_left"]) == (0.5, 0.0, -1)
    assert (filled["batch_invariant"], filled["num_splits"], filled["cp_world_size"], filled["cp_rank"]) == (0, 1, 1, 0)
    assert filled["s_aux"] is filled["page_table"] is filled["pack_gqa"] is filled["max_seqlen_q"] is None


@pytest.mark.parametrize("attn_mask_type", ["padding", "padding_causal_bottom_right"])
def test_the_host_reads_no_offset(attn_mask_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device there is nothing to read: whatever reads a value raises."""
    seen: dict[str, Any] = {}

    def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.update(options)
        return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)

    monkeypatch.setattr(padding, "write_gaps", lambda *arguments: seen.setdefault("filled", []).append(arguments))
    monkeypatch.setattr(library, "flash_attn_varlen_func", varlen)
    install(monkeypatch, "flash_attn_interface", flash_attn_varlen_func=varlen, _flash_attn_backward=backward)
    request = mla_request(
        qkv_format="thd",
        attn_mask_type=attn_mask_type,
        bottom_right_diagonal=True,
        pad_between_seqs=True,
        lengths_may_differ=True,
        is_training=True,
    )
    q, k, v, dout = (torch.empty(64, 16, dim, dtype=torch.bfloat16, device="meta") for dim in (192, 192, 128, 128))
    offsets = [torch.empty(3, dtype=torch.int32, device="meta") for _ in range(4)]
    tensors = AttentionTensors(q, k, v, 0.1, *offsets)
    plan = Plan(request, OWN, "fa3", "fa3")
    output = fa3.forward(plan, tensors)
    fa3.backward(plan, Residuals(tensors, output.out, output.lse), dout, None)
    assert seen["cu_seqlens_q"] is offsets[2]
    assert seen["cu_seqlens_k"] is offsets[3]
    assert seen["seqused_q"].shape == seen["seqused_k"].shape == (2,)
    assert seen["seqused_q"].dtype == torch.int32
    assert len(seen["filled"]) == 10  # v, out, lse of the forward; dout, q, k, v, dq, dk, dv of the backward


def backward(*arguments: Any) -> None:
    """Takes what the newer library takes."""
    assert len(arguments) == len(inspect.signature(library._flash_attn_backward).parameters) - 1  # not sm_margin
