"""FlashAttention 4: conformance over its emulation, refusals on hypothetical platforms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_plugin import Platform
from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.hooks.attention import Plan, Residuals
from mla_plugin.hooks.types import Accepted, Refused
from mla_plugin.plugins import fa4
from tests.plugins import flash_attention_4 as library
from tests.plugins.flash_libraries import install
from tests.plugins.flash_on_cpu import REFUSES, FlashConformance, manager_on
from tests.plugins.test_fa2 import PADDED, WIDE
from tests.plugins.test_sdpa import NanPadding
from tests.requests import mla_request


def cuda_platform(capability: tuple[int, int], version: str | None = "4.0.0b36", **others: str) -> Platform:
    packages = {} if version is None else {"flash-attn-4": version}
    packages |= {name.replace("_", "-"): found for name, found in others.items()}
    return Platform("cuda", capability, tuple(packages.items()), (9, 13, 0), "13.0")


H100, B200, RTX = cuda_platform((9, 0)), cuda_platform((10, 0)), cuda_platform((12, 0))
GROUPED = {"gqa training head_dim_qk!=head_dim_v": "grouped heads with equal head dims only"}
DIMS = {
    "head_dims=192/256": "expected on Hopper head_dim_v up to head_dim_qk",
    "head_dims=24/40": "expected on Hopper head_dim_v up to head_dim_qk",
    "head_dims=136/200": "expected on Hopper head_dim_v up to head_dim_qk",
    "head_dims=40/24 training": "the kernel's dQ has 48 columns",
    "head_dims=8/8 training": "the kernel's dQ has 16 columns",
    "head_dims=16/16 training": "the kernel's dQ has 16 columns",
    "head_dims=80/64 training": "the kernel's dQ has 80 columns",
    "head_dims=64/32 training": "rounded to 64/32",
    "head_dims=32/32 training": "rounded to 32/32",
    "head_dims=24/16 training": "rounded to 32/16",
}


class TestFlashAttn4(FlashConformance):
    backend = "fa4"
    may_refuse = REFUSES | PADDED | WIDE | GROUPED | DIMS
    manager = manager_on("fa4", fa4, H100)

    @pytest.fixture(autouse=True)
    def _library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, "flash_attn.cute.interface", **library.MEMBERS)


class TestFlashAttn4WithNanPadding(NanPadding, TestFlashAttn4):
    quick = True


TRAINING = {"is_training": True}
THD = {"qkv_format": "thd", "attn_mask_type": "padding_causal"}
EQUAL_256 = {"head_dim_qk": 256, "head_dim_v": 256}
BOTTOM_RIGHT = {"attn_mask_type": "causal_bottom_right", "bottom_right_diagonal": True}


@pytest.mark.parametrize(
    ("platform", "changes", "reasons"),
    [
        (H100, TRAINING, []),
        (B200, TRAINING, []),
        (B200, TRAINING | {"num_kv_heads": 4}, []),
        (H100, {"num_kv_heads": 4}, []),
        (H100, TRAINING | {"num_kv_heads": 4, "head_dim_qk": 128}, []),
        (H100, TRAINING | {"deterministic": True}, []),
        (H100, THD, []),
        (H100, {"head_dim_qk": 256, "head_dim_v": 128}, []),
        (B200, EQUAL_256, []),
        (B200, {"head_dim_qk": 64, "head_dim_v": 512}, []),
        (RTX, {"head_dim_qk": 128}, []),
        (cuda_platform((9, 0), None), {}, ["flash-attn-4 is not installed"]),
        (cuda_platform((9, 0), "4.0.0b4"), {}, ["flash-attn-4 4.0.0b4 < 4.0.0b5"]),
        (
            cuda_platform((9, 0), "4.0.0b24", nvidia_cutlass_dsl="4.6.1"),
            {},
            ["flash-attn-4 4.0.0b24 with nvidia-cutlass-dsl 4.6.1 < 4.6.2"],
        ),
        (cuda_platform((9, 0), "4.0.0b24", nvidia_cutlass_dsl="4.6.2"), {}, []),
        (cuda_platform((8, 0)), {"head_dim_qk": 128}, ["compute_capability=(8, 0), expected (9, 0)"]),
        (Platform(packages=H100.packages), {"device_type": "cpu", "head_dim_qk": 128}, ["device_type='cpu'"]),
        (Platform(packages=H100.packages), {"head_dim_qk": 128}, ["device_type='cpu', expected 'cuda'"]),
        (H100, {"head_dim_qk": 576, "head_dim_v": 512}, ["head_dim_qk=576, head_dim_v=512 on"]),
        (H100, {"head_dim_qk": 100}, ["expected multiples of 8"]),
        (RTX, {}, ["head_dim_qk=192, head_dim_v=128 on compute_capability=(12, 0), expected at most 128 each"]),
        (RTX, {"head_dim_qk": 576, "head_dim_v": 512}, ["expected at most 128 each"]),
        (B200, {"head_dim_qk": 192, "head_dim_v": 192}, ["or exactly 192 and 128"]),
        (B200, {"head_dim_qk": 512, "head_dim_v": 512}, ["or exactly 256 and 256"]),
        (
            cuda_platform((10, 0), "4.0.0b8"),
            {"head_dim_qk": 64, "head_dim_v": 512},
            ["with flash-attn-4 4.0.0b8 < 4.0.0b9"],
        ),
        (B200, TRAINING | {"head_dim_qk": 64, "head_dim_v": 512}, ["the backward takes head_dim_v up to 256"]),
        (B200, TRAINING | {"head_dim_qk": 128, "head_dim_v": 96}, ["stores dV in steps that miss its end"]),
        (B200, TRAINING | {"head_dim_qk": 128, "head_dim_v": 64}, []),
        (B200, EQUAL_256 | BOTTOM_RIGHT | {"max_seqlen_kv": 4096}, ["max_seqlen_kv=4096"]),
        (B200, EQUAL_256 | {"window_size": (64, 0)}, ["window_size=(64, 0)"]),
        (B200, TRAINING | EQUAL_256 | {"deterministic": True}, ["deterministic=True in training"]),
        (RTX, TRAINING | {"head_dim_qk": 128, "deterministic": True}, ["deterministic=True in training"]),
        (H100, TRAINING | {"num_kv_heads": 4}, ["num_heads=16, num_kv_heads=4 on compute_capability=(9, 0)"]),
        (H100, THD | {"pad_between_seqs": True}, ["pad_between_seqs=True"]),
        (H100, {"attn_mask_type": "padding_causal"}, ["expected qkv_format='thd'"]),
        (H100, {"has_kv_cache": True, "page_size": 64}, ["has_kv_cache=True"]),
        (H100, {"dropout_p": 0.1}, ["dropout_p=0.1"]),
        (H100, {"max_seqlen_kv": 4096}, ["FlashAttention aligns bottom-right"]),
    ],
)
def test_refusals(platform: Platform, changes: dict[str, Any], reasons: list[str]) -> None:
    decision = fa4.select_backend(mla_request(**changes), platform)
    found = decision.reasons if isinstance(decision, Refused) else ()
    assert len(found) == len(reasons), found
    assert all(expected in reason for reason, expected in zip(found, reasons, strict=True)), found


def dims(head_dim_qk: int, head_dim_v: int, **changes: Any) -> Any:
    return mla_request(head_dim_qk=head_dim_qk, head_dim_v=head_dim_v, **changes)


RIGHT = [(56, 56), (64, 64), (88, 64), (96, 96), (96, 64), (120, 120), (128, 64), (128, 128), (136, 136), (192, 128)]
RIGHT += [(192, 192), (200, 200), (256, 256), (56, 64), (160, 128)]


@pytest.mark.parametrize("pair", RIGHT)
def test_training_on_hopper_where_the_gradients_are_known_to_be_right(pair: tuple[int, int]) -> None:
    assert isinstance(fa4.select_backend(dims(*pair, is_training=True), H100), Accepted)


@pytest.mark.parametrize(
    ("pair", "columns"),
    [
        ((8, 8), (16, 32)),
        ((40, 40), (48, 64)),
        ((48, 48), (48, 64)),
        ((72, 72), (80, 96)),
        ((72, 40), (80, 96)),
        ((72, 64), (80, 96)),
        ((80, 80), (80, 96)),
        ((104, 104), (112, 128)),
        ((112, 64), (112, 128)),
    ],
)
def test_no_training_on_hopper_where_dq_is_wrong(pair: tuple[int, int], columns: tuple[int, int]) -> None:
    """The forward is right; the backward writes dQ as wide as its tile and reads it back as wide as its buffer."""
    assert isinstance(fa4.select_backend(dims(*pair), H100), Accepted)
    decision = fa4.select_backend(dims(*pair, is_training=True), H100)
    assert isinstance(decision, Refused)
    (reason,) = decision.reasons
    assert f"dQ has {columns[0]} columns, its buffer {columns[1]}" in reason
    assert isinstance(fa4.select_backend(dims(*pair, is_training=True), B200), Accepted)


@pytest.mark.parametrize(
    "pair", [(64, 48), (24, 16), (128, 96), (128, 32), (256, 192), (256, 128), (192, 64), (64, 32)]
)
def test_no_training_on_hopper_where_the_backward_is_not_known_to_compile(pair: tuple[int, int]) -> None:
    assert isinstance(fa4.select_backend(dims(*pair), H100), Accepted)
    decision = fa4.select_backend(dims(*pair, is_training=True), H100)
    assert isinstance(decision, Refused)
    (reason,) = decision.reasons
    assert "expected 64/64, 96/64" in reason


@pytest.mark.parametrize("pair", [(64, 72), (40, 72), (64, 256), (192, 256), (128, 192)])
@pytest.mark.parametrize("is_training", [False, True])
def test_values_wider_than_queries_are_refused_on_hopper(pair: tuple[int, int], is_training: bool) -> None:
    decision = fa4.select_backend(dims(*pair, is_training=is_training), H100)
    assert isinstance(decision, Refused)
    (reason,) = decision.reasons
    assert "expected on Hopper head_dim_v up to head_dim_qk" in reason


def test_values_as_wide_as_the_rounded_queries_are_taken_on_hopper() -> None:
    assert isinstance(fa4.select_backend(dims(56, 64), H100), Accepted)


@pytest.mark.parametrize(
    ("capability", "version", "pair", "changes", "reason"),
    [
        ((9, 0), "4.0.0b5", (192, 128), {}, None),
        ((9, 0), "4.0.0b5", (56, 56), {}, None),
        ((9, 0), "4.0.0b29", (160, 128), {}, "with flash-attn-4 4.0.0b29 < 4.0.0b30"),
        ((9, 0), "4.0.0b29", (192, 192), {}, "with flash-attn-4 4.0.0b29 < 4.0.0b30"),
        ((9, 0), "4.0.0b30", (136, 136), {}, None),
        ((9, 0), "4.0.0b30", (192, 192), {"num_kv_heads": 4}, "with flash-attn-4 4.0.0b30 < 4.0.0b31"),
        ((9, 0), "4.0.0b31", (192, 192), {"num_kv_heads": 4}, None),
        ((9, 0), "4.0.0b5", (128, 128), {"num_kv_heads": 4}, None),
        ((9, 0), "4.0.0b30", (256, 256), {}, "with flash-attn-4 4.0.0b30 < 4.0.0b31"),
        ((10, 0), "4.0.0b29", (72, 72), {}, "with flash-attn-4 4.0.0b29 < 4.0.0b30"),
        ((10, 0), "4.0.0b30", (72, 72), {}, None),
        ((10, 0), "4.0.0b29", (96, 72), {}, "with flash-attn-4 4.0.0b29 < 4.0.0b30"),
        ((10, 0), "4.0.0b5", (96, 96), {}, None),
    ],
)
def test_releases_that_came_later(
    capability: tuple[int, int], version: str, pair: tuple[int, int], changes: dict[str, Any], reason: str | None
) -> None:
    """What older releases get wrong in training; the forward is not concerned."""
    decision = fa4.select_backend(dims(*pair, is_training=True, **changes), cuda_platform(capability, version))
    assert isinstance(fa4.select_backend(dims(*pair, **changes), cuda_platform(capability, version)), Accepted)
    if reason is None:
        assert isinstance(decision, Accepted), decision
    else:
        assert isinstance(decision, Refused)
        assert any(reason in found for found in decision.reasons)


def test_what_runs_is_shown() -> None:
    assert fa4.select_backend(mla_request(is_training=True), H100) == Accepted(notes=("flash-attn-4 4.0.0b36",))
    trained = fa4.select_backend(mla_request(is_training=True, return_lse=True), H100)
    assert isinstance(trained, Accepted)
    assert trained.backward_by == "sdpa"


def small() -> tuple[Plan, AttentionTensors]:
    request = mla_request(batch_size=1, num_heads=2, num_kv_heads=2, max_seqlen_q=8, max_seqlen_kv=8)
    q, k, v = (torch.zeros(1, 8, 2, dim, dtype=torch.bfloat16) for dim in (192, 192, 128))
    return Plan(request, H100, "fa4", "fa4"), AttentionTensors(q, k, v, 0.1)


def test_a_gradient_of_lse_is_an_error() -> None:
    plan, tensors = small()
    lse = torch.zeros(1, 2, 8)
    with pytest.raises(ValueError, match="return_lse=True"):
        fa4.backward(plan, Residuals(tensors, tensors.v, lse), tensors.v, lse)


@pytest.mark.parametrize("members", [None, {"flash_attn_func": library.flash_attn_func}])
def test_the_module_of_flash_attn_is_not_taken_for_it(
    members: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if members is not None:
        install(monkeypatch, "flash_attn.cute.interface", **members)
    with pytest.raises(RuntimeError, match="pip install --force-reinstall --no-deps flash-attn-4"):
        fa4.forward(*small())
