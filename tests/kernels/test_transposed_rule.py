"""Which decode calls the transposed kernel takes, and that the backend launches the kernel that it names."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.types import Accepted
from mla_plugin.kernels.decode import launch as decode_launch
from mla_plugin.kernels.decode.transposed import launch as transposed
from mla_plugin.kernels.decode.transposed import rule
from mla_plugin.kernels.decode.transposed.kernel import transposed_decode_kernel
from mla_plugin.kernels.decode.transposed.launch import GIVEN
from mla_plugin.kernels.launch import Launch
from mla_plugin.plugins.triton import decode
from tests.kernels.gathered_cases import call_of
from tests.kernels.gluon.hopper import hopper as hopper
from tests.requests import A100, H100

USUAL: dict[str, Any] = {
    "dtype": torch.bfloat16,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "rows": 16,
    "page_size": 64,
    "kv_cache_format": "fp8",
    "has_leftpad_kv": False,
    "has_aligned_rows": True,
    "batch_invariant": False,
}
REQUEST = DecodeRequest(
    torch.bfloat16, "cuda", 64, 1, 16, 512, 64, 4096, page_size=64, has_seqlens_kv=True, kv_cache_format="fp8"
)
BY_IT = ("by the transposed kernel",)


@pytest.mark.parametrize(
    "changes",
    [
        *({}, {"dtype": torch.float16}, {"rows": 1}, {"rows": 32}),
        *({"page_size": None}, {"page_size": 192}, {"page_size": 1024}, {"page_size": 1}, {"page_size": 48}),
        {"rows": 32, "page_size": 192},
    ],
)
def test_calls_that_it_takes(changes: dict[str, Any]) -> None:
    assert rule.other_kernel_because(**(USUAL | changes)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        *(
            ({"kv_cache_format": name}, f"kv_cache_format={name!r}, the transposed kernel needs 'fp8'")
            for name in ("plain", "fp8_ds_mla")
        ),
        ({"dtype": torch.float32}, "torch.float32, the transposed kernel needs bfloat16 or float16"),
        *(
            (
                {"kv_lora_rank": rank, "qk_rope_head_dim": rope},
                f"kv_lora_rank={rank}, qk_rope_head_dim={rope}, the transposed kernel needs 512 and 64",
            )
            for rank, rope in ((256, 64), (512, 0))
        ),
        ({"rows": 33}, "33 (query, head) pairs of a sequence, the transposed kernel needs at most 32"),
        *(
            (
                {"rows": 17, "page_size": size},
                f"17 (query, head) pairs of a sequence with page_size={size}, the transposed kernel needs at most 16 "
                "or pages of a multiple of 64",
            )
            for size in (1, 32, 96)
        ),
        ({"has_leftpad_kv": True}, "leftpad_kv, which the transposed kernel does not take"),
        ({"batch_invariant": True}, "batch_invariant=True, which the transposed kernel does not take"),
        (
            {"has_aligned_rows": False},
            "rows of the cache that do not start on 16 bytes, the transposed kernel needs them to",
        ),
    ],
)
def test_each_reason_by_itself(changes: dict[str, Any], reason: str) -> None:
    assert rule.other_kernel_because(**(USUAL | changes)) == reason


@pytest.mark.parametrize(
    ("changes", "is_expected"),
    [
        *(({}, True), ({"page_size": None}, True), ({"seqlen_q": 2, "causal": True}, True)),
        *(({"batch_size": 1, "max_seqlen_kv": 1}, True), ({"batch_size": 0}, True)),
        *(({"seqlen_q": 3}, False), ({"page_size": 48}, True), ({"kv_cache_format": "fp8_ds_mla"}, False)),
        *(({"dtype": torch.float32}, False), ({"has_leftpad_kv": True}, False), ({"batch_invariant": True}, False)),
        *(({"kv_cache_format": "plain"}, False), ({"has_aligned_rows": False}, False)),
    ],
)
def test_explain_names_it(changes: dict[str, Any], is_expected: bool) -> None:
    accepted = decode.select(REQUEST.replace(**changes), H100)
    assert isinstance(accepted, Accepted)
    assert (accepted.notes == BY_IT) == is_expected
    is_few_fp8 = {"kv_cache_format", "seqlen_q"}.isdisjoint(changes) or is_expected
    assert any(note.startswith("not by the transposed kernel: ") for note in accepted.notes) == (
        is_few_fp8 and not is_expected
    )


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
@pytest.mark.parametrize(
    ("shape", "page_size", "kv_format", "dtype", "is_expected"),
    [
        ((2, 1, 16, 300), 64, "fp8", torch.bfloat16, True),
        ((2, 1, 16, 300), None, "fp8", torch.float16, True),
        ((2, 4, 8, 300), 128, "fp8", torch.bfloat16, True),
        ((2, 3, 11, 300), 64, "fp8", torch.bfloat16, False),
        ((2, 1, 16, 300), 48, "fp8", torch.bfloat16, True),
        ((2, 1, 17, 300), 48, "fp8", torch.bfloat16, False),
        ((2, 1, 16, 300), 64, "fp8", torch.float32, False),
        ((2, 1, 16, 300), 64, "fp8_ds_mla", torch.bfloat16, False),
        ((2, 1, 16, 300), 64, "plain", torch.bfloat16, False),
    ],
)
def test_the_backend_launches_what_it_says(
    shape: tuple[int, int, int, int],
    page_size: int | None,
    kv_format: str,
    dtype: torch.dtype,
    is_expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, tensors = call_of(shape, page_size, kv_format, dtype, [300, 17])
    launched: list[object] = []
    monkeypatch.setattr(Launch, "__call__", lambda self, *_: launched.append(self.kernel))
    decode.forward(tensors, batch_invariant=False)
    accepted = decode.select(DecodeRequest.of(tensors).replace(device_type="cuda"), H100)
    assert isinstance(accepted, Accepted)
    assert (transposed_decode_kernel in launched) == is_expected
    assert (accepted.notes == BY_IT) == is_expected


@pytest.mark.parametrize(
    ("rows", "tiles", "is_few"), [(16, 1, False), (17, 791, True), (17, 792, False), (32, 1, True), (32, 5000, False)]
)
def test_small_batches_of_more_rows_are_not_its(rows: int, tiles: int, is_few: bool) -> None:
    reason = rule.few_tiles_because(rows, tiles, 132)
    assert (reason is not None) == is_few
    if reason is not None:
        assert reason.startswith(f"{tiles} tiles of 64 keys in 264 parts, the transposed kernel needs 3 in each")


@pytest.mark.usefixtures("hopper")
def test_explain_and_launch_agree_on_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three multiprocessors have six parts, so twelve tiles are enough. A request's keys are a power of two."""
    monkeypatch.setattr(rule, "TILES_OF_A_PART", 2)
    platform = dataclasses.replace(H100, multi_processor_count=3)
    for heads in (16, 20):
        for keys in (256, 512):
            _, tensors = call_of((2, 1, heads, keys), None, "fp8", torch.bfloat16, [keys, 17])
            is_taken = transposed.takes(tensors, decode_launch.device_of(tensors.c_kv.device))
            accepted = decode.select(DecodeRequest.of(tensors).replace(device_type="cuda"), platform)
            assert isinstance(accepted, Accepted)
            assert (accepted.notes == BY_IT) == is_taken == (heads == 16 or keys == 512)


def test_explain_says_why_not() -> None:
    accepted = decode.select(REQUEST.replace(num_heads=20, page_size=48), H100)
    assert isinstance(accepted, Accepted)
    why = (
        "20 (query, head) pairs of a sequence with page_size=48, the transposed kernel needs at most 16 or pages of a "
        "multiple of 64"
    )
    assert accepted.notes == ("by the Hopper kernel", f"not by the transposed kernel: {why}")


@pytest.mark.usefixtures("hopper")
def test_rows_off_16_bytes_are_not_taken() -> None:
    """Nor is another GPU, nor a cache that sequences share, which is gathered, with more than 16 rows."""
    _, tensors = call_of((2, 1, 16, 300), None, "fp8", torch.bfloat16, [300, 17])
    device = decode_launch.device_of(tensors.c_kv.device)
    assert transposed.takes(tensors, device)
    assert not transposed.takes(tensors, device._replace(has_gluon=False))
    whole = tensors.c_kv.new_zeros(2, 300, 1024)
    assert transposed.takes(tensors._replace(c_kv=whole[..., 16:528]), device)
    assert not transposed.takes(tensors._replace(c_kv=whole[..., 8:520]), device)
    narrow = whole.view(-1)[: 2 * 300 * 584].view(2, 300, 584)[..., :512]
    assert not transposed.takes(tensors._replace(c_kv=narrow), device)
    assert not transposed.takes(tensors._replace(k_rope=narrow[..., :64]), device)
    for heads in (16, 17):
        _, tensors = call_of((2, 1, heads, 300), None, "fp8", torch.bfloat16, [300, 17])
        shared = tensors._replace(c_kv=tensors.c_kv[:1].expand(2, -1, -1))
        assert transposed.takes(shared, device) == (heads == 16)


@pytest.mark.usefixtures("hopper")
def test_kernels_of_16_and_of_32_rows_are_told_apart() -> None:
    """Those of a layout are compiled together where no other layout has the same code."""

    def code(heads: int) -> object:
        _, tensors = call_of((2, 1, heads, 300), 64, "fp8", torch.bfloat16, [300, 17])
        launches = decode_launch.make_launches(tensors)
        rows = launches.rounds[0].attend.arguments[transposed_decode_kernel.arg_names.index("ROWS") - len(GIVEN)]
        assert rows == (16 if heads <= 16 else 32)
        return launches.code

    codes = {heads: code(heads) for heads in (15, 16, 17, 20)}
    assert codes[15] == codes[16] != codes[17] == codes[20]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("page_size", "registers"), [(64, 24), (48, 56)])
def test_two_programs_share_the_registers(page_size: int, registers: int) -> None:
    """256 threads of 128 each; the warps that load need fewer."""
    _, tensors = call_of((2, 1, 16, 300), page_size, "fp8", torch.bfloat16, [300, 17])
    attend = decode_launch.make_launches(tensors).rounds[0].attend
    names = transposed_decode_kernel.arg_names[len(GIVEN) :]
    assert attend.options["maxnreg"] == 128
    assert dict(zip(names, attend.arguments, strict=True))["REGISTERS"] == registers
