"""``flashinfer.mla`` on the CPU: both call forms of its MLA wrapper, with their demands, and plain PyTorch inside.

Written after ``flashinfer/mla`` of 0.6.13 and 0.7.2. What the library would refuse or get wrong fails an assertion.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from mla_plugin import reference
from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.hooks.types import Platform
from mla_plugin.plugins.flashinfer import plan as planning
from tests.plugins.judged_for_cuda import JudgedForCuda


@dataclass(frozen=True)
class MLAPlanMetadata:
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_len_arr: torch.Tensor

    @classmethod
    def csr(cls, *tensors: torch.Tensor) -> MLAPlanMetadata:
        return cls(*tensors)


class Wrapper:
    """What both versions share."""

    made: ClassVar[list[Wrapper]] = []

    def __init__(self, workspace: torch.Tensor, *, use_cuda_graph: bool, backend: str, **buffers: torch.Tensor) -> None:
        assert workspace.numel() >= 128 << 20
        assert use_cuda_graph
        assert backend in ("fa2", "fa3")
        self.backend = backend
        self.buffers = buffers
        self.plans = 0
        Wrapper.made.append(self)

    def _keep(self, metadata: MLAPlanMetadata, options: dict[str, Any]) -> None:
        named = vars(metadata)
        for name, x in named.items():
            assert x.dtype == torch.int32, name
            assert x.is_contiguous()
            reserved = self.buffers[name]
            assert x.shape == reserved.shape or (name == "kv_indices" and x.numel() <= reserved.numel())
            reserved[: x.numel()].copy_(x)
        assert metadata.qo_indptr[0] == metadata.kv_indptr[0] == 0
        pages = -(-metadata.kv_len_arr // options["page_size"])
        assert torch.equal(metadata.kv_indptr.diff(), pages)
        assert metadata.kv_indices.numel() == int(metadata.kv_indptr[-1])
        assert options["q_data_type"] == options["kv_data_type"]
        self.lengths = metadata.kv_len_arr.clone()
        self.indptr = metadata.kv_indptr.clone()
        self.qo_indptr = metadata.qo_indptr.clone()
        self.options = options
        self.plans += 1

    def _compute(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, ckv: torch.Tensor, kpe: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Writes out, returns lse in base 2: [T, H]."""
        batch = len(self.lengths)
        assert torch.equal(self.qo_indptr, torch.arange(batch + 1, dtype=torch.int32) * (len(q_nope) // batch))
        widest = int(self.indptr.diff().max()) if batch else 0
        page_table = torch.zeros(batch, widest, dtype=torch.int32)
        for b in range(batch):
            first, last = self.indptr[b : b + 2].tolist()
            page_table[b, : last - first] = self.buffers["kv_indices"][first:last]
        assert (q_nope.shape[1:], q_pe.shape[2]) == (
            (self.options["num_heads"], self.options["head_dim_ckv"]),
            self.options["head_dim_kpe"],
        )
        result = reference.decode(
            DecodeTensors(
                *(x.unflatten(0, (batch, -1)) for x in (q_nope, q_pe)),
                ckv,
                kpe,
                self.options["sm_scale"],
                causal=self.options["causal"],
                page_table=page_table,
                seqlens_kv=self.lengths,
            )
        )
        assert out.is_contiguous()
        assert result.lse is not None
        lost = result.lse / self.options["sm_scale"] < -5e4  # as by the library, see docs/limits.md
        result.lse.masked_fill_(lost, -math.inf)
        out.copy_(result.out.masked_fill(lost.transpose(1, 2)[..., None], 0).flatten(0, 1))
        return (result.lse.transpose(1, 2).flatten(0, 1) / math.log(2)).float()


class Wrapper06(Wrapper):
    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in ("self", "use_profiler")}
        metadata = MLAPlanMetadata(*(options.pop(name) for name in MLAPlanMetadata.__dataclass_fields__))
        self._keep(metadata, options)

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        return_lse_base_on_e: bool = False,
    ) -> Any:
        found = self._compute(q_nope, q_pe, ckv_cache, kpe_cache, out)
        found = found * math.log(2) if return_lse_base_on_e else found
        return (out, found) if return_lse else out


class Wrapper07(Wrapper):
    def plan(self, *, metadata: MLAPlanMetadata, query_layout: str, kv_cache_layout: str, **options: Any) -> None:
        assert query_layout == kv_cache_layout == "split"
        self.lse_mode = options.pop("lse_mode")
        self._keep(metadata, options)

    def run(
        self,
        *,
        query: tuple[torch.Tensor, torch.Tensor],
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        return_lse: bool = False,
        return_lse_base_on_e: bool = False,
    ) -> Any:
        asked = ("basee" if return_lse_base_on_e else "base2") if return_lse or return_lse_base_on_e else "none"
        assert asked == self.lse_mode
        lse = self._compute(*query, *kv_cache, out)
        lse = lse * math.log(2) if return_lse_base_on_e else lse
        return (out, lse) if return_lse else out


LIBRARIES = {
    "0.6.13": SimpleNamespace(BatchMLAPagedAttentionWrapper=Wrapper06),
    "0.7.2": SimpleNamespace(BatchMLAPagedAttentionWrapper=Wrapper07, MLAPlanMetadata=MLAPlanMetadata),
}


def hopper(version: str = "0.6.13") -> Platform:
    """A machine with FlashInfer and all that it needs."""
    return Platform(
        "cuda",
        compute_capability=(9, 0),
        packages=(("flashinfer-python", version),),
        shared_memory_per_block=232448,
        tools=frozenset({"nvcc", "ninja"}),
    )


def install(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Put the emulation where the library would be, and forget what other tests left."""
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(mla=LIBRARIES[version]))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", LIBRARIES[version])
    monkeypatch.setattr(planning, "_idle", type(planning._idle)(list))
    Wrapper.made.clear()


class EmulatedFlashInfer(JudgedForCuda):
    """Of a Hopper with either version."""

    @pytest.fixture(autouse=True, params=sorted(LIBRARIES))
    def _library(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, request.param)
        self.version = request.param

    def platform(self) -> Platform:
        return hopper("0.7.2")


def lse_refusal(labels: frozenset[str], capability: tuple[int, int]) -> tuple[str, ...]:
    """What the backend must say of a case with these tags that wants lse: its fa2 kernel rounds that."""
    has_fa3_kernel = capability == (9, 0) and any(label.startswith("ranks=512/") for label in labels)
    return ("return_lse=True",) if "return_lse" in labels and not has_fa3_kernel else ()
