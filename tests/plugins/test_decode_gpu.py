"""Every decode backend against float64 on a GPU, each call also as a CUDA graph replayed with other lengths.

FlashInfer, FlashAttention 3 and FlashMLA are tested where they are installed; benchmarks/peers_site.py makes a folder
with all of them.
"""

from __future__ import annotations

import math
from types import MappingProxyType

import pytest
import torch

import mla_plugin
from mla_plugin import DecodeLengths, DecodeTensors, reference
from mla_plugin.conformance import DecodeConformance, decode_cases
from tests.plugins.flashinfer_emulation import lse_refusal
from tests.plugins.flashmla_emulation import FLASH_MLA_REFUSES

pytestmark = pytest.mark.gpu


class TestSdpa(DecodeConformance):
    backend = "sdpa"
    device = "cuda"
    padding_poison = math.nan


class TestTriton(DecodeConformance):
    backend = "triton"
    device = "cuda"
    padding_poison = math.nan
    refuses = MappingProxyType({"ranks=640/128": "take 768 columns", "ranks=520/88": "take 1152 columns"})


@pytest.mark.peer("FlashInfer")
class TestFlashInfer(DecodeConformance):
    backend = "flashinfer"
    device = "cuda"
    lowest_score = -2048.0  # see docs/limits.md
    refuses = MappingProxyType(
        {
            "fp32": "dtype=torch.float32",
            "ranks=256/32": "qk_rope_head_dim=32",
            **{f"ranks={ranks}": "kv_lora_rank=" for ranks in ("96/16", "320/64", "72/8")},
            "ranks=512/0": "qk_rope_head_dim=0 with flashinfer-python=0.6",
            "ranks=128/0": "qk_rope_head_dim=0 with flashinfer-python=0.6",
            "contiguous": "page_size=None",
            "no_host_lengths": "has_host_lengths=False",
            "leftpad": "has_leftpad_kv=True",
            "host_lengths-paged-queries_4-heads_40-bf16": "may lose its last key",
            "host_lengths-paged-queries_4-heads_40-fp16": "may lose its last key",
            "host_lengths-paged-queries_4-heads_40-fp32": "may lose its last key",
        }
    )

    def expected(self, labels: frozenset[str]) -> tuple[str, ...]:
        return super().expected(labels) + lse_refusal(labels, torch.cuda.get_device_capability())


@pytest.mark.peer("FlashAttention 3")
class TestFlashAttention3(DecodeConformance):
    backend = "fa3"
    device = "cuda"
    refuses = MappingProxyType(
        {
            "fp32": "dtype=torch.float32",
            **{f"ranks={ranks}": "kv_lora_rank=" for ranks in ("128/64", "96/16", "320/64", "72/8", "640/128", "13/7")},
            **{f"ranks={ranks}": "kv_lora_rank=" for ranks in ("136/40", "72/24", "520/88", "8/8")},
            "ranks=512/0": "qk_rope_head_dim=0",
            "ranks=128/0": "kv_lora_rank=128",
            "leftpad": "has_leftpad_kv=True",
        }
    )


@pytest.mark.peer("FlashMLA")
class TestFlashMLA(DecodeConformance):
    backend = "flashmla"
    device = "cuda"
    refuses = FLASH_MLA_REFUSES


def large_call() -> tuple[DecodeTensors, torch.Tensor]:
    (case,) = (case for case in decode_cases(large=True) if case.name == "deepseek_tp8-paged-queries_1")
    tensors = case.tensors("cuda", torch.Generator().manual_seed(0), 1.0)
    return tensors, reference.decode(tensors).out


def test_the_entry_takes_one_tensor_or_a_pair_and_chooses() -> None:
    tensors, exact = large_call()
    cache = torch.cat([tensors.c_kv, tensors.k_rope], -1)
    for kv_cache in (cache, (tensors.c_kv, tensors.k_rope)):
        for seqlens_kv in (tensors.seqlens_kv, tensors.lengths):
            out = mla_plugin.decode(
                tensors.q_nope_abs,
                tensors.q_rope,
                kv_cache,
                softmax_scale=tensors.softmax_scale,
                page_table=tensors.page_table,
                seqlens_kv=seqlens_kv,
            )
            assert isinstance(out, torch.Tensor)
            assert (out.double() - exact).norm() <= 4e-3 * exact.norm()


def test_compiled_whole_and_with_cuda_graphs() -> None:
    tensors, exact = large_call()

    def step(q_nope_abs: torch.Tensor, q_rope: torch.Tensor) -> torch.Tensor:
        return mla_plugin.decode(  # type: ignore[return-value]
            q_nope_abs,
            q_rope,
            (tensors.c_kv, tensors.k_rope),
            softmax_scale=tensors.softmax_scale,
            page_table=tensors.page_table,
            seqlens_kv=tensors.seqlens_kv,
        )

    for mode in ("default", "reduce-overhead"):
        compiled = torch.compile(step, fullgraph=True, mode=mode)
        for _ in range(3):
            out = compiled(tensors.q_nope_abs, tensors.q_rope).clone()
        assert (out.double() - exact).norm() <= 4e-3 * exact.norm()


@pytest.mark.peer("FlashInfer")
def test_a_step_plans_once_and_never_waits_for_the_device() -> None:
    from mla_plugin.plugins.flashinfer import plan as planning

    tensors, exact = large_call()
    seqlens_kv = tensors.seqlens_kv
    assert seqlens_kv is not None
    host = seqlens_kv.tolist()

    def layer(lengths: DecodeLengths) -> torch.Tensor:
        return mla_plugin.decode(  # type: ignore[return-value]
            tensors.q_nope_abs,
            tensors.q_rope,
            (tensors.c_kv, tensors.k_rope),
            softmax_scale=tensors.softmax_scale,
            page_table=tensors.page_table,
            seqlens_kv=lengths,
            backend="flashinfer",
        )

    layer(DecodeLengths(host, seqlens_kv=seqlens_kv))
    planned = []
    make = planning.MLAPlan._make
    torch.cuda.set_sync_debug_mode("error")
    try:
        planning.MLAPlan._make = lambda self, held: (planned.append(self), make(self, held))[1]  # type: ignore
        for _ in range(3):
            lengths = DecodeLengths(host, seqlens_kv=seqlens_kv)
            outs = [layer(lengths) for _ in range(4)]
    finally:
        planning.MLAPlan._make = make  # type: ignore[method-assign]
        torch.cuda.set_sync_debug_mode("default")
    assert len(planned) == 3
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert (outs[0].double() - exact).norm() <= 4e-3 * exact.norm()


@pytest.mark.peer("FlashInfer")
def test_a_capture_without_a_plan_says_what_to_do() -> None:
    tensors, _ = large_call()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="call decode once with this DecodeLengths"), torch.cuda.graph(graph):
        mla_plugin.decode(
            tensors.q_nope_abs,
            tensors.q_rope,
            (tensors.c_kv, tensors.k_rope),
            softmax_scale=tensors.softmax_scale,
            page_table=tensors.page_table,
            seqlens_kv=tensors.lengths,
            backend="flashinfer",
        )


@pytest.mark.peer("FlashMLA")
def test_a_graph_holds_one_schedule_whatever_was_called_before() -> None:
    """Replayed with lengths that the host never heard of, in a graph of several layers and in a second graph."""
    tensors, exact = large_call()
    seqlens_kv = tensors.seqlens_kv
    assert seqlens_kv is not None
    given = seqlens_kv.clone()
    lengths = DecodeLengths(seqlens_kv.tolist(), seqlens_kv=seqlens_kv)

    def layer() -> torch.Tensor:
        return mla_plugin.decode(  # type: ignore[return-value]
            tensors.q_nope_abs,
            tensors.q_rope,
            (tensors.c_kv, tensors.k_rope),
            softmax_scale=tensors.softmax_scale,
            page_table=tensors.page_table,
            seqlens_kv=lengths,
            backend="flashmla",
        )

    layer()
    graphs, outs = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            outs.append([layer() for _ in range(3)])
        assert len(lengths._kept) == 2  # of the calls outside of graphs, and of this graph
    for held in (torch.ones_like(given), torch.zeros_like(given), given):
        seqlens_kv.copy_(held)
        wanted = reference.decode(tensors._replace(lengths=None)).out
        for graph, layers in zip(graphs, outs, strict=True):
            graph.replay()
            for out in layers:
                assert (out.double() - wanted).norm() <= 4e-3 * wanted.norm()
    assert (outs[1][2].double() - exact).norm() <= 4e-3 * exact.norm()
