"""Our side of FlashMLA: what is refused and why, how its releases are called, and when a schedule is made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_plugin import reference
from mla_plugin.arguments import decode, layout
from mla_plugin.arguments.decode import DecodeLengths, DecodeTensors
from mla_plugin.hooks.decode import DecodeOutput, DecodePlan, DecodeRequest
from mla_plugin.hooks.types import Accepted, Platform, Refused
from mla_plugin.plugins import flashmla
from mla_plugin.plugins.flashmla import providers
from tests.plugins import flashmla_emulation as emulation
from tests.plugins.flash_libraries import install
from tests.plugins.flashmla_emulation import LIBRARIES, hopper, made, use
from tests.requests import mla_request

PAGE_TABLE = torch.tensor([[3, 1, 4], [5, 8, 2]], dtype=torch.int32)


def request(**changes: Any) -> DecodeRequest:
    return DecodeRequest(
        dtype=torch.bfloat16,
        device_type="cuda",
        batch_size=64,
        seqlen_q=1,
        num_heads=128,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        max_seqlen_kv=4096,
        page_size=64,
        has_seqlens_kv=True,
    ).replace(**changes)


def reasons(call: DecodeRequest, platform: Platform) -> tuple[str, ...]:
    answer = flashmla.select_backend(call, platform)
    return answer.reasons if isinstance(answer, Refused) else ()


@pytest.mark.parametrize("provider", providers.PROVIDERS, ids=lambda provider: provider.distribution)
def test_deepseek_is_taken_whatever_the_host_knows_and_the_provider_named(provider: providers.Provider) -> None:
    found = flashmla.select_backend(request(), hopper(provider.distribution, "0.25.1"))
    assert found == Accepted(notes=(f"{provider.distribution} 0.25.1",))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "dtype=torch.float32, expected bfloat16 or float16"),
        ({"kv_lora_rank": 256}, "kv_lora_rank=256, expected 512"),
        ({"qk_rope_head_dim": 0}, "qk_rope_head_dim=0, expected 64"),
        ({"page_size": None}, "page_size=None, expected pages of 64"),
        ({"page_size": 16}, "page_size=16, expected pages of 64"),
        ({"max_seqlen_kv": 0}, "max_seqlen_kv=0: it reads the first entry of a sequence's pages"),
        ({"has_leftpad_kv": True}, "has_leftpad_kv=True, expected False"),
        ({"has_joined_rows": False}, "has_joined_rows=False: it reads c_kv and k_rope as one row"),
        ({"has_aligned_rows": False}, "has_aligned_rows=False: it reads 16 bytes at a time"),
        ({"batch_size": 4097, "num_heads": 8}, "batch_size=4097 > 4096"),
        (
            {"batch_size": 1, "seqlen_q": 67},
            "seqlen_q=67, num_heads=128: 8576 query rows of a sequence, expected up to 8448, one tile of 64",
        ),
        (
            {"batch_size": 4096, "seqlen_q": 8},
            "batch_size=4096, seqlen_q=8, num_heads=128: 2216689664 elements of partial results > 2147483647",
        ),
        ({"device_type": "cpu"}, "device_type='cpu', expected 'cuda'"),
    ],
)
def test_what_it_cannot_compute_is_refused(changes: dict[str, Any], reason: str) -> None:
    (found,) = reasons(request(**changes), hopper())
    assert found.startswith(reason)


def test_the_largest_that_it_can_compute() -> None:
    assert not reasons(request(batch_size=4096, seqlen_q=7), hopper())
    assert not reasons(request(batch_size=1, seqlen_q=66), hopper())
    assert reasons(request(batch_size=1, seqlen_q=66), replace(hopper(), multi_processor_count=78))


@pytest.mark.parametrize(
    ("packages", "reason"),
    [
        ((), "FlashMLA is not installed: none of flash-mla, sgl-flash-mla, vllm, sglang-kernel, sgl-kernel"),
        ((("vllm", "0.14.1"),), "vllm=0.14.1 < 0.15"),
    ],
)
def test_a_machine_without_it(packages: tuple[tuple[str, str], ...], reason: str) -> None:
    assert reasons(request(), replace(hopper(), packages=packages)) == (reason,)


def test_an_old_vllm_beside_another_provider() -> None:
    platform = replace(hopper(), packages=(("sgl-kernel", "0.3.21"), ("vllm", "0.14.1")))
    assert providers.installed(platform).distribution == "sgl-kernel"


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_dense_decode_is_for_hopper_alone(capability: tuple[int, int]) -> None:
    (reason,) = reasons(request(), replace(hopper(), compute_capability=capability))
    assert reason == f"compute_capability={capability}, expected (9, 0)"


def test_attention_is_refused() -> None:
    answer = flashmla.select_backend(mla_request(), hopper())
    assert isinstance(answer, Refused)
    assert answer.reasons[0].startswith("AttentionRequest, expected DecodeRequest")


def test_a_release_without_dense_decode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        monkeypatch,
        "flash_mla.flash_mla_interface",
        get_mla_metadata=emulation.later_metadata,
        flash_mla_with_kvcache=emulation.sparse_call,
    )
    with pytest.raises(RuntimeError, match=r"flash-mla is installed, but this release of .* has no dense decode"):
        run(call(DecodeLengths([5, 9], device="cpu")), hopper("flash-mla"))


def test_a_module_of_another_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flash_mla.flash_mla_interface")
    with pytest.raises(RuntimeError, match=r"another package's, without flash_mla_with_kvcache: reinstall it"):
        run(call(DecodeLengths([5, 9], device="cpu")), hopper("flash-mla"))


def call(lengths: DecodeLengths | torch.Tensor, **changes: Any) -> DecodeTensors:
    generator = torch.Generator().manual_seed(0)
    seqlen_q = changes.pop("seqlen_q", 1)
    q, cache = (torch.randn(*size, generator=generator).half() for size in ((2, seqlen_q, 16, 576), (9, 64, 576)))
    is_known = isinstance(lengths, DecodeLengths)
    return DecodeTensors(
        *(q[..., :512], q[..., 512:], cache[..., :512], cache[..., 512:]),
        softmax_scale=0.1,
        page_table=PAGE_TABLE,
        seqlens_kv=lengths.seqlens_kv if is_known else lengths,
        lengths=lengths if is_known else None,
    )._replace(**changes)


def run(tensors: DecodeTensors, platform: Platform) -> DecodeOutput:
    return flashmla.forward(DecodePlan(request(), platform, "flashmla"), tensors)


def check(tensors: DecodeTensors, found: DecodeOutput) -> None:
    exact = reference.decode(tensors._replace(lengths=None))
    torch.testing.assert_close(found.out.double(), exact.out, atol=2e-3, rtol=2e-3)
    if tensors.return_lse:
        torch.testing.assert_close(found.lse, exact.lse, atol=1e-5, rtol=1e-5, check_dtype=False)


@pytest.mark.parametrize("name", LIBRARIES)
def test_every_provider_is_called_as_it_wants(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = use(monkeypatch, name)
    for seqlen_q, causal in ((1, False), (3, True), (3, False)):
        tensors = call(DecodeLengths([65, 2], device="cpu"), seqlen_q=seqlen_q, causal=causal, return_lse=True)
        check(tensors, run(tensors, platform))
    assert len(made) == 3


@pytest.fixture(params=["flash-mla of 2025", "vllm"])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Platform:
    return use(monkeypatch, request.param)


def test_the_layers_of_a_step_share_one_schedule(platform: Platform) -> None:
    lengths = DecodeLengths([65, 129], device="cpu")
    for _ in range(4):
        check(call(lengths), run(call(lengths), platform))
    assert made == [[65, 129]]


def test_lengths_that_change_have_a_schedule_of_their_own(platform: Platform) -> None:
    lengths = DecodeLengths([65, 129], device="cpu")
    run(call(lengths), platform)
    lengths.update([1, 70])
    check(call(lengths), run(call(lengths), platform))
    assert made == [[65, 129], [1, 70]]
    assert len(lengths._kept) == 1


def test_lengths_that_only_the_device_knows_have_one_at_each_call(platform: Platform) -> None:
    seqlens_kv = torch.tensor([65, 129], dtype=torch.int32)
    run(call(seqlens_kv), platform)
    seqlens_kv.copy_(torch.tensor([3, 4]))
    check(call(seqlens_kv), run(call(seqlens_kv), platform))
    assert made == [[65, 129], [3, 4]]


@pytest.mark.parametrize(
    ("places", "schedules"), [(((5, 0), (5, 7), (5, 7), (5, 8), (6, 8), (5, 0)), 4), (((5, 0), None, None), 3)]
)
def test_every_graph_and_every_stream_makes_its_own_schedule(
    places: tuple[tuple[int, int] | None, ...], schedules: int, platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that took the schedule of an earlier call would keep it when it is replayed with other lengths."""
    lengths = DecodeLengths([65, 129], device="cpu")
    for place in places:
        monkeypatch.setattr(decode, "stream_and_capture", lambda device, place=place: place)
        run(call(lengths), platform)
    assert len(made) == schedules


@pytest.mark.parametrize("changes", [{"seqlen_q": 2, "causal": True}, {"seqlen_q": 2}])
def test_calls_that_differ_have_schedules_of_their_own(changes: dict[str, Any], platform: Platform) -> None:
    lengths = DecodeLengths([65, 129], device="cpu")
    run(call(lengths, seqlen_q=2, causal=not changes.get("causal", False)), platform)
    run(call(lengths), platform)
    run(call(lengths, **changes), platform)
    assert len(made) == 3


def test_other_heads_have_a_schedule_of_their_own(platform: Platform) -> None:
    lengths = DecodeLengths([65, 129], device="cpu")
    for heads in (16, 4, 16):
        tensors = call(lengths)
        tensors = tensors._replace(q_nope_abs=tensors.q_nope_abs[:, :, :heads], q_rope=tensors.q_rope[:, :, :heads])
        check(tensors, run(tensors, platform))
    assert len(made) == 2


def test_other_lengths_than_those_of_the_object(platform: Platform) -> None:
    lengths = DecodeLengths([65, 129], device="cpu")
    run(call(lengths), platform)
    other = call(lengths, seqlens_kv=torch.tensor([3, 4], dtype=torch.int32))
    check(other, run(other, platform))
    assert made == [[65, 129], [3, 4]]


def test_a_schedule_is_shared_once_its_kernel_has_been_launched(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update during the call ends it, and a failed call leaves none."""
    lengths = DecodeLengths([65, 129], device="cpu")
    decode_of = providers.Provider.decode

    def failing(self: providers.Provider, *arguments: Any) -> Any:
        assert not lengths._kept
        lengths.update([65, 129])
        raise RuntimeError("out of memory")

    def updating(self: providers.Provider, *arguments: Any) -> Any:
        found = decode_of(self, *arguments)
        lengths.update([65, 129])
        return found

    monkeypatch.setattr(providers.Provider, "decode", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        run(call(lengths), platform)
    assert not lengths._kept
    monkeypatch.setattr(providers.Provider, "decode", updating)
    run(call(lengths), platform)
    monkeypatch.setattr(providers.Provider, "decode", decode_of)
    before = len(made)
    for _ in range(2):
        run(call(lengths), platform)
    assert len(made) == before + 1


def test_columns_of_one_tensor_are_not_copied(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = call(DecodeLengths([65, 129], device="cpu"))
    apart = tensors._replace(q_rope=tensors.q_rope.clone())
    given: list[torch.Tensor] = []
    decode = providers.Provider.decode
    monkeypatch.setattr(
        providers.Provider, "decode", lambda self, q, *rest: (given.append(q), decode(self, q, *rest))[1]
    )
    found = [run(x, platform).out for x in (tensors, apart)]
    assert torch.equal(*found)
    assert [x.data_ptr() == tensors.q_nope_abs.data_ptr() for x in given] == [True, False]


def test_queries_that_do_not_start_on_16_bytes(platform: Platform) -> None:
    tensors = call(DecodeLengths([65, 129], device="cpu"))
    memory = torch.randn(2, 1, 16, 577).half()[..., 1:]
    shifted = tensors._replace(q_nope_abs=memory[..., :512], q_rope=memory[..., 512:])
    check(shifted, run(shifted, platform))


def test_a_table_of_one_column_with_another_stride(platform: Platform) -> None:
    table = torch.tensor([[3, 0, 5, 0]], dtype=torch.int32).t()[::2]
    assert table.stride() != (2, 1)
    tensors = call(DecodeLengths([7, 64], device="cpu"), page_table=table)
    check(tensors, run(tensors, platform))


@pytest.mark.parametrize("scale", [1e-3, 6e-4, 1e-8])
def test_queries_without_keys_under_a_small_scale(scale: float, platform: Platform) -> None:
    lengths = DecodeLengths([1, 0], device="cpu")
    tensors = call(lengths, seqlen_q=3, causal=True, return_lse=True, softmax_scale=scale)
    found = run(tensors, platform)
    check(tensors, found)
    assert found.lse is not None
    assert found.lse.isneginf().sum() == 16 * 5


def test_joined() -> None:
    whole = torch.arange(24.0).view(2, 3, 4)
    left, right = whole[..., :3], whole[..., 3:]
    assert layout.are_joined(left, right)
    assert layout.joined(left, right).data_ptr() == whole.data_ptr()
    assert torch.equal(layout.joined(left[:, ::2], right[:, ::2]), whole[:, ::2])
    for other in (right.clone(), whole[..., 2:3], right[:, ::2]):
        assert not layout.are_joined(left, other)
    assert torch.equal(layout.joined(left, right.clone()), whole)
    assert layout.are_joined(left, left[..., :0])
