"""The paged compressed cache: compute slots, append new tokens, gather a contiguous copy.

A slot is the index of a row: ``page * page_size + row in the page``. Slots are int64, because a cache may have more
than 2**31 elements. The functions can be captured in a CUDA graph and do not synchronise. Values of slots and page
tables are checked on the CPU; on a CUDA device only with MLA_PLUGIN_CHECK=1, which synchronises.
"""

from __future__ import annotations

import torch

from mla_plugin import cache_operators
from mla_plugin.arguments import cache_format
from mla_plugin.arguments.cache_format import PLAIN
from mla_plugin.arguments.checks import MAX_LENGTH, check_count, check_tensor, is_traced, may_read
from mla_plugin.arguments.decode import DecodeLengths
from mla_plugin.arguments.decode_checks import split_cache
from mla_plugin.arguments.transforms import wants_derivative

__all__ = ["append", "gather", "slot_mapping"]

Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""One tensor [pages, page_size, R + Dr], or a pair (c_kv [pages, page_size, R], k_rope [pages, page_size, Dr]).

Of ``fp8_ds_mla`` one tensor [pages, page_size, 656].
"""


def slot_mapping(page_table: torch.Tensor, seqlens_kv: torch.Tensor, page_size: int, seqlen_q: int = 1) -> torch.Tensor:
    """Slots of the last ``seqlen_q`` tokens of each sequence, for ``append``.

    Args:
        page_table: int32 [B, n], each sequence's pages in order.
        seqlens_kv: int32 [B], number of tokens of each sequence, including the new ones.
        page_size: tokens per page.
        seqlen_q: new tokens of each sequence.

    Returns:
        int64 [B, seqlen_q]; -1, which ``append`` skips, for a token before the sequence's first one, and where the
        sequence's pages are full or the page index is negative.

    Raises:
        IndexError: a length is negative, a sequence's pages are full, or a token's page is negative. On a CUDA device
            only with MLA_PLUGIN_CHECK=1.
        ValueError, TypeError: an argument is invalid.
    """
    _check_indices("page_table", page_table, 2, torch.int32)
    _check_indices("seqlens_kv", seqlens_kv, 1, torch.int32)
    if page_table.shape[0] != seqlens_kv.shape[0] or page_table.device != seqlens_kv.device:
        raise ValueError(
            f"page_table {list(page_table.shape)} on {page_table.device} and seqlens_kv {list(seqlens_kv.shape)} on "
            f"{seqlens_kv.device}; one row and one length per sequence are needed, on one device"
        )
    check_count("page_size", page_size, 1, MAX_LENGTH)
    check_count("seqlen_q", seqlen_q, most=MAX_LENGTH)
    room = page_table.shape[1] * page_size
    if may_read(seqlens_kv) and seqlens_kv.numel():
        if int(seqlens_kv.min()) < 0:
            raise IndexError(f"seqlens_kv={seqlens_kv.tolist()}; expected lengths of at least 0")
        if seqlen_q and int(seqlens_kv.max()) > room:
            raise IndexError(
                f"seqlens_kv={seqlens_kv.tolist()}; page_table has {page_table.shape[1]} pages of {page_size} for each "
                f"sequence, {room} tokens: they are full; allocate another page to the sequence"
            )
    position = seqlens_kv.long()[:, None] + torch.arange(-seqlen_q, 0, device=seqlens_kv.device)
    exists = (position >= 0) & (position < room)
    if room == 0:
        return torch.full_like(position, -1)
    position = position.clamp(0, room - 1)
    pages = page_table.gather(1, position // page_size).long()
    if may_read(seqlens_kv) and may_read(page_table) and bool((exists & (pages < 0)).any()):
        raise IndexError(
            f"page_table={page_table.tolist()} has a negative page where a token of seqlens_kv={seqlens_kv.tolist()} "
            "goes: allocate a page to the sequence"
        )
    return (pages * page_size + position % page_size).masked_fill(~exists | (pages < 0), -1)


def append(
    kv_cache: Cache,
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    kv_cache_format: str = PLAIN,
    kv_scale: torch.Tensor | None = None,
    power_of_2_scales: bool = False,
) -> None:
    """Write new tokens into their slots of a paged cache, in place.

    A contiguous cache [B, S_max, R + Dr] counts as B pages of S_max tokens: slot = sequence * S_max + position.

    Args:
        kv_cache: one tensor [pages, page_size, R + Dr], or a pair (c_kv [pages, page_size, R], k_rope [pages,
            page_size, Dr]); the last dimension is contiguous.
        c_kv: [..., R], the new tokens' normalised latents, dtype of the cache; bfloat16, float16 or float32 for a
            quantised one, not float16 for ``"fp8_ds_mla"``.
        k_rope: [..., Dr], rope part of their keys, with rope applied.
        slot_mapping: int64 [...], each token's slot, without duplicates. Tokens with a negative slot are skipped, which
            lets a CUDA graph run with padding tokens.
        kv_cache_format: as in ``decode``: ``"fp8"`` and ``"fp8_ds_mla"`` quantise the new rows, byte for byte as vLLM's
            writers do; see ``arguments/cache_format.py``.
        kv_scale: as in ``decode``; numbers are divided by it. Beyond 448 times its value they are cut off.
        power_of_2_scales: ``"fp8_ds_mla"`` only: scales as FlashMLA's own writer chooses them, the powers of two.

    Raises:
        NotImplementedError: the cache or a new row requires grad while grad mode is on.
        IndexError: a slot is out of range or given twice. On a CUDA device only with MLA_PLUGIN_CHECK=1; without it an
            out-of-range token is skipped, and either token of a duplicate slot may be written.
        ValueError, TypeError: an argument is invalid. After any error the cache is unchanged.
    """
    for name, x in (("c_kv", c_kv), ("k_rope", k_rope), ("slot_mapping", slot_mapping)):
        check_tensor(name, x)
    cache_format.check_format(kv_cache_format)
    rank, tokens = c_kv.shape[-1] if c_kv.dim() else 0, slot_mapping.numel()
    if not isinstance(power_of_2_scales, bool):
        raise TypeError(f"power_of_2_scales={power_of_2_scales!r}; expected True or False")
    if power_of_2_scales and kv_cache_format != cache_format.FP8_DS_MLA:
        raise ValueError(f"power_of_2_scales=True with kv_cache_format={kv_cache_format!r}, expected 'fp8_ds_mla'")
    pages_c, pages_k, kv_scale = _pages_of(kv_cache, rank, "of the new c_kv", kv_cache_format, kv_scale)
    _check_rows(pages_c, pages_k, c_kv, k_rope, tokens, kv_cache_format)
    _check_may_be_written(pages_c, pages_k, c_kv, k_rope)
    if slot_mapping.dtype != torch.int64 or slot_mapping.device != pages_c.device:
        raise TypeError(
            f"slot_mapping is {slot_mapping.dtype} on {slot_mapping.device}; expected int64 on {pages_c.device}"
        )
    slots = slot_mapping.reshape(-1).contiguous()  # a column of a table is one-dimensional with a stride
    rows_c, rows_k = (x.reshape(tokens, x.shape[-1]).contiguous() for x in (c_kv, k_rope))
    given = (pages_c, pages_k, rows_c, rows_k, slots)
    write = cache_operators.append_operator if is_traced(*given) else cache_operators.append
    write(*given, kv_scale, kv_cache_format, power_of_2_scales)


def gather(
    kv_cache: Cache,
    page_table: torch.Tensor,
    seqlens_kv: torch.Tensor,
    *,
    kv_lora_rank: int | None = None,
    max_seqlen_kv: int | None = None,
    kv_cache_format: str = PLAIN,
    kv_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy each sequence's rows into a contiguous cache, for ``decode`` or for expansion to keys and values.

    Args:
        kv_cache: as for ``append``.
        page_table: int32 [B, n]; entries beyond a sequence's length are not read.
        seqlens_kv: int32 [B].
        kv_lora_rank: R; required to split a cache that is one tensor.
        max_seqlen_kv: rows of the copy for each sequence; default n * page_size, which does not read the lengths.
            Rows beyond it are left out.
        kv_cache_format, kv_scale: as for ``append``.

    Returns:
        c_kv [B, max_seqlen_kv, R] and k_rope [B, max_seqlen_kv, Dr], views of one tensor; rows beyond a sequence's
        length are 0. Of a quantised cache bfloat16: the float32 product of number and scale, rounded.

    Raises:
        IndexError: a page is out of range. On a CUDA device only with MLA_PLUGIN_CHECK=1; without it its rows are 0.
        NotImplementedError: the cache requires grad while grad mode is on.
        ValueError, TypeError: an argument is invalid.
    """
    cache_format.check_format(kv_cache_format)
    kv_lora_rank = _rank_of(kv_cache, kv_lora_rank, kv_cache_format)
    pages_c, pages_k, kv_scale = _pages_of(kv_cache, kv_lora_rank, "of kv_lora_rank", kv_cache_format, kv_scale)
    _check_pages(pages_c, pages_k)
    if kv_lora_rank != (rank := cache_format.columns_of(pages_c, pages_k, kv_cache_format)[0]):
        raise ValueError(f"kv_lora_rank={kv_lora_rank}; c_kv of the pair has {rank} columns: leave kv_lora_rank out")
    if wants_derivative((pages_c, pages_k)):
        raise NotImplementedError(cache_operators.NO_DERIVATIVE_OF_GATHER)
    _check_indices("page_table", page_table, 2, torch.int32)
    _check_indices("seqlens_kv", seqlens_kv, 1, torch.int32)
    batch, width = page_table.shape
    if seqlens_kv.shape[0] != batch:
        raise ValueError(f"seqlens_kv has {seqlens_kv.shape[0]} lengths, page_table {batch} rows; they must be equal")
    if {page_table.device, seqlens_kv.device} != {pages_c.device}:
        raise ValueError(
            f"kv_cache is on {pages_c.device}, page_table on {page_table.device}, seqlens_kv on {seqlens_kv.device}; "
            "move them to one device"
        )
    if max_seqlen_kv is not None:
        check_count("max_seqlen_kv", max_seqlen_kv, most=MAX_LENGTH)
    rows = width * pages_c.shape[1] if max_seqlen_kv is None else max_seqlen_kv
    given = (pages_c, pages_k, page_table, seqlens_kv)
    copy = cache_operators.gather_operator if is_traced(*given) else cache_operators.gather
    out = copy(*given, kv_scale, kv_cache_format, rows)
    return out[..., :kv_lora_rank], out[..., kv_lora_rank:]


def _rank_of(kv_cache: Cache, kv_lora_rank: int | None, kv_cache_format: str) -> int:
    """R: the argument if it is given, else that of the format or of a pair."""
    if kv_lora_rank is not None:
        check_count("kv_lora_rank", kv_lora_rank, 1)
        return kv_lora_rank
    if kv_cache_format == cache_format.FP8_DS_MLA:
        return cache_format.RANK
    if isinstance(kv_cache, torch.Tensor):
        raise ValueError("kv_lora_rank=None; a cache that is one tensor needs it to be split")
    c_kv, _ = split_cache(kv_cache, 0)
    return c_kv.shape[-1] if c_kv.dim() else 0


def _pages_of(
    kv_cache: Cache, rank: int, whose: str, kv_cache_format: str, kv_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(c_kv, k_rope, kv_scale) as the kernels take them: a quantised cache in bytes."""
    if kv_cache_format == PLAIN:
        cache_format.check_no_scale(PLAIN, kv_scale)
        return *split_cache(kv_cache, rank, whose), None
    pages_c, pages_k = cache_format.byte_columns(kv_cache, rank, kv_cache_format)
    if kv_cache_format == cache_format.FP8:
        return pages_c, pages_k, cache_format.scale_of(kv_scale, pages_c.device)
    cache_format.check_no_scale(kv_cache_format, kv_scale)
    return pages_c, pages_k, None


def _check_pages(c_kv: torch.Tensor, k_rope: torch.Tensor) -> None:
    for name, x in (("c_kv", c_kv), ("k_rope", k_rope)):
        if x.dim() != 3 or (x.shape[-1] > 1 and x.stride(-1) != 1):
            raise ValueError(
                f"the cache's {name} has shape {list(x.shape)} and strides {x.stride()}; expected [pages, "
                "page_size, columns] with a contiguous last dimension"
            )
    if c_kv.shape[:2] != k_rope.shape[:2] or c_kv.dtype != k_rope.dtype or c_kv.device != k_rope.device:
        raise ValueError(
            f"the cache's c_kv is {list(c_kv.shape)} {c_kv.dtype} on {c_kv.device} and k_rope {list(k_rope.shape)} "
            f"{k_rope.dtype} on {k_rope.device}; they must have the same pages, dtype and device"
        )


def _check_rows(
    pages_c: torch.Tensor,
    pages_k: torch.Tensor,
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    tokens: int,
    kv_cache_format: str,
) -> None:
    _check_pages(pages_c, pages_k)
    columns = cache_format.columns_of(pages_c, pages_k, kv_cache_format)
    for name, pages, rows, width in zip(("c_kv", "k_rope"), (pages_c, pages_k), (c_kv, k_rope), columns, strict=True):
        if rows.dim() < 1 or rows.shape[-1] != width or rows.shape[:-1].numel() != tokens:
            raise ValueError(
                f"{name} has shape {list(rows.shape)}; expected [{tokens}, {width}]: one row per slot, and c_kv and "
                f"k_rope as wide as the cache, {columns[0]} + {columns[1]}"
            )
        if kv_cache_format != PLAIN:
            taken = cache_format.ROW_DTYPES[kv_cache_format]
            if rows.dtype not in taken or rows.device != pages.device:
                accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in taken)
                raise TypeError(
                    f"{name} is {rows.dtype} on {rows.device}; expected one of {accepted} on "
                    f"{pages.device} with kv_cache_format={kv_cache_format!r}"
                )
        elif rows.dtype != pages.dtype or rows.device != pages.device:
            raise TypeError(
                f"{name} is {rows.dtype} on {rows.device}, the cache {pages.dtype} on {pages.device}; cast or move it"
            )


def _check_may_be_written(
    pages_c: torch.Tensor, pages_k: torch.Tensor, c_kv: torch.Tensor, k_rope: torch.Tensor
) -> None:
    if wants_derivative((pages_c, pages_k, c_kv, k_rope)):
        raise NotImplementedError(cache_operators.NO_DERIVATIVE_OF_APPEND)
    for name, pages in (("c_kv", pages_c), ("k_rope", pages_k)):
        if any(size > 1 and stride == 0 for size, stride in zip(pages.shape[:2], pages.stride()[:2], strict=True)):
            raise ValueError(
                f"the cache's {name} has shape {list(pages.shape)} and strides {pages.stride()}: its rows share memory "
                "and cannot be written; pass .contiguous()"
            )
        is_inference = not torch.compiler.is_compiling() and pages.is_inference()
        if is_inference and not pages.is_cuda and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                f"the cache's {name} was created in torch.inference_mode(); PyTorch cannot write to it outside that "
                "mode: call append in inference mode too, or create the cache outside it"
            )


def _check_indices(name: str, x: torch.Tensor, rank: int, dtype: torch.dtype) -> None:
    if isinstance(x, DecodeLengths):
        raise TypeError(f"{name} is DecodeLengths; expected a torch.Tensor: pass its seqlens_kv")
    check_tensor(name, x)
    if x.dtype != dtype or x.dim() != rank or (x.shape[-1] > 1 and x.stride(-1) != 1):
        raise TypeError(
            f"{name} is {x.dtype} {list(x.shape)} with strides {x.stride()}; expected {dtype} of {rank} dimensions, "
            "the last one contiguous"
        )
