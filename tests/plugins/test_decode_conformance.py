"""The decode conformance suite for every backend of ours that runs here; the others are in test_decode_gpu.py."""

import math
from dataclasses import replace
from types import MappingProxyType

import pytest
import torch

from mla_plugin import reference
from mla_plugin.conformance import DecodeCase, DecodeConformance, decode_cases
from mla_plugin.plugins.sdpa import decode as sdpa_decode
from mla_plugin.plugins.triton import decode as triton_decode
from tests.plugins.flashinfer_emulation import EmulatedFlashInfer, lse_refusal
from tests.plugins.flashmla_emulation import FLASH_MLA_REFUSES, EmulatedFlashMLA


class TestSdpa(DecodeConformance):
    backend = "sdpa"
    is_slow = True
    padding_poison = math.nan


@pytest.mark.usefixtures("few_programs_of_the_sum")
class TestTritonInterpreted(DecodeConformance):
    backend = "triton"
    is_slow = True
    padding_poison = math.nan
    refuses = MappingProxyType({"bf16": "Triton's interpreter has no bfloat16 product"})

    def cases(self) -> tuple[DecodeCase, ...]:
        """The cheap ones: the interpreter takes a tenth of a second for each million multiplications."""
        cheap = tuple(case for case in super().cases() if case.cost < 1.0)
        refused = tuple(case for case in cheap if case.dtype == torch.bfloat16)[:1]
        return (*refused, *[case for case in cheap if case.dtype != torch.bfloat16][::2])


class TestFlashInferEmulated(EmulatedFlashInfer):
    """Our side of the call: its metadata, its order of plan and run, its layouts; the library itself runs on a GPU."""

    backend = "flashinfer"
    lowest_score = -2048.0
    refuses = MappingProxyType(
        {
            "fp32": "dtype=torch.float32",
            "ranks=256/32": "qk_rope_head_dim=32",
            **{f"ranks={ranks}": "kv_lora_rank=" for ranks in ("96/16", "320/64", "72/8")},
            "contiguous": "page_size=None",
            "no_host_lengths": "has_host_lengths=False",
            "leftpad": "has_leftpad_kv=True",
            "host_lengths-paged-queries_4-heads_40-bf16": "may lose its last key",
            "host_lengths-paged-queries_4-heads_40-fp16": "may lose its last key",
            "host_lengths-paged-queries_4-heads_40-fp32": "may lose its last key",
        }
    )

    def expected(self, labels: frozenset[str]) -> tuple[str, ...]:
        return super().expected(labels) + lse_refusal(labels, (9, 0))


class TestFlashMLAEmulated(EmulatedFlashMLA):
    """Our side of the call; the library itself runs on a GPU."""

    backend = "flashmla"
    refuses = FLASH_MLA_REFUSES

    def cases(self) -> tuple[DecodeCase, ...]:
        """Every second one, and all that say what is refused."""
        given = super().cases()
        return tuple(case for index, case in enumerate(given) if index % 2 or case.tags & FLASH_MLA_REFUSES.keys())


def test_the_triton_plugin_counts_columns_as_the_kernels_do() -> None:
    from mla_plugin.kernels.tile_math import split_head_dim

    for rank in range(1, 600):
        request = decode_cases()[0].request("cpu").replace(kv_lora_rank=rank, qk_rope_head_dim=0)
        assert triton_decode.columns(request) == sum(split_head_dim(rank))


@pytest.mark.parametrize("case", [case for case in decode_cases() if case.lengths][::3], ids=str)
def test_sdpa_computes_several_sequences_without_their_lengths_as_on_a_gpu(case: DecodeCase) -> None:
    few = replace(case, spare_columns=min(case.spare_columns, 2))  # a hundred unused pages a sequence take seconds
    tensors = few.tensors("cpu", torch.Generator().manual_seed(0), math.nan)
    exact = reference.decode(tensors)
    batch = len(case.lengths)
    found = [
        sdpa_decode._attend(tensors, first, last, tensors.capacity, torch.float64)
        for first, last in ((0, 1), (1, batch))
    ]
    out, lse = (torch.cat(parts) for parts in zip(*found, strict=True))
    eps = max(torch.finfo(case.dtype).eps, 1e-12)
    torch.testing.assert_close(out.double(), exact.out, atol=eps, rtol=eps)
    torch.testing.assert_close(lse, exact.lse, atol=1e-12, rtol=1e-12)
