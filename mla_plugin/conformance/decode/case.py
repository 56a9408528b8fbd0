"""One conformance case of decode: a call described by plain values, which makes its request and its random tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mla_plugin.arguments.decode import DecodeLengths, DecodeTensors
from mla_plugin.conformance.attention.case import DTYPE_NAMES
from mla_plugin.hooks.decode import DecodeRequest

OTHER_PAGES = 3
"""Pages of the cache that no sequence uses."""


@dataclass(frozen=True)
class DecodeCase:
    """One decode call.

    Attributes:
        name: unique, without blanks; ``refuses`` may name it.
        dtype: of queries and cache.
        lengths: keys of each sequence.
        seqlen_q: query tokens of each sequence.
        num_heads: query heads.
        rank, rope: widths of c_kv and k_rope.
        rows: rows of the cache for each sequence; None for the longest length and a few more.
        page_size: tokens of a page; None for a contiguous cache.
        causal: queries are the last tokens.
        has_seqlens_kv: False leaves the lengths out; they fill the cache then.
        has_host_lengths: the lengths come as ``DecodeLengths``.
        leftpads: keys before which nothing is seen; None for no such tensor.
        return_lse: lse is asked for.
        is_packed: c_kv and k_rope are views of one tensor, and so are the queries.
        is_large: a real size, for CUDA devices only.
    """

    name: str
    dtype: torch.dtype = torch.float32
    lengths: tuple[int, ...] = (67, 1, 0, 130)
    seqlen_q: int = 1
    num_heads: int = 5
    rank: int = 256
    rope: int = 64
    rows: int | None = None
    page_size: int | None = None
    causal: bool = True
    has_seqlens_kv: bool = True
    has_host_lengths: bool = False
    leftpads: tuple[int, ...] | None = None
    return_lse: bool = True
    is_packed: bool = True
    is_large: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def tags(self) -> frozenset[str]:
        """What the case is about; ``refuses`` names them."""
        facts = {
            "large" if self.is_large else "small": True,
            "paged": self.page_size is not None,
            "contiguous": self.page_size is None,
            "several_queries": self.seqlen_q > 1,
            "causal": self.causal and self.seqlen_q > 1,
            "empty_sequences": 0 in self.lengths,
            "leftpad": self.leftpads is not None,
            "return_lse": self.return_lse,
            "no_host_lengths": not self.has_host_lengths and self.has_seqlens_kv,
            "host_lengths": self.has_host_lengths,
        }
        named = {"all", DTYPE_NAMES[self.dtype], f"ranks={self.rank}/{self.rope}", f"page_size={self.page_size}"}
        return frozenset(named | {name for name, holds in facts.items() if holds})

    @property
    def capacity(self) -> int:
        """Rows that the cache has for a sequence."""
        if not self.has_seqlens_kv:
            return max(self.lengths)
        rows = max(self.lengths) + 5 if self.rows is None else self.rows
        return rows if self.page_size is None else -(-rows // self.page_size) * self.page_size

    def request(self, device: torch.device | str) -> DecodeRequest:
        """The request of the case."""
        device = torch.device(device)
        return DecodeRequest(
            dtype=self.dtype,
            device_type=device.type,
            device_index=device.index,
            batch_size=len(self.lengths),
            seqlen_q=self.seqlen_q,
            num_heads=self.num_heads,
            kv_lora_rank=self.rank,
            qk_rope_head_dim=self.rope,
            max_seqlen_kv=self.capacity,
            page_size=self.page_size,
            causal=self.causal and self.seqlen_q > 1,
            has_seqlens_kv=self.has_seqlens_kv,
            has_host_lengths=self.has_host_lengths or not self.has_seqlens_kv,
            has_leftpad_kv=self.leftpads is not None,
            return_lse=self.return_lse,
        )

    def tensors(self, device: torch.device | str, generator: torch.Generator, poison: float) -> DecodeTensors:
        """Random tensors; rows beyond a length are multiplied by ``poison``, unused page numbers are absurd."""

        def draw(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64).to(device, self.dtype)

        batch, width = len(self.lengths), self.rank + self.rope
        queries = draw(batch, self.seqlen_q, self.num_heads, width)
        tokens = draw(batch, self.capacity, width)
        for b, length in enumerate(self.lengths):
            tokens[b, length:] *= poison
        page_table = None
        cache = tokens
        if self.page_size is not None:
            cache, page_table = self._in_pages(tokens, generator, poison)
        parts = [queries[..., : self.rank], queries[..., self.rank :], cache[..., : self.rank], cache[..., self.rank :]]
        if not self.is_packed:
            parts = [x.clone(memory_format=torch.contiguous_format) for x in parts]
        seqlens_kv = lengths = leftpad_kv = None
        if self.has_seqlens_kv:
            seqlens_kv = torch.tensor(self.lengths, dtype=torch.int32, device=device)
            lengths = DecodeLengths(self.lengths, seqlens_kv=seqlens_kv) if self.has_host_lengths else None
        if self.leftpads is not None:
            leftpad_kv = torch.tensor(self.leftpads, dtype=torch.int32, device=device)
        return DecodeTensors(
            *(parts[0], parts[1], parts[2], parts[3]),
            softmax_scale=0.1353,  # DeepSeek-V3: YaRN multiplies 192 ** -0.5 by 1.87
            causal=self.causal and self.seqlen_q > 1,
            return_lse=self.return_lse,
            page_table=page_table,
            seqlens_kv=seqlens_kv,
            leftpad_kv=leftpad_kv,
            lengths=lengths,
        )

    def _in_pages(
        self, tokens: torch.Tensor, generator: torch.Generator, poison: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same rows in shuffled pages, and the page table; entries behind the used ones name no page."""
        assert self.page_size is not None
        batch, capacity, width = tokens.shape
        each = capacity // self.page_size
        order = torch.randperm(batch * each + OTHER_PAGES, generator=generator)
        cache = torch.randn(len(order), self.page_size, width, generator=generator).to(tokens) * poison
        page_table = torch.full((batch, each + 1), 2**30, dtype=torch.int32)
        pages = order[: batch * each].view(batch, each)
        for b, length in enumerate(self.lengths):
            used = -(-length // self.page_size)
            page_table[b, :used] = pages[b, :used]
        cache[pages.flatten().to(tokens.device)] = tokens.view(-1, self.page_size, width)
        return cache, page_table.to(tokens.device)
