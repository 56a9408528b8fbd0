"""One conformance case of decode: a call described by plain values, which makes its request and its random tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from mla_plugin.arguments.cache_format import FP8, FP8_DS_MLA, PLAIN, TILE, quantised_rows, split_quantised
from mla_plugin.arguments.decode import DecodeLengths, DecodeTensors, Profile
from mla_plugin.arguments.layout import LAYOUTS
from mla_plugin.conformance.attention.case import DTYPE_NAMES
from mla_plugin.conformance.attention.draw import Draw, Storage
from mla_plugin.conformance.attention.scores import Scores, scaled
from mla_plugin.hooks.decode import DecodeRequest

CacheStorage = Literal["contiguous", "sliced_dims", "sliced_batch", "transposed", "expanded_batch", "gapped_rows"]
SCALE = 0.0123
"""About that of caches in ``fp8``."""
_TINY, _LARGE, _TINIEST, _ROPES = 2.0**-12, 2.0**7, 2.0**-60, (2.0**24, 2.0**-24)
"""What spread numbers are multiplied by: in ``fp8`` all, for a scale of 3e-6; in ``fp8_ds_mla`` those of every second
sequence, for scales above 1, 128 columns of all, for scales far below those of the other columns, and those of k_rope
by turns, because its bfloat16 goes beyond float16 at both ends; q_rope has the inverse."""
_LARGER = 2.0**8
"""What large numbers are multiplied by in ``fp8``, for a scale of about 3."""
_NAN = 0x7F
"""A byte of ``fp8`` that is no number."""
GAP = 8
"""Numbers between c_kv and k_rope in ``gapped_rows``."""
UNUSED = (2**30, -1, 0, -(2**31))
"""Entries of the page table behind those in use."""


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
        lengths_storage: of the lengths and the first keys that are seen, on the device.
        has_host_lengths: the lengths come as a ``DecodeLengths`` that the host knows. Otherwise they come, over pages,
            as a ``DecodeLengths`` that only the device knows, and over a contiguous cache as a tensor.
        leftpads: keys before which nothing is seen; None for no such tensor.
        return_lse: lse is asked for.
        is_packed: c_kv and k_rope are views of one tensor, and so are the queries.
        is_large: a real size, for CUDA devices only.
        softmax_scale: 0.1353 is DeepSeek-V3's, where YaRN multiplies 192 ** -0.5 by 1.87.
        scores: as in attention's ``scores``, of queries that are ready for the scale; ``large`` are 100 and more.
        numbers: of the cache; ``spread`` have every magnitude that a quantised cache tells apart, and tokens that are
            small as a whole; ``large`` ones have a scale above 1 in ``fp8``.
        query_storage: ``transposed`` is head-major, ``sliced_heads`` every second head of a larger tensor.
        rope_storage: of q_rope, where it is another one: the product with W_UK may leave q_nope_abs alone head-major.
        cache_storage: ``sliced_dims`` has rows wider than the cache, ``sliced_batch`` every second page or sequence,
            ``transposed`` the first tokens of all pages or sequences before the second ones; ``expanded_batch`` is one
            sequence's for all, of a contiguous cache; ``gapped_rows`` has c_kv and k_rope in the same rows, as if
            packed, but something between them.
        rope_storage_in_cache: of k_rope, where it is another one; for a pair of caches.
        table_storage: of the page table; ``expanded_batch`` is one row for all, so the sequences have the same keys.
        spare_columns: columns of the page table behind those that the cache's capacity needs.
        shares_pages: the sequences' first pages are the same ones, as a cache of common prefixes has it.
        prefix_pages: so many of them.
        page_order: ``ascending`` pages of a sequence follow one another, as in a cache that is still empty;
            ``descending`` ones come from the end of a list of free pages.
        spare_pages: pages of the cache that no sequence uses, half of them before those that one does.
        kv_cache_format: as in ``DecodeRequest``; a quantised cache has one storage for all.
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
    softmax_scale: float = 0.1353
    scores: Scores = "normal"
    numbers: Literal["normal", "spread", "large"] = "normal"
    query_storage: Storage = "contiguous"
    rope_storage: Storage | None = None
    cache_storage: CacheStorage = "contiguous"
    rope_storage_in_cache: CacheStorage | None = None
    table_storage: Literal["contiguous", "sliced_dims", "offset", "expanded_batch"] = "contiguous"
    spare_columns: int = 1
    lengths_storage: Literal["contiguous", "offset"] = "contiguous"
    shares_pages: bool = False
    prefix_pages: int = 2
    page_order: Literal["shuffled", "ascending", "descending"] = "shuffled"
    spare_pages: int = 3
    kv_cache_format: str = PLAIN

    def __str__(self) -> str:
        return self.name

    @property
    def cost(self) -> float:
        """Million multiplications, to choose cases for a slow interpreter by."""
        return sum(self.lengths) * self.seqlen_q * self.num_heads * (2 * self.rank + self.rope) / 1e6

    @property
    def tags(self) -> frozenset[str]:
        """What the case is about; ``refuses`` names them."""
        facts = {
            "large" if self.is_large else "small": True,
            "paged": self.page_size is not None,
            "contiguous": self.page_size is None,
            "several_queries": self.seqlen_q > 1,
            "causal": self.causal and self.seqlen_q > 1,
            "all_keys": not self.causal and self.seqlen_q > 1,
            "empty_sequences": 0 in self.lengths,
            "leftpad": self.leftpads is not None,
            "return_lse": self.return_lse,
            "no_host_lengths": not self.has_host_lengths and self.has_seqlens_kv,
            "host_lengths": self.has_host_lengths,
            "full_cache": not self.has_seqlens_kv,
            "strided_queries": self.query_storage != "contiguous",
            "strided_cache": self._cache_storages != ("contiguous", "contiguous"),
            "unaligned_rows": not self.has_aligned_rows,
            "sliced_page_table": self.page_size is not None and self.table_storage != "contiguous",
            "shared_pages": self.shares_pages,
            "pair_of_caches": not self.is_packed,
            f"scores_{self.scores}": self.scores != "normal",
            f"kv_cache_format={self.kv_cache_format}": self.kv_cache_format != PLAIN,
        }
        named = {"all", DTYPE_NAMES[self.dtype], f"ranks={self.rank}/{self.rope}", f"page_size={self.page_size}"}
        named |= {f"queries={self.seqlen_q}", f"heads={self.num_heads}"}
        return frozenset(named | {name for name, holds in facts.items() if holds})

    @property
    def capacity(self) -> int:
        """Rows that the cache has for a sequence."""
        if not self.has_seqlens_kv:
            return max(self.lengths)
        rows = max(self.lengths, default=0) + 5 if self.rows is None else self.rows
        return rows if self.page_size is None else -(-rows // self.page_size) * self.page_size

    @property
    def _cache_storages(self) -> tuple[CacheStorage, CacheStorage]:
        """Memory of c_kv and of k_rope."""
        return self.cache_storage, self.rope_storage_in_cache or self.cache_storage

    @property
    def _has_one_cache(self) -> bool:
        """All sequences have the same keys, the shorter ones fewer of them."""
        return "expanded_batch" in (self.cache_storage, self.table_storage)

    @property
    def _columns(self) -> int:
        """Pages that the page table has room for, for each sequence."""
        return self.capacity // (self.page_size or 1) + self.spare_columns

    @property
    def _shared_pages(self) -> int:
        """Pages at the beginning that all sequences have in common."""
        if self.table_storage == "expanded_batch":
            return self.capacity // (self.page_size or 1)
        most = self.capacity // self.page_size if self.shares_pages and self.page_size else 0
        return min(self.prefix_pages, most)

    @property
    def has_aligned_rows(self) -> bool:
        """As in ``DecodeRequest``: it follows from the widths of the rows in memory."""
        if self.kv_cache_format != PLAIN:
            widths = (self.rank, self.rank + self.rope if self.is_packed else self.rope)
            return self.kv_cache_format == FP8_DS_MLA or all(width % 16 == 0 for width in widths)
        if self.cache_storage == "gapped_rows":
            return (self.rank + GAP + self.rope) * self.dtype.itemsize % 16 == 0
        extra, of_rope = (8 if storage == "sliced_dims" else 0 for storage in self._cache_storages)
        whole = self.rank + self.rope
        steps = (self.rank, whole + extra) if self.is_packed else (self.rank + extra, self.rope + of_rope or 1)
        return all(step * self.dtype.itemsize % 16 == 0 for step in steps)

    def request(self, device: torch.device | str) -> DecodeRequest:
        """The request of the case."""
        device = torch.device(device)
        room = self.capacity if self.page_size is None else self._columns * self.page_size
        return DecodeRequest(
            dtype=self.dtype,
            device_type=device.type,
            device_index=device.index,
            batch_size=len(self.lengths),
            seqlen_q=self.seqlen_q,
            num_heads=self.num_heads,
            kv_lora_rank=self.rank,
            qk_rope_head_dim=self.rope,
            max_seqlen_kv=1 << (room - 1).bit_length() if room else 0,
            page_size=self.page_size,
            causal=self.causal and self.seqlen_q > 1,
            has_seqlens_kv=self.has_seqlens_kv,
            has_host_lengths=self.has_host_lengths or not self.has_seqlens_kv,
            profile=self._profile,
            has_leftpad_kv=self.leftpads is not None,
            has_aligned_rows=self.has_aligned_rows,
            has_joined_rows=self._has_joined_rows,
            return_lse=self.return_lse,
            kv_cache_format=self.kv_cache_format,
        )

    @property
    def _has_joined_rows(self) -> bool:
        """Views of an empty cache have no place in memory."""
        has_rows = self.page_size is not None or bool(self.lengths)
        return self.kv_cache_format != FP8_DS_MLA and (not self.rope or (self.is_packed and has_rows))

    @property
    def _profile(self) -> Profile | None:
        if not self.has_seqlens_kv:
            return Profile.of([self.capacity])
        return Profile.of(self.lengths) if self.has_host_lengths else None

    def other(self) -> DecodeCase:
        """A call of the same request in a cache of the same size: other lengths, and another scale."""
        leftpads, scale = self.leftpads and self.leftpads[::-1], 0.8 * self.softmax_scale
        return replace(self, lengths=self.lengths[::-1], leftpads=leftpads, rows=self.capacity, softmax_scale=scale)

    def tensors(
        self, device: torch.device | str, generator: torch.Generator, poison: float, *, is_guarded: bool = True
    ) -> DecodeTensors:
        """Random tensors; rows beyond a length are multiplied by ``poison``, unused page numbers are invalid.

        ``is_guarded`` as in ``Draw``.
        """
        draw = Draw(self.dtype, torch.device(device), generator, is_guarded=is_guarded)
        batch, width = len(self.lengths), self.rank + self.rope
        queries = draw.normal((batch, self.seqlen_q, self.num_heads, width))
        tokens = draw.normal((batch, self.capacity, width))
        if self.scores == "large":
            queries = queries * 20.0
        else:
            scaled(self.scores, queries, tokens, 1, self.softmax_scale, draw)
        if self.numbers == "spread":
            exponents = (
                20.0 * draw.uniform(tokens.shape) - 16.5 - 12.0 * draw.uniform(tokens.shape[:2])[..., None].round()
            )
            tokens = (tokens.sign() * exponents.exp2()).to(tokens.dtype) * self._magnitude
            if self.kv_cache_format == FP8_DS_MLA:
                tokens[1::2] *= _LARGE
                tokens[..., TILE : 2 * TILE] *= _TINIEST
                for first, factor in enumerate(_ROPES):
                    tokens[..., self.rank + first :: 2] *= factor
                    queries[..., self.rank + first :: 2] /= factor
        if self.numbers == "large":
            tokens = tokens * self._magnitude
        shared = max(self.lengths) if self._has_one_cache else self._shared_pages * (self.page_size or 0)
        for b, length in enumerate(self.lengths):
            tokens[b, max(length, shared) :] *= poison
        common = self.capacity if self._has_one_cache else shared
        tokens[:, :common] = tokens[:1, :common].clone()
        cache, page_table = (tokens, None) if self.page_size is None else self._in_pages(draw, tokens, poison)
        c_kv, k_rope, kv_scale = self._stored(draw, cache)
        parts = [queries] if self.is_packed else [queries[..., : self.rank], queries[..., self.rank :]]
        storages = (self.query_storage, self.rope_storage or self.query_storage)
        placed = [draw.placed(x.contiguous(), how, LAYOUTS["bshd"]) for x, how in zip(parts, storages, strict=False)]
        q_nope, q_rope = (placed[0][..., : self.rank], placed[0][..., self.rank :]) if self.is_packed else placed
        seqlens_kv = lengths = leftpad_kv = None
        if self.has_seqlens_kv:
            given = torch.tensor(self.lengths, dtype=torch.int32, device=device)
            seqlens_kv = draw.placed(given, self.lengths_storage)
            if self.has_host_lengths:
                lengths = DecodeLengths(self.lengths, seqlens_kv=seqlens_kv)
            elif self.page_size is not None:  # as vLLM and SGLang have them
                lengths = DecodeLengths(seqlens_kv=seqlens_kv)
        if self.leftpads is not None:
            given = torch.tensor(self.leftpads, dtype=torch.int32, device=device)
            leftpad_kv = draw.placed(given, self.lengths_storage)
        return DecodeTensors(
            *(q_nope, q_rope, c_kv, k_rope),
            softmax_scale=self.softmax_scale / self._magnitude,
            causal=self.causal and self.seqlen_q > 1,
            return_lse=self.return_lse,
            page_table=None if page_table is None else draw.placed(page_table, self.table_storage, LAYOUTS["bshd"]),
            seqlens_kv=seqlens_kv,
            leftpad_kv=leftpad_kv,
            lengths=lengths,
            kv_scale=kv_scale,
            kv_cache_format=self.kv_cache_format,
        )

    @property
    def _magnitude(self) -> float:
        return {"spread": _TINY, "large": _LARGER}.get(self.numbers, 1.0) if self.kv_cache_format == FP8 else 1.0

    def _stored(self, draw: Draw, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """c_kv, k_rope and kv_scale with the numbers of ``cache``, which a quantised one rounds."""
        if self.kv_cache_format != PLAIN:
            return self._quantised(draw, cache)
        if self.cache_storage == "gapped_rows":  # of both together
            c_kv, k_rope = cache.split_with_sizes((self.rank, self.rope), -1)
            between = cache.new_full((*cache.shape[:2], GAP), torch.nan)
            whole = draw.placed(torch.cat((c_kv, between, k_rope), -1), "contiguous")
            return whole[..., : self.rank], whole[..., self.rank + GAP :], None
        whole_or_parts = (cache,) if self.is_packed else (cache[..., : self.rank], cache[..., self.rank :])
        order = slice(None, None, 1 if draw.is_guarded else -1)  # neither lies before the other in all calls
        places = list(zip(whole_or_parts, self._cache_storages, strict=False))[order]
        stored = [self._cache(draw, *each) for each in places][order]
        if self.is_packed:
            return stored[0][..., : self.rank], stored[0][..., self.rank :], None
        return stored[0], stored[1], None

    def _quantised(self, draw: Draw, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scale = self._magnitude * SCALE * (0.5 + draw.uniform(()).float()) if self.kv_cache_format == FP8 else None
        rows = cache.flatten(0, 1)
        parts = quantised_rows(rows[:, : self.rank], rows[:, self.rank :], scale, self.kv_cache_format, False)
        found = [torch.cat(parts, -1)] if self.is_packed else list(parts)
        found = [x.view(*cache.shape[:2], x.shape[-1]) for x in found]
        found = [_placed_bytes(x, self.cache_storage) for x in found]
        whole = found[0] if self.is_packed else (found[0], found[1])
        return split_quantised(whole, self.rank, self.kv_cache_format, scale)

    def _cache(self, draw: Draw, values: torch.Tensor, storage: CacheStorage) -> torch.Tensor:
        """The cache, or one of the pair; what lies between is NaN."""
        assert storage != "gapped_rows"
        if storage == "sliced_batch":
            whole = draw.placed(values.new_full((2 * len(values), *values.shape[1:]), torch.nan), "contiguous")
            return whole[::2].copy_(values)
        if storage == "transposed":
            return draw.placed(values.transpose(0, 1).contiguous(), "contiguous").transpose(0, 1)
        return draw.placed(values, storage, LAYOUTS["bshd"] if storage == "expanded_batch" else None)

    def _in_pages(self, draw: Draw, tokens: torch.Tensor, poison: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The same rows in pages, and the page table; entries behind the used ones name no page."""
        assert self.page_size is not None
        batch, capacity, width = tokens.shape
        each = capacity // self.page_size
        count = batch * each + self.spare_pages
        order = torch.randperm(count, generator=draw.generator)
        if self.page_order != "shuffled":
            order = torch.arange(count).roll(-(self.spare_pages // 2 + 1))
            order = order if self.page_order == "ascending" else count - 1 - order
        cache = draw.normal((len(order), self.page_size, width)) * poison
        page_table = torch.tensor(UNUSED, dtype=torch.int32).repeat(batch * self._columns)[: batch * self._columns]
        page_table = page_table.view(batch, self._columns)
        pages = order[: batch * each].view(batch, each)
        pages[:, : self._shared_pages] = pages[:1, : self._shared_pages].clone()
        for b, length in enumerate(self.lengths):
            used = -(-(max(self.lengths) if self.table_storage == "expanded_batch" else length) // self.page_size)
            page_table[b, :used] = pages[b, :used]
        cache[pages.flatten().to(tokens.device)] = tokens.view(-1, self.page_size, width)
        return cache, page_table.to(tokens.device)


def _placed_bytes(x: torch.Tensor, storage: CacheStorage) -> torch.Tensor:
    """A quantised cache, or one of the pair; what lies between is NaN."""
    if storage == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if storage == "sliced_batch":
        return x.new_full((2 * len(x), *x.shape[1:]), _NAN)[::2].copy_(x)
    if storage == "sliced_dims":
        return x.new_full((*x.shape[:-1], x.shape[-1] + 16), _NAN)[..., : x.shape[-1]].copy_(x)
    return x


def like(lengths: DecodeLengths | None, others: Sequence[int], seqlens_kv: torch.Tensor | None) -> DecodeLengths | None:
    """Other lengths, given in the same way: known to the host, to the device alone, or as a tensor."""
    if lengths is None:
        return None
    return DecodeLengths(None if lengths.host is None else others, seqlens_kv=seqlens_kv)
