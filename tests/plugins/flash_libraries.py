"""FlashAttention 2, 3 and 4 emulated on the CPU: their signatures, what they reject, and what they leave unwritten.

Written after ``flash_attn_interface.py`` and ``flash_api.cpp`` (FlashAttention 2.8.3 and its hopper folder), PyTorch's
copy of them, vLLM's ``_vllm_fa3_C``, SGLang's ``sgl_kernel.flash_attn`` and ``flash_attn/cute/interface.py`` of
4.0.0b36. They compute by the float32 oracle. What the kernels do not write is NaN, a row that sees no key has lse
+inf (FlashAttention 2 and 3) and what they would refuse or get wrong fails an assertion.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.reference import attention, visibility

HALF = (torch.bfloat16, torch.float16)
TILE = 128
"""Rows that a kernel loads at once, also past a sequence's end."""
Window = tuple[int, int]
Tensors = tuple[torch.Tensor, ...]


def check_tile_addresses(*tensors: torch.Tensor) -> None:
    """What hardware that copies tiles wants of 16-bit tensors."""
    for x in tensors:
        assert x.dtype in HALF
        assert x.dtype == tensors[0].dtype
        assert x.stride(-1) == 1
        assert x.data_ptr() % 16 == 0
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
        *,
        clears_tiles: bool = False,
    ) -> None:
        self.clears_tiles = clears_tiles
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

    def forward(self, empty_lse: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Out in the inputs' dtype and lse; ``empty_lse`` where no key is seen, NaN outside the sequences."""
        output = attention(self.request, self.tensors, compute_dtype=torch.float32)
        out, lse = output.out.to(self.tensors.q.dtype), output.lse.clone()
        lse[lse.isneginf()] = empty_lse
        if self.is_packed:
            outside = torch.ones(out.shape[0], dtype=torch.bool)
            for _, rows, _ in self.sequences():
                outside[rows] = False
            out[outside] = torch.nan
            lse[:, outside] = torch.nan
            for _, rows, columns in self.sequences():
                out[rows] += self._of_heads(self._behind(self.tensors.v, columns))
        return out, lse

    def _behind(self, x: torch.Tensor, rows: slice) -> torch.Tensor:
        """What a product over whole tiles adds for the rows after a sequence, whose weights are 0: 0 or NaN, [H, D].

        FlashAttention 3 and 4 load tiles by hardware, FlashAttention 2 clears the rows after the end.
        """
        if self.clears_tiles or not self.is_packed:
            return torch.zeros(x.shape[-2:])
        tiles = -(-(rows.stop - rows.start) // TILE)
        return (x[rows.stop : rows.start + tiles * TILE].float() * 0).sum(0)

    def _of_heads(self, behind: torch.Tensor) -> torch.Tensor:
        """Of the key and value heads, as many as query heads."""
        return behind.repeat_interleave(self.request.num_heads // self.request.num_kv_heads, 0)

    def _of_kv_heads(self, behind: torch.Tensor) -> torch.Tensor:
        """Of the query heads, added up for each key and value head."""
        return behind.unflatten(0, (self.request.num_kv_heads, -1)).sum(1)

    def backward(self, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Tensors:
        """Gradients as the kernels compute them, from the given out and lse; NaN outside the sequences."""
        inputs = (self.tensors.q, self.tensors.k, self.tensors.v)
        gradients = tuple(torch.full(x.shape, torch.nan, dtype=x.dtype) for x in inputs)
        for batch, rows, columns in self.sequences():
            at_q, at_k = (rows, columns) if self.is_packed else ((batch, rows), (batch, columns))
            of_lse = lse[:, rows] if self.is_packed else lse[batch, :, rows]
            parts = (self.tensors.q[at_q], self.tensors.k[at_k], self.tensors.v[at_k], dout[at_q], out[at_q])
            results = list(self._sequence_backward(*(x.float() for x in parts), of_lse))
            # A row after the queries: P = exp(q @ k - inf), dS = P * (dout @ v); a column after the keys: P = 0.
            of_q, of_dout = (self._behind(x, rows).sum(-1, keepdim=True) for x in (self.tensors.q, dout))
            of_k, of_v = (self._behind(x, columns).sum(-1, keepdim=True) for x in (self.tensors.k, self.tensors.v))
            results[0] += self._of_heads(of_k + of_v)
            results[1] += self._of_kv_heads(of_q + of_dout)
            results[2] += self._of_kv_heads(of_q + of_dout)
            for gradient, at, result in zip(gradients, (at_q, at_k, at_k), results, strict=True):
                gradient[at] = result.to(gradient.dtype)
        return gradients

    def sequences(self) -> Iterator[tuple[int, slice, slice]]:
        """(index, rows of the queries, rows of the keys) of each sequence."""
        given = self.tensors
        if not self.is_packed:
            yield from ((b, slice(0, given.q.shape[1]), slice(0, given.k.shape[1])) for b in range(given.q.shape[0]))
            return
        sides = (
            (given.cu_seqlens_q_padded, given.cu_seqlens_q),
            (given.cu_seqlens_kv_padded, given.cu_seqlens_kv),
        )
        spans = [
            [slice(start, start + n) for start, n in zip(starts.tolist(), offsets.diff().tolist(), strict=False)]
            for starts, offsets in sides
        ]
        yield from ((b, *pair) for b, pair in enumerate(zip(*spans, strict=True)))

    def _sequence_backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dout: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> Tensors:
        """[S, H, D] each; delta = rowsum(dout * out), dS = P * (dout @ V.T - delta)."""
        group, scale = self.request.num_heads // self.request.num_kv_heads, self.tensors.softmax_scale
        k_all, v_all = (x.repeat_interleave(group, 1) for x in (k, v))
        hidden = ~visibility(self.request, q.shape[0], k.shape[0])
        scores = (torch.einsum("ihd,jhd->hij", q, k_all) * scale).masked_fill(hidden, -torch.inf)
        weights = (scores - lse.masked_fill(lse.isneginf(), 0).unsqueeze(-1)).exp()
        delta = (dout * out).sum(-1).t().unsqueeze(-1)
        dscores = weights * (torch.einsum("ihd,jhd->hij", dout, v_all) - delta) * scale
        dq = torch.einsum("hij,jhd->ihd", dscores, k_all)
        dk, dv = torch.einsum("hij,ihd->jhd", dscores, q), torch.einsum("hij,ihd->jhd", weights, dout)
        return dq, *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))


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
