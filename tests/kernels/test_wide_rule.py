"""Which decode calls the wide kernel takes, and that the backend launches the kernel that it names."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.types import Accepted
from mla_plugin.kernels.decode import launch as decode_launch
from mla_plugin.kernels.decode.wide import launch as wide
from mla_plugin.kernels.decode.wide import rule
from mla_plugin.kernels.decode.wide.kernel import wide_decode_kernel
from mla_plugin.kernels.decode.wide.launch import GIVEN
from mla_plugin.kernels.launch import Launch
from mla_plugin.plugins.triton import decode
from tests.kernels import gathered_cases
from tests.kernels.gluon.hopper import hopper as hopper
from tests.requests import A100, H100

USUAL: dict[str, Any] = {
    "dtype": torch.bfloat16,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "rows": 64,
    "page_size": 64,
    "kv_cache_format": "fp8",
    "has_leftpad_kv": False,
    "has_aligned_rows": True,
    "batch_invariant": False,
    "return_lse": False,
}
REQUEST = DecodeRequest(
    torch.bfloat16, "cuda", 64, 1, 128, 512, 64, 4096, page_size=64, has_seqlens_kv=True, kv_cache_format="fp8"
)
BY_IT = ("by the wide kernel",)


def call_of(*given: Any, return_lse: bool = False) -> DecodeTensors:
    return gathered_cases.call_of(*given)[1]._replace(return_lse=return_lse)


@pytest.mark.parametrize(
    "changes",
    [*({}, {"rows": 33}, {"rows": 128}, {"rows": 1000}), *({"page_size": None}, {"page_size": 192})],
)
def test_calls_that_it_takes(changes: dict[str, Any]) -> None:
    assert rule.other_kernel_because(**(USUAL | changes)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        *(
            ({"kv_cache_format": name}, f"kv_cache_format={name!r}, the wide kernel needs 'fp8'")
            for name in ("plain", "fp8_ds_mla")
        ),
        *(({"dtype": dtype}, f"{dtype}, the wide kernel needs bfloat16") for dtype in (torch.float16, torch.float32)),
        *(
            (
                {"kv_lora_rank": rank, "qk_rope_head_dim": rope},
                f"kv_lora_rank={rank}, qk_rope_head_dim={rope}, the wide kernel needs 512 and 64",
            )
            for rank, rope in ((256, 64), (512, 0))
        ),
        ({"rows": 32}, "32 (query, head) pairs of a sequence, the wide kernel needs more than 32"),
        *(
            ({"page_size": size}, f"page_size={size}, the wide kernel needs pages of a multiple of 64")
            for size in (1, 32, 96)
        ),
        ({"has_leftpad_kv": True}, "leftpad_kv, which the wide kernel does not take"),
        ({"batch_invariant": True}, "batch_invariant=True, which the wide kernel does not take"),
        (
            {"return_lse": True},
            "return_lse=True, the wide kernel multiplies in e4m3, which is too inexact for the log-sum-exp",
        ),
        ({"has_aligned_rows": False}, "rows of the cache that do not start on 16 bytes, the wide kernel needs them to"),
    ],
)
def test_each_reason_by_itself(changes: dict[str, Any], reason: str) -> None:
    assert rule.other_kernel_because(**(USUAL | changes)) == reason


@pytest.mark.parametrize(
    ("rows", "tiles", "is_few"), [(64, 791, True), (64, 792, False), (65, 395, True), (128, 396, False), (33, 1, True)]
)
def test_small_batches_are_not_its(rows: int, tiles: int, is_few: bool) -> None:
    """Two row tiles of a sequence read each key tile twice."""
    reason = rule.few_tiles_because(rows, tiles, 132)
    assert (reason is not None) == is_few
    if reason is not None:
        assert reason.startswith(f"{tiles} tiles of 64 keys for {-(-rows // 64)} tiles of 64 (query, head) pairs")


@pytest.mark.parametrize(
    ("changes", "is_expected"),
    [
        *(({}, True), ({"page_size": None}, True), ({"seqlen_q": 4, "num_heads": 16, "causal": True}, True)),
        *(({"num_heads": 33}, True), ({"num_heads": 32}, False), ({"page_size": 48}, False)),
        *(({"return_lse": True}, False), ({"dtype": torch.float16}, False), ({"kv_cache_format": "plain"}, False)),
        *(({"batch_invariant": True}, False), ({"has_leftpad_kv": True}, False), ({"has_aligned_rows": False}, False)),
        *(({"batch_size": 1}, False), ({"batch_size": 0}, False)),
    ],
)
def test_explain_names_it(changes: dict[str, Any], is_expected: bool) -> None:
    accepted = decode.select(REQUEST.replace(**changes), H100)
    assert isinstance(accepted, Accepted)
    assert (accepted.notes == BY_IT) == is_expected
    is_many_fp8 = "kv_cache_format" not in changes and changes.get("num_heads") != 32
    says_why_not = any(note.startswith("not by the wide kernel: ") for note in accepted.notes)
    assert says_why_not == (is_many_fp8 and not is_expected)


@pytest.mark.parametrize(
    "platform",
    [
        A100,
        dataclasses.replace(H100, compute_capability=(10, 0)),
        dataclasses.replace(H100, packages=(("triton", "3.5.1"),)),
    ],
)
def test_other_platforms_do_not_have_it(platform: Any) -> None:
    accepted = decode.select(REQUEST, platform)
    assert isinstance(accepted, Accepted)
    assert accepted.notes != BY_IT


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(
    ("shape", "page_size", "kv_format", "dtype", "is_expected"),
    [
        ((2, 1, 64, 300), 64, "fp8", torch.bfloat16, True),
        ((2, 3, 11, 300), None, "fp8", torch.bfloat16, True),
        ((2, 1, 32, 300), 64, "fp8", torch.bfloat16, False),
        ((2, 1, 64, 300), 48, "fp8", torch.bfloat16, False),
        ((2, 1, 64, 300), 64, "fp8", torch.float16, False),
        ((2, 1, 64, 300), 64, "plain", torch.bfloat16, False),
    ],
)
def test_the_backend_launches_what_it_says(
    shape: tuple[int, int, int, int],
    page_size: int | None,
    kv_format: str,
    dtype: torch.dtype,
    is_expected: bool,
    return_lse: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = call_of(shape, page_size, kv_format, dtype, [300, 17], return_lse=return_lse)
    launched: list[object] = []
    monkeypatch.setattr(Launch, "__call__", lambda self, *_: launched.append(self.kernel))
    decode.forward(tensors, batch_invariant=False)
    accepted = decode.select(DecodeRequest.of(tensors).replace(device_type="cuda"), H100)
    assert isinstance(accepted, Accepted)
    is_expected = is_expected and not return_lse
    assert (wide_decode_kernel in launched) == is_expected
    assert (accepted.notes == BY_IT) == is_expected


@pytest.mark.usefixtures("hopper")
def test_explain_and_launch_agree_on_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three multiprocessors need 18 tiles. A request's keys are a power of two."""
    monkeypatch.setattr(rule, "TILES_OF_A_PART", 6)
    platform = dataclasses.replace(H100, multi_processor_count=3)
    for heads in (64, 65):
        for keys in (256, 512, 1024):
            tensors = call_of((2, 1, heads, keys), None, "fp8", torch.bfloat16, [keys, 17])
            is_taken = wide.takes(tensors, decode_launch.device_of(tensors.c_kv.device))
            accepted = decode.select(DecodeRequest.of(tensors).replace(device_type="cuda"), platform)
            assert isinstance(accepted, Accepted)
            assert (accepted.notes == BY_IT) == is_taken == (keys * (heads - 63) > 512)


@pytest.mark.usefixtures("hopper")
def test_rows_off_16_bytes_are_not_taken() -> None:
    """Nor is another GPU."""
    tensors = call_of((2, 1, 64, 300), None, "fp8", torch.bfloat16, [300, 17])
    device = decode_launch.device_of(tensors.c_kv.device)
    assert wide.takes(tensors, device)
    assert not wide.takes(tensors, device._replace(has_gluon=False))
    whole = tensors.c_kv.new_zeros(2, 300, 1024)
    assert wide.takes(tensors._replace(c_kv=whole[..., 16:528]), device)
    assert not wide.takes(tensors._replace(c_kv=whole[..., 8:520]), device)
    narrow = whole.view(-1)[: 2 * 300 * 584].view(2, 300, 584)[..., :512]
    assert not wide.takes(tensors._replace(c_kv=narrow), device)
    assert not wide.takes(tensors._replace(k_rope=narrow[..., :64]), device)


@pytest.mark.usefixtures("hopper")
def test_arguments_are_the_kernels() -> None:
    tensors = call_of((2, 1, 64, 300), 64, "fp8", torch.bfloat16, [300, 17])
    launches = decode_launch.make_launches(tensors)
    ((_, attend, combine),) = launches.rounds
    assert tuple(attend.kernel.arg_names[: len(GIVEN)]) == GIVEN
    assert len(attend.kernel.arg_names) == len(GIVEN) + len(attend.arguments)
    assert combine is not None
    assert not dict(zip(combine.kernel.arg_names[3:], combine.arguments, strict=True))["MIXED"]
