"""One context-parallel call on one rank, and one section of it on a backend."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.layout import Layout
from mla_plugin.context_parallel.group import Group
from mla_plugin.context_parallel.sections import Lengths, Offsets
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, Residuals
from mla_plugin.operations.attention import compute
from mla_plugin.operations.attention.known import Known, known_of
from mla_plugin.resolver.attention import resolve


@dataclass(frozen=True)
class Call:
    """A call as this rank sees it.

    Attributes:
        group: the ranks.
        tensors: this rank's tokens of q, k, v; offsets are those of whole sequences.
        request: of these tensors; its longest sequences are slots on this rank.
        backend: use this backend and no other.
    """

    group: Group
    tensors: AttentionTensors
    request: AttentionRequest
    backend: str | None

    @property
    def layout(self) -> Layout:
        """The axes of q, k, v and out."""
        return self.request.layout

    @property
    def wide(self) -> torch.dtype:
        """Dtype of sums over sections: float32, float64 for float64."""
        return torch.promote_types(self.request.dtype, torch.float32)

    @functools.cached_property
    def lengths(self) -> tuple[Lengths, Lengths]:
        """Where the sequences of queries and of keys are on each rank; only for masks with lengths.

        One object for both sides if one tensor of offsets is used for both.
        """
        tensors = self.tensors
        sides = (
            (tensors.q, tensors.cu_seqlens_q, tensors.cu_seqlens_q_padded),
            (tensors.k, tensors.cu_seqlens_kv, tensors.cu_seqlens_kv_padded),
        )
        of_q = self._lengths(*sides[0])
        return of_q, of_q if not self.request.lengths_may_differ else self._lengths(*sides[1])

    @property
    def cu_seqlens_kv(self) -> torch.Tensor | None:
        """Offsets of the keys; the queries' if one tensor is used for both, which saved-tensor hooks may copy."""
        return self.tensors.cu_seqlens_kv if self.request.lengths_may_differ else self.tensors.cu_seqlens_q

    def _lengths(self, x: torch.Tensor, cu: torch.Tensor | None, padded: torch.Tensor | None) -> Lengths:
        assert cu is not None  # masks with lengths have them
        tokens = x.shape[self.layout.tokens]
        if self.layout.is_packed:
            return Lengths.packed(cu, cu if padded is None else padded, self.group.size, tokens)
        return Lengths.dense(cu, self.group.size, tokens)

    def tensors_of(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        of_q: Offsets | None = None,
        of_kv: Offsets | None = None,
    ) -> AttentionTensors:
        """The tensors of one section; a side without offsets uses those of the other."""
        if of_q is None:
            return AttentionTensors(q, k, v, self.tensors.softmax_scale)
        of_kv = of_kv or of_q
        given = (of_q.cu_seqlens, of_kv.cu_seqlens, of_q.starts, of_kv.starts)
        return AttentionTensors(q, k, v, self.tensors.softmax_scale, *given)

    def prepare(self, requests: Iterable[AttentionRequest]) -> None:
        """Prepare all that needs no communication: choose a backend for every section, queue the sums over lengths.

        Raises:
            NoBackendError: no backend takes one of the sections.
        """
        for request in requests:
            resolve(request, backend=self.backend)
        if self.request.has_padding:
            _ = self.lengths

    def known(self, request: AttentionRequest, tensors: AttentionTensors) -> Known:
        """The cached ``Known`` of a section."""
        return known_of(tensors, request, self.backend)

    def forward(self, request: AttentionRequest, tensors: AttentionTensors) -> AttentionOutput:
        """out and lse of a section."""
        known, tensors = self.known(request, tensors), compute.with_contiguous_rows(tensors)
        vars(tensors)["kept"] = known.kept
        return compute.forward(known, tensors)

    def backward(
        self,
        request: AttentionRequest,
        tensors: AttentionTensors,
        output: AttentionOutput,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk and dv of a section; the output is that of the whole softmax."""
        known = self.known(request, tensors)
        residuals = Residuals(compute.with_contiguous_rows(tensors), output.out, output.lse)
        dq, dk, dv, _ = compute.backward(known, residuals, dout, dlse)
        return dq, dk, dv


Forward: TypeAlias = tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]
"""out and lse of a rank's queries, and what is saved for the backward besides inputs and outputs."""
Backward: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""dq, dk and dv of a rank's tokens."""


@dataclass(frozen=True)
class Saved:
    """The tensors that a forward saves for its backward; which ones depends on ``cp_comm_type``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    output: AttentionOutput

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Saved:
        """From q, k, v, out, lse."""
        q, k, v, out, lse = tensors
        return cls(q, k, v, AttentionOutput(out, lse))
