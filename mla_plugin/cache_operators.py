"""Writes and reads the rows of a paged cache: by our kernels on CUDA devices, elsewhere by PyTorch.

``append`` and ``gather`` check the values of slots and pages where the host may read them. ``append_operator`` and
``gather_operator`` are the same for traced and transformed calls. ``mla_plugin.cache`` has checked everything else.
"""

from __future__ import annotations

from types import ModuleType

import torch

from mla_plugin.arguments import cache_format
from mla_plugin.arguments.cache_format import PLAIN
from mla_plugin.arguments.checks import may_read
from mla_plugin.arguments.transforms import loop_under_vmap, refuse_derivatives

NO_DERIVATIVE_OF_APPEND = (
    "the cache or a new row requires grad or has a tangent; append writes in place and has no derivative: pass "
    ".detach(), or call it under torch.no_grad()"
)
NO_DERIVATIVE_OF_GATHER = (
    "the cache requires grad or has a tangent; gather has no derivative: pass .detach(), or call it under "
    "torch.no_grad()"
)


def _kernels(kv_cache_format: str) -> ModuleType:
    if kv_cache_format == PLAIN:
        from mla_plugin.kernels.decode import cache

        return cache
    from mla_plugin.kernels.decode import quantised_cache

    return quantised_cache


def append(
    pages_c: torch.Tensor,
    pages_k: torch.Tensor,
    rows_c: torch.Tensor,
    rows_k: torch.Tensor,
    slots: torch.Tensor,
    kv_scale: torch.Tensor | None,
    kv_cache_format: str,
    power_of_2_scales: bool,
) -> None:
    """Write rows into their slots, in place.

    Args:
        pages_c, pages_k: [pages, page_size, ..]; of a quantised cache ``byte_columns``.
        rows_c, rows_k: [T, R] and [T, Dr], contiguous.
        slots: int64 [T], contiguous.
        kv_scale: of ``fp8``.
        kv_cache_format: of the cache.
        power_of_2_scales: as in ``mla_plugin.cache.append``.

    Raises:
        IndexError: a slot is out of range or given twice; nothing was written.
        ValueError: the scale is negative or not finite.
    """
    num_slots = pages_c.shape[0] * pages_c.shape[1]
    _check_scale(kv_scale)
    if may_read(slots):
        _check_slots(slots, num_slots)
    is_plain = kv_cache_format == PLAIN
    if pages_c.is_cuda:
        more = () if is_plain else (kv_scale, power_of_2_scales)
        _kernels(kv_cache_format).append(pages_c, pages_k, rows_c, rows_k, slots, *more)
        return
    if not is_plain:
        rows_c, rows_k = cache_format.quantised_rows(rows_c, rows_k, kv_scale, kv_cache_format, power_of_2_scales)
    wanted = (slots >= 0) & (slots < num_slots)
    slots = slots[wanted]
    page, row = slots // pages_c.shape[1], slots % pages_c.shape[1]
    pages_c[page, row] = rows_c[wanted]
    pages_k[page, row] = rows_k[wanted]


def gather(
    pages_c: torch.Tensor,
    pages_k: torch.Tensor,
    page_table: torch.Tensor,
    seqlens_kv: torch.Tensor,
    kv_scale: torch.Tensor | None,
    kv_cache_format: str,
    rows: int,
) -> torch.Tensor:
    """Each sequence's first ``rows`` rows, [B, rows, R + Dr], zeros from its length on.

    Args:
        pages_c, pages_k, kv_scale, kv_cache_format: as for ``append``.
        page_table, seqlens_kv: as in ``mla_plugin.cache.gather``.
        rows: rows of the result for each sequence.

    Raises:
        IndexError: a page is out of range, or a length beyond the table's pages.
        ValueError: the scale is negative or not finite.
    """
    num_pages, page_size = pages_c.shape[:2]
    _check_scale(kv_scale)
    if may_read(page_table):
        _check_used_pages(page_table, seqlens_kv, num_pages, page_size)
    out = _empty(pages_c, pages_k, page_table, seqlens_kv, kv_scale, kv_cache_format, rows)
    c_out, k_out = out.split(cache_format.columns_of(pages_c, pages_k, kv_cache_format), -1)
    lengths = seqlens_kv.clamp(max=min(rows, page_table.shape[1] * page_size))
    if pages_c.is_cuda:
        more = () if kv_cache_format == PLAIN else (kv_scale,)
        _kernels(kv_cache_format).gather(pages_c, pages_k, page_table, lengths, *more, c_out, k_out)
        return out
    out.zero_()
    for b, length in enumerate(lengths.tolist()):
        used = page_table[b, : -(-length // page_size)]
        rows_c, rows_k = (pages[used].flatten(0, 1)[:length] for pages in (pages_c, pages_k))
        if kv_cache_format != PLAIN:
            rows_c, rows_k = cache_format.rows_of_bytes(rows_c, rows_k, kv_scale, kv_cache_format)
        c_out[b, :length] = rows_c
        k_out[b, :length] = rows_k
    return out


def _empty(
    pages_c: torch.Tensor,
    pages_k: torch.Tensor,
    page_table: torch.Tensor,
    seqlens_kv: torch.Tensor,
    kv_scale: torch.Tensor | None,
    kv_cache_format: str,
    rows: int,
) -> torch.Tensor:
    """The uninitialised result of ``gather``."""
    shape = (page_table.shape[0], rows, sum(cache_format.columns_of(pages_c, pages_k, kv_cache_format)))
    return pages_c.new_empty(shape, dtype=pages_c.dtype if kv_cache_format == PLAIN else torch.bfloat16)


def _check_scale(kv_scale: torch.Tensor | None) -> None:
    if kv_scale is not None and may_read(kv_scale):
        cache_format.check_scale_value(kv_scale)


def _check_slots(slots: torch.Tensor, num_slots: int) -> None:
    given = slots[slots >= 0]
    wrong = given[given >= num_slots]
    if wrong.numel():
        raise IndexError(
            f"slot_mapping has {wrong[:8].tolist()}; the cache has slots 0 to {num_slots - 1}, and a negative slot "
            "skips its token"
        )
    found, counts = given.unique(return_counts=True)
    twice = found[counts > 1]
    if twice.numel():
        raise IndexError(f"slot_mapping has {twice[:8].tolist()} more than once; a token would overwrite another")


def _check_used_pages(page_table: torch.Tensor, seqlens_kv: torch.Tensor, num_pages: int, page_size: int) -> None:
    for b, length in enumerate(seqlens_kv.tolist()):
        if not 0 <= length <= page_table.shape[1] * page_size:
            raise IndexError(f"seqlens_kv[{b}]={length}; page_table has {page_table.shape[1]} pages of {page_size}")
        used = page_table[b, : -(-length // page_size)].tolist()
        wrong = [page for page in used if not 0 <= page < num_pages]
        if wrong:
            raise IndexError(f"page_table[{b}] has {wrong[:8]}; the cache has pages 0 to {num_pages - 1}")


def _append_fake(*arguments: object) -> None:
    """Nothing is written to tensors without memory."""


_library = torch.library.Library("mla_plugin", "FRAGMENT")
_library.define(
    "append_to_cache(Tensor(a!) c_kv, Tensor(b!) k_rope, Tensor rows_c, Tensor rows_k, Tensor slots, "
    "Tensor? kv_scale, str kv_cache_format, bool power_of_2_scales) -> ()"
)
_library.define(
    "gather_cache(Tensor c_kv, Tensor k_rope, Tensor page_table, Tensor seqlens_kv, Tensor? kv_scale, "
    "str kv_cache_format, SymInt rows) -> Tensor"
)
for _name, _run, _fake, _error in (
    ("append_to_cache", append, _append_fake, NO_DERIVATIVE_OF_APPEND),
    ("gather_cache", gather, _empty, NO_DERIVATIVE_OF_GATHER),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mla_plugin::{_name}", _fake, lib=_library)
    refuse_derivatives(_library, _name, _error)
    loop_under_vmap(_library, _name)

append_operator = torch.ops.mla_plugin.append_to_cache.default
gather_operator = torch.ops.mla_plugin.gather_cache.default
