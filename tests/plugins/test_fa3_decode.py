"""FlashAttention 3's decode: its providers emulated, the suite over each, refusals on hypothetical platforms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch

from mla_plugin import reference
from mla_plugin.arguments import decode_layout
from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.conformance import DecodeCase, decode_cases
from mla_plugin.hooks.decode import DecodePlan, DecodeRequest
from mla_plugin.hooks.types import Accepted, Platform, Refused
from mla_plugin.plugins import fa3
from mla_plugin.plugins.fa3 import decode
from tests.plugins.flash_libraries import check_tile_addresses, install
from tests.plugins.judged_for_cuda import JudgedForCuda

SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor? out, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, "
    "int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, "
    "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, "
    "Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, "
    "int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
)
"""Of vLLM 0.25.1's operator, without its marks of aliases."""


def hopper(distribution: str) -> Platform:
    return Platform("cuda", (9, 0), ((distribution, "0.25.1"),), (9, 13, 0), "13.0")


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor,
    seqused_k: torch.Tensor,
    page_table: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels compute, by the oracle; a query that sees no key has lse +inf, and one that has NaN gives 0."""
    check_tile_addresses(q, k, v, qv)
    assert k.shape[2] == v.shape[2] == 1
    assert seqused_k.dtype == torch.int32
    tensors = DecodeTensors(
        *(qv, q, v.squeeze(2), k.squeeze(2)), softmax_scale, causal=causal, page_table=page_table, seqlens_kv=seqused_k
    )
    found = reference.decode(tensors)
    assert found.lse is not None
    dropped = found.lse.isnan()
    out = found.out.masked_fill(dropped.transpose(1, 2)[..., None], 0).to(q.dtype)
    return out, found.lse.float().masked_fill(dropped, torch.inf).nan_to_num(neginf=torch.inf)


def with_kvcache(q, k_cache, v_cache, **options):
    given = {name: options.pop(name) for name in ("qv", "page_table", "softmax_scale", "causal")}
    result = attend(q, k_cache, v_cache, seqused_k=options.pop("cache_seqlens"), **given)
    wants_lse = options.pop("return_softmax_lse")
    assert not options
    return (*result, torch.empty(0)) if wants_lse else result[0]


def operator(*arguments: Any) -> list[torch.Tensor]:
    names = [part.split()[-1] for part in SCHEMA.split("(", 1)[1].split(") ->")[0].split(", ")]
    given = dict(zip(names, arguments, strict=True))
    used = ("q", "k", "v", "q_v", "seqused_k", "page_table", "softmax_scale", "is_causal")
    for name, value in given.items():
        if name not in used:
            neutral = {"window_size_left": -1, "window_size_right": -1, "cp_world_size": 1}
            assert value == neutral.get(name, None if value is None else 0), name
    out, lse = attend(*(given[name] for name in used))
    return [out, lse]


class Emulated(JudgedForCuda):
    """For each provider."""

    backend = "fa3"
    distribution = ""
    refuses = MappingProxyType(
        {
            **{f"ranks={ranks}": "kv_lora_rank=" for ranks in ("128/64", "96/16", "320/64", "72/8", "72/24", "13/7")},
            **{f"ranks={ranks}": "kv_lora_rank=" for ranks in ("64/16", "136/0", "24/24", "40/56", "8/8", "24/0")},
            "ranks=512/0": "qk_rope_head_dim=0",
            "ranks=128/0": "kv_lora_rank=128",
            "leftpad": "has_leftpad_kv=True",
        }
    )

    def cases(self) -> tuple[DecodeCase, ...]:
        return tuple(case for case in decode_cases() if case.dtype in (torch.bfloat16, torch.float16))[::2]

    def platform(self) -> Platform:
        return hopper(self.distribution)


class TestOwnPackage(Emulated):
    distribution = "flash-attn-3"

    @pytest.fixture(autouse=True)
    def _library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache=with_kvcache)


class TestSglKernel(Emulated):
    distribution = "sgl-kernel"

    @pytest.fixture(autouse=True)
    def _library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, "sgl_kernel.flash_attn", flash_attn_with_kvcache=with_kvcache)


class TestVllm(Emulated):
    distribution = "vllm"

    @pytest.fixture(autouse=True)
    def _library(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        install(monkeypatch, "vllm.vllm_flash_attn")
        library = torch.library.Library("_vllm_fa3_C", "DEF")
        library.define(SCHEMA)
        library.impl("fwd", operator, "CompositeExplicitAutograd")
        yield
        library._destroy()


def request(**changes: Any) -> DecodeRequest:
    on_cpu = DecodeCase("deepseek", dtype=torch.bfloat16, rank=512).request("cpu")
    return on_cpu.replace(**{"device_type": "cuda", **changes})


def test_deepseek_and_minicpm3_are_taken_and_the_provider_named() -> None:
    assert fa3.select_backend(request(), hopper("vllm")) == Accepted(notes=("vllm 0.25.1, qv",), drops_nan=True)
    assert isinstance(
        fa3.select_backend(request(kv_lora_rank=256, qk_rope_head_dim=32), hopper("flash-attn-3")), Accepted
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "dtype=torch.float32, expected bfloat16 or float16"),
        ({"kv_lora_rank": 384}, "kv_lora_rank=384, expected 256 or 512"),
        ({"qk_rope_head_dim": 128}, "qk_rope_head_dim=128, expected a multiple of 8 from 8 to 64"),
        ({"qk_rope_head_dim": 0}, "qk_rope_head_dim=0, expected a multiple of 8 from 8 to 64"),
        ({"has_leftpad_kv": True}, "has_leftpad_kv=True, expected False"),
        (
            {"has_aligned_rows": False},
            "has_aligned_rows=False: it reads 16 bytes at a time, rows of c_kv and k_rope must start on 16 bytes",
        ),
        ({"device_type": "cpu"}, "device_type='cpu', expected 'cuda'"),
    ],
)
def test_what_it_cannot_compute_is_refused(changes: dict[str, Any], reason: str) -> None:
    assert fa3.select_backend(request(**changes), hopper("vllm")) == Refused((reason,))


def test_a_machine_that_cannot_run_it() -> None:
    other = replace(hopper("vllm"), compute_capability=(10, 0), packages=())
    assert fa3.select_backend(request(), other) == Refused(
        (
            "FlashAttention 3 is not installed: none of flash-attn-3, vllm, sgl-kernel",
            "compute_capability=(10, 0), expected (9, 0)",
        )
    )


def test_queries_that_do_not_start_on_16_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache=with_kvcache)
    memory, cache = torch.randn(2, 1, 16, 577).half(), torch.randn(2, 9, 576).half()
    q = memory[..., :576]
    given = DecodeTensors(q[..., :512], q[..., 512:], cache[..., :512], cache[..., 512:], 0.1)
    plan = DecodePlan(request(), hopper("flash-attn-3"), "fa3")
    exact = reference.decode(given).out
    torch.testing.assert_close(fa3.forward(plan, given).out.double(), exact, atol=2e-3, rtol=2e-3)


def test_an_operator_of_another_shape_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"relu.* has no argument q, k, v, q_v, seqused_k"):
        decode._vllm_operator(torch.ops.aten.relu.default)


def test_the_lengths_of_a_whole_cache_are_made_once_for_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """And others for another length, as at the next token."""
    lengths: list[torch.Tensor] = []

    def remembering(*tensors: torch.Tensor, **options: Any) -> Any:
        lengths.append(options["cache_seqlens"])
        return with_kvcache(*tensors, **options)

    install(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache=remembering)
    monkeypatch.setattr(decode_layout, "_known", {})
    plan = DecodePlan(request(), hopper("flash-attn-3"), "fa3")
    for keys in (9, 9, 10):
        q, cache = torch.randn(2, 1, 16, 576).half(), torch.randn(2, keys, 576).half()
        given = DecodeTensors(
            q[..., :512].contiguous(), q[..., 512:].contiguous(), cache[..., :512], cache[..., 512:], 0.1
        )
        exact = reference.decode(given).out
        torch.testing.assert_close(fa3.forward(plan, given).out.double(), exact, atol=2e-3, rtol=2e-3)
    assert [x.tolist() for x in lengths] == [[9, 9], [9, 9], [10, 10]]
    assert lengths[0] is lengths[1]
