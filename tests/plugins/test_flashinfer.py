"""Our side of FlashInfer: what is refused and why, and when a plan is made."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_plugin import reference
from mla_plugin.arguments.decode import DecodeLengths, DecodeTensors
from mla_plugin.hooks.decode import DecodePlan, DecodeRequest
from mla_plugin.hooks.types import Accepted, Platform, Refused
from mla_plugin.plugins import flashinfer
from mla_plugin.plugins.flashinfer import plan as planning
from tests.plugins.flashinfer_emulation import LIBRARIES, Wrapper, hopper, install
from tests.requests import mla_request

PAGE = 4


def request(**changes: Any) -> DecodeRequest:
    return DecodeRequest(
        dtype=torch.bfloat16,
        device_type="cuda",
        batch_size=2,
        seqlen_q=1,
        num_heads=16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        max_seqlen_kv=4096,
        page_size=64,
        has_seqlens_kv=True,
        has_host_lengths=True,
    ).replace(**changes)


def reasons(call: DecodeRequest, platform: Platform) -> tuple[str, ...]:
    answer = flashinfer.select_backend(call, platform)
    return answer.reasons if isinstance(answer, Refused) else ()


@pytest.mark.parametrize("version", ["0.6.12", "0.6.13", "0.7.2.post1"])
def test_deepseek_is_taken(version: str) -> None:
    assert flashinfer.select_backend(request(), hopper(version)) == Accepted(notes=("FlashInfer's fa3 kernel",))


def test_the_kernel_is_named() -> None:
    wide = flashinfer.select_backend(request(kv_lora_rank=384), hopper())
    ampere = replace(hopper(), compute_capability=(8, 0), shared_memory_per_block=166912)
    assert wide == flashinfer.select_backend(request(), ampere) == Accepted(notes=("FlashInfer's fa2 kernel",))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "dtype=torch.float32, expected bfloat16 or float16"),
        ({"kv_lora_rank": 320}, "kv_lora_rank=320, expected a multiple of 128"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim=32, expected a multiple of 64"),
        ({"qk_rope_head_dim": 0}, "qk_rope_head_dim=0 with flashinfer-python=0.6.13 < 0.7"),
        ({"page_size": None}, "page_size=None, expected a paged cache"),
        (
            {"has_host_lengths": False},
            "has_host_lengths=False: it plans on the host, pass seqlens_kv=DecodeLengths(host_lengths, ...)",
        ),
        ({"has_leftpad_kv": True}, "has_leftpad_kv=True, expected False"),
        (
            {"has_aligned_rows": False},
            "has_aligned_rows=False: it reads 16 bytes at a time, rows of c_kv and k_rope must start on 16 bytes",
        ),
        (
            {"causal": True, "seqlen_q": 4, "num_heads": 40},
            "causal with seqlen_q=4, num_heads=40: a tile of 128 rows ends within a query and may lose its last key; "
            "expected divisors of 128 heads",
        ),
        ({"batch_size": 8193}, "batch_size=8193 of 16 rows is more than 8192 tiles of 64"),
        ({"device_type": "cpu"}, "device_type='cpu', expected 'cuda'"),
    ],
)
def test_what_it_cannot_compute_is_refused(changes: dict[str, Any], reason: str) -> None:
    assert reasons(request(**changes), hopper()) == (reason,)


@pytest.mark.parametrize(
    ("seqlen_q", "num_heads", "taken"), [(3, 40, True), (4, 40, False), (4, 128, True), (2, 48, True), (3, 48, False)]
)
def test_a_tile_must_end_with_a_query(seqlen_q: int, num_heads: int, taken: bool) -> None:
    assert bool(reasons(request(causal=True, seqlen_q=seqlen_q, num_heads=num_heads), hopper())) != taken


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"packages": ()}, 'flashinfer-python is not installed: pip install "mla-plugin[flashinfer]"'),
        ({"packages": (("flashinfer-python", "0.6.11"),)}, "flashinfer-python=0.6.11 < 0.6.12"),
        ({"tools": frozenset({"nvcc"})}, "ninja is not found, with which it compiles its kernels"),
        ({"tools": frozenset({"ninja"})}, "nvcc is not found, with which it compiles its kernels"),
        ({"compute_capability": (7, 5)}, "compute_capability=(7, 5) < (8, 0)"),
        ({"device_type": "cpu", "compute_capability": None}, "device_type='cpu', expected 'cuda'"),
        (
            {"packages": (("flashinfer-jit-cache", "0.6.12+cu130"), ("flashinfer-python", "0.6.13"))},
            "flashinfer-jit-cache=0.6.12+cu130 with flashinfer-python=0.6.13: it does not import unless they agree",
        ),
        (
            {"packages": (("flashinfer-jit-cache", "0.7.10+cu130"), ("flashinfer-python", "0.7.1"))},
            "flashinfer-jit-cache=0.7.10+cu130 with flashinfer-python=0.7.1: it does not import unless they agree",
        ),
        (
            {"packages": (("flashinfer-cubin", "0.6.12"), ("flashinfer-python", "0.6.13"))},
            "flashinfer-cubin=0.6.12 with flashinfer-python=0.6.13: it does not import unless they agree",
        ),
    ],
)
def test_a_machine_that_cannot_run_it(changes: dict[str, Any], reason: str) -> None:
    (found,) = reasons(request(), replace(hopper(), **changes))
    assert found.startswith(reason)


def test_compiled_kernels_need_no_compiler() -> None:
    packages = (("flashinfer-jit-cache", "0.6.13+cu130"), ("flashinfer-python", "0.6.13"))
    assert reasons(request(), replace(hopper(), packages=packages, tools=frozenset())) == ()


def test_shared_memory_of_consumer_gpus_suffices_for_deepseek_alone() -> None:
    consumer = replace(hopper("0.7.2"), compute_capability=(8, 9), shared_memory_per_block=101376)
    assert flashinfer.fa2_shared_memory(512, 64, 101376) == 92704  # stated by FlashInfer
    assert reasons(request(), consumer) == ()
    (reason,) = reasons(request(kv_lora_rank=640), consumer)
    assert reason == "shared_memory_per_block=101376 < 113184, for kv_lora_rank=640, qk_rope_head_dim=64"


def test_its_hopper_kernel_has_no_room_for_more_rotary_columns() -> None:
    assert reasons(request(qk_rope_head_dim=64), hopper()) == ()
    (reason,) = reasons(request(qk_rope_head_dim=128), hopper())
    assert reason == "shared_memory_per_block=232448 < 246304, for kv_lora_rank=512, qk_rope_head_dim=128"


def test_attention_is_refused() -> None:
    answer = flashinfer.select_backend(mla_request(), hopper())
    assert isinstance(answer, Refused)
    assert answer.reasons[0].startswith("AttentionRequest, expected DecodeRequest")


def test_used_pages() -> None:
    pages = planning.used_pages(torch.tensor([5, 0, 4, 9], dtype=torch.int32), page_size=4, table_width=3)
    assert pages.indptr.tolist() == [0, 2, 2, 3, 6]
    assert pages.indptr.dtype == torch.int32
    assert pages.entries.tolist() == [0, 1, 6, 9, 10, 11]
    with pytest.raises(ValueError, match="a sequence has 13 keys; page_table has 3 pages of 4 for each"):
        planning.used_pages(torch.tensor([1, 13], dtype=torch.int32), page_size=4, table_width=3)


@pytest.fixture(params=sorted(LIBRARIES))
def _library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, request.param)


def call(lengths: DecodeLengths, page_table: torch.Tensor, **changes: Any) -> DecodeTensors:
    q, cache = torch.randn(2, 1, 16, 192).half(), torch.randn(9, PAGE, 192).half()
    return DecodeTensors(
        *(q[..., :128], q[..., 128:], cache[..., :128], cache[..., 128:]),
        softmax_scale=0.1,
        page_table=page_table,
        seqlens_kv=lengths.seqlens_kv,
        lengths=lengths,
    )._replace(**changes)


def run(tensors: DecodeTensors) -> Any:
    return flashinfer.forward(DecodePlan(request(), hopper(), "flashinfer"), tensors)


PAGE_TABLE = torch.tensor([[3, 1, 4], [5, 8, 2]], dtype=torch.int32)


@pytest.mark.usefixtures("_library")
def test_the_layers_of_a_step_share_one_plan() -> None:
    lengths = DecodeLengths([5, 9], device="cpu")
    for _ in range(4):
        run(call(lengths, PAGE_TABLE))
    run(call(lengths, PAGE_TABLE.view(2, 3)))  # a view of the same table
    (wrapper,) = Wrapper.made
    assert wrapper.plans == 1


@pytest.mark.usefixtures("_library")
def test_the_next_step_plans_again_in_the_same_memory() -> None:
    for length in range(5, 10):
        run(call(DecodeLengths([length, 9], device="cpu"), PAGE_TABLE))
        gc.collect()
    (wrapper,) = Wrapper.made
    assert wrapper.plans == 5


@pytest.mark.usefixtures("_library")
def test_changed_lengths_and_pages_are_planned_when_they_change() -> None:
    lengths, page_table = DecodeLengths([5, 9], device="cpu"), PAGE_TABLE.clone()
    run(call(lengths, page_table))
    (wrapper,) = Wrapper.made
    page_table[0, 2] = 7
    lengths.update([9, 1])
    assert wrapper.plans == 2
    assert wrapper.lengths.tolist() == [9, 1]
    assert wrapper.buffers["kv_indices"][:4].tolist() == [3, 1, 7, 5]


@pytest.mark.usefixtures("_library")
def test_pages_that_change_after_the_lengths_are_planned_at_the_next_call() -> None:
    lengths, page_table = DecodeLengths([5, 9], device="cpu"), PAGE_TABLE.clone()
    tensors = call(lengths, page_table)
    run(tensors)
    page_table[:, 0] = page_table[:, 0].flip(0)  # as beam search does
    found = run(tensors).out
    run(tensors)
    (wrapper,) = Wrapper.made
    assert wrapper.plans == 2
    exact = reference.decode(tensors._replace(lengths=None)).out
    torch.testing.assert_close(found.double(), exact, atol=2e-3, rtol=2e-3)


@pytest.mark.usefixtures("_library")
def test_a_page_table_of_inference_mode_is_planned_with_the_lengths() -> None:
    with torch.inference_mode():
        lengths, page_table = DecodeLengths([5, 9], device="cpu"), PAGE_TABLE.clone()
        run(call(lengths, page_table))
        page_table[0, 2] = 7
        lengths.update([9, 9])
        run(call(lengths, page_table))
    (wrapper,) = Wrapper.made
    assert wrapper.plans == 2
    assert wrapper.buffers["kv_indices"][:3].tolist() == [3, 1, 7]


@pytest.mark.usefixtures("_library")
def test_a_page_table_for_each_step_leaves_no_plans_behind() -> None:
    lengths = DecodeLengths([1, 9], device="cpu")
    for length in range(2, 12):
        run(call(lengths, PAGE_TABLE.clone()))
        lengths.update([length, 9])
        gc.collect()
    assert len(Wrapper.made) == 2  # one that ran in this step, one that ran in the step before
    assert len(lengths._schedules) == 1


@pytest.mark.usefixtures("_library")
def test_a_plan_that_a_graph_holds_is_planned_at_every_change() -> None:
    lengths = DecodeLengths([1, 9], device="cpu")
    run(call(lengths, PAGE_TABLE))
    (plan,) = lengths._schedules.values()
    assert isinstance(plan, planning.MLAPlan)
    plan._give_back.detach()  # as a captured call does
    for length in range(2, 5):
        lengths.update([length, 9])
    (wrapper,) = Wrapper.made
    assert wrapper.plans == 4
    assert wrapper.lengths.tolist() == [4, 9]


@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize("changes", [{"return_lse": True}, {"softmax_scale": 0.2}, {"page_table": PAGE_TABLE.clone()}])
def test_calls_that_differ_have_plans_of_their_own(changes: dict[str, Any]) -> None:
    lengths = DecodeLengths([5, 9], device="cpu")
    run(call(lengths, PAGE_TABLE))
    run(call(lengths, PAGE_TABLE)._replace(**changes))
    assert [wrapper.plans for wrapper in Wrapper.made] == [1, 1]


@pytest.mark.usefixtures("_library")
def test_tables_that_start_at_one_address_have_plans_of_their_own() -> None:
    """The whole of a table, and the first columns of one that is wider."""
    lengths, memory = DecodeLengths([5, 9], device="cpu"), torch.arange(12, dtype=torch.int32) % 9
    for page_table in (memory[:6].view(2, 3), memory.view(2, 6)[:, :3]):
        tensors = call(lengths, page_table)
        exact = reference.decode(tensors._replace(lengths=None)).out
        torch.testing.assert_close(run(tensors).out.double(), exact, atol=2e-3, rtol=2e-3)
    assert [wrapper.plans for wrapper in Wrapper.made] == [1, 1]


@pytest.mark.usefixtures("_library")
def test_each_kernel_has_its_plan() -> None:
    tensors = call(DecodeLengths([5, 9], device="cpu"), PAGE_TABLE)
    run(tensors)
    flashinfer.forward(DecodePlan(request(), replace(hopper(), compute_capability=(8, 0)), "flashinfer"), tensors)
    assert [(wrapper.backend, wrapper.plans) for wrapper in Wrapper.made] == [("fa3", 1), ("fa2", 1)]


@pytest.mark.usefixtures("_library")
def test_calls_with_more_queries_have_plans_of_their_own() -> None:
    lengths = DecodeLengths([5, 9], device="cpu")
    for seqlen_q in (1, 2):
        tensors = call(lengths, PAGE_TABLE)
        queries = (x.repeat(1, seqlen_q, 1, 1) for x in tensors[:2])
        run(tensors._replace(**dict(zip(("q_nope_abs", "q_rope"), queries, strict=True))))
    assert [wrapper.plans for wrapper in Wrapper.made] == [1, 1]


@pytest.mark.usefixtures("_library")
def test_lengths_beyond_the_pages_leave_the_plan_as_it_was() -> None:
    lengths = DecodeLengths([5, 9], device="cpu")
    tensors = call(lengths, PAGE_TABLE)
    wanted = run(tensors).out
    with pytest.raises(ValueError, match="a sequence has 13 keys; page_table has 3 pages of 4 for each"):
        lengths.update([5, 13])
    assert torch.equal(run(tensors).out, wanted)
    (wrapper,) = Wrapper.made
    assert wrapper.lengths.tolist() == lengths.host.tolist() == [5, 9]


@pytest.mark.usefixtures("_library")
def test_queries_that_do_not_start_on_16_bytes() -> None:
    given = call(DecodeLengths([5, 9], device="cpu"), PAGE_TABLE)
    shifted = torch.randn(1 + 2 * 16 * 128).half()[1:].view(2, 1, 16, 128)
    assert shifted.data_ptr() % 16
    out = run(given._replace(q_nope_abs=shifted)).out
    assert torch.equal(out, run(given._replace(q_nope_abs=shifted.clone())).out)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [2.0**-9, 2.0**-10, 2.0**-11, 3e-6, 2.0**-30])
@pytest.mark.usefixtures("_library")
def test_a_tiny_scale_loses_no_scores(scale: float, dtype: torch.dtype) -> None:
    """q k is far below -5e4, where FlashInfer's maximum starts; for other scales the queries stay as they are."""
    tensors = call(DecodeLengths([5, 9], device="cpu"), PAGE_TABLE, softmax_scale=scale)
    tensors = tensors._replace(**{name: getattr(tensors, name).to(dtype) for name in tensors._fields[:4]})
    q_nope_abs = tensors.q_nope_abs * 0.01
    q_nope_abs[..., 0] = -60.0 if scale < 2**-10 else -0.2
    tensors.c_kv[..., 0] = 1000.0
    tensors = tensors._replace(q_nope_abs=q_nope_abs)
    exact = reference.decode(tensors._replace(lengths=None)).out
    output = flashinfer.forward(DecodePlan(request(dtype=dtype), hopper(), "flashinfer"), tensors)
    torch.testing.assert_close(output.out.double(), exact, atol=2e-2, rtol=2e-2)
    (wrapper,) = Wrapper.made
    assert (wrapper.options["sm_scale"] == scale) == (scale >= 2**-10)


def test_a_call_without_lengths_is_an_error() -> None:
    with pytest.raises(ValueError, match="flashinfer needs page_table and seqlens_kv"):
        run(call(DecodeLengths([5, 9], device="cpu"), PAGE_TABLE)._replace(lengths=None))


def test_used_pages_are_on_the_cpu_whatever_the_default_device_is() -> None:
    lengths = torch.tensor([5, 0, 4, 9], dtype=torch.int32)
    with torch.device("meta"):
        pages = planning.used_pages(lengths, page_size=4, table_width=3)
    assert pages.indptr.tolist() == [0, 2, 2, 3, 6]
    assert pages.entries.device.type == "cpu"
