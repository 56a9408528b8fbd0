"""FlashAttention 2, 3 and 4 emulated on the CPU: their signatures, what they reject, and what they leave unwritten.

Written after ``flash_attn_interface.py`` and ``flash_api.cpp`` (FlashAttention 2.8.3 and its hopper folder), PyTorch's
copy of them, vLLM's ``_vllm_fa3_C``, SGLang's ``sgl_kernel.flash_attn`` and ``flash_attn/cute/interface.py`` of
4.0.0b36. They compute by the float32 oracle. What the kernels do not write is NaN, a row that sees no key has lse
+inf (FlashAttention 2 and 3) and what they would refuse or get wrong fails an assertion.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from mla_plugin.reference import attention, attention_with_gradients
from mla_plugin.types import AttentionRequest, AttentionTensors, Gradients

HALF = (torch.bfloat16, torch.float16)
Window = tuple[int, int]
Tensors = tuple[torch.Tensor, ...]


def check_tile_addresses(*tensors: torch.Tensor) -> None:
    """What hardware that copies tiles wants of 16-bit tensors."""
    for x in tensors:
        assert x.dtype in HALF
        assert x.dtype == tensors[0].dtype
        assert x.stride(-1) == 1
        assert x.storage_offset() % 8 == 0
        assert all(stride % 8 == 0 for stride in x.stride()[:-1])


def check_no_broadcast(*tensors: torch.Tensor) -> None:
    for x in tensors:
        assert all(stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)


def check_offsets(batch: int, *offsets: torch.Tensor | None) -> None:
    """int32, contiguous, one more than the batch."""
    for x in offsets:
        assert x is not None
        assert x.dtype == torch.int32
        assert x.is_contiguous()
        assert x.shape == (batch + 1,)


class Emulated:
    """One call of any of the libraries, by the oracle."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_scale: float,
        causal: bool,
        window: Window,
        starts: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
        used: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
        longest: tuple[int | None, int | None] = (None, None),
    ) -> None:
        is_packed = starts[0] is not None
        left, right = window
        right = 0 if causal else right
        mask = "padding" if is_packed else "no_mask"
        lengths = [None, None]
        if is_packed:
            for side in (0, 1):
                check_offsets(starts[0].shape[0] - 1, starts[side])
                room = starts[side].diff()
                lengths[side] = room if used[side] is None else used[side]
                assert lengths[side].dtype == torch.int32
                assert (lengths[side] <= room).all()
                assert int(lengths[side].max()) <= longest[side]
        batch = starts[0].shape[0] - 1 if is_packed else q.shape[0]
        tokens = (1, 1) if not is_packed else (0, 0)
        self.request = AttentionRequest(
            qkv_format="thd" if is_packed else "bshd",
            dtype=q.dtype,
            device_type="cpu",
            batch_size=batch,
            num_heads=q.shape[-2],
            num_kv_heads=k.shape[-2],
            max_seqlen_q=longest[0] or q.shape[tokens[0]],
            max_seqlen_kv=longest[1] or k.shape[tokens[1]],
            head_dim_qk=q.shape[-1],
            head_dim_v=v.shape[-1],
            attn_mask_type=mask,
            window_size=(left, right),
            bottom_right_diagonal=True,
        )
        offsets = [None if x is None else torch.cat((x.new_zeros(1), x.cumsum(0))).int() for x in lengths]
        self.tensors = AttentionTensors(q, k, v, softmax_scale, *offsets, *starts)
        self.is_packed = is_packed

    def outside(self, side: int) -> torch.Tensor:
        """Rows of the packed queries (0) or keys (1) in no sequence: bool [T]."""
        x, starts, offsets = (
            (self.tensors.q, self.tensors.cu_seqlens_q_padded, self.tensors.cu_seqlens_q),
            (self.tensors.k, self.tensors.cu_seqlens_kv_padded, self.tensors.cu_seqlens_kv),
        )[side]
        rows = torch.ones(x.shape[0], dtype=torch.bool)
        if not self.is_packed:
            return torch.zeros(x.shape[0], dtype=torch.bool)
        for start, length in zip(starts.tolist(), offsets.diff().tolist(), strict=False):
            rows[start : start + length] = False
        return rows

    def forward(self, empty_lse: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Out in the inputs' dtype and lse; ``empty_lse`` where no key is seen, NaN outside the sequences."""
        output = attention(self.request, self.tensors, compute_dtype=torch.float32)
        out, lse = output.out.to(self.tensors.q.dtype), output.lse.clone()
        lse[lse.isneginf()] = empty_lse
        if self.is_packed:
            out[self.outside(0)] = torch.nan
            lse[:, self.outside(0)] = torch.nan
        return out, lse

    def backward(self, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Tensors:
        """Gradients, NaN outside the sequences; out and lse must be those of these inputs."""
        exact, gradients = attention_with_gradients(self.request, self.tensors, dout, compute_dtype=torch.float32)
        inside = ~self.outside(0)
        compared = (out[inside], exact.out[inside]) if self.is_packed else (out, exact.out)
        torch.testing.assert_close(compared[0].float(), compared[1], rtol=2**-6, atol=2**-6)
        compared = (lse[:, inside], exact.lse[:, inside]) if self.is_packed else (lse, exact.lse)
        torch.testing.assert_close(*compared, rtol=1e-5, atol=1e-5)
        return self.written(gradients)

    def written(self, gradients: Gradients) -> Tensors:
        results = tuple(x.to(self.tensors.q.dtype) for x in (gradients.dq, gradients.dk, gradients.dv))
        if self.is_packed:
            for x, side in zip(results, (0, 1, 1), strict=True):
                x[self.outside(side)] = torch.nan
        return results


def install(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> ModuleType:
    """A module under a dotted name, and the packages above it."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        package = ModuleType(".".join(parts[:depth]))
        package.__path__ = []
        monkeypatch.setitem(sys.modules, package.__name__, package)
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    return module
