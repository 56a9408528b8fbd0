"""What a decode call must satisfy; every error says what was given, what is accepted, what to do."""

from __future__ import annotations

import torch

from mla_plugin.arguments.attention import DTYPES
from mla_plugin.hooks.decode import DecodeTensors
from mla_plugin.hooks.types import HOSTS


def check_queries(q_nope_abs: torch.Tensor, q_rope: torch.Tensor) -> None:
    """They are tensors of four dimensions."""
    for name, x, layout in (("q_nope_abs", q_nope_abs, "[B, S_q, H, R]"), ("q_rope", q_rope, "[B, S_q, H, Dr]")):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is {type(x).__name__}; a torch.Tensor {layout} is needed")
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {list(x.shape)}, {x.dim()} dimensions; it must be {layout}")


def split_cache(
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(c_kv, k_rope) of a pair, or as views of one tensor [..., R + Dr]."""
    if isinstance(kv_cache, torch.Tensor):
        if kv_cache.dim() != 3 or kv_cache.shape[-1] < rank:
            raise ValueError(
                f"kv_cache has shape {list(kv_cache.shape)}; one tensor is [pages, page_size, R + Dr] or [B, S_kv, "
                f"R + Dr], with R={rank} of q_nope_abs. Drop a head dimension of 1 by squeeze; a pair (c_kv, k_rope) "
                "is accepted too"
            )
        return kv_cache[..., :rank], kv_cache[..., rank:]
    try:
        c_kv, k_rope = kv_cache
    except (TypeError, ValueError):
        raise TypeError(f"kv_cache is {type(kv_cache).__name__}; a tensor or a pair (c_kv, k_rope) is needed") from None
    if not (isinstance(c_kv, torch.Tensor) and isinstance(k_rope, torch.Tensor)):
        raise TypeError(
            f"kv_cache is a pair of {type(c_kv).__name__} and {type(k_rope).__name__}; two tensors are needed"
        )
    return c_kv, k_rope


def check_scalars(softmax_scale: float, host: str) -> None:
    """Plain values are in range."""
    if not 0.0 < softmax_scale < float("inf"):
        raise ValueError(
            f"softmax_scale={softmax_scale}; a positive number is needed: (qk_nope_head_dim + qk_rope_head_dim) ** -0.5"
        )
    if host not in HOSTS:
        raise ValueError(f"host={host!r}; accepted: {', '.join(HOSTS)}")


def check_tensors(tensors: DecodeTensors) -> None:
    """Ranks, shapes, dtypes, strides and devices fit each other."""
    q_nope_abs, q_rope, c_kv, k_rope = tensors[:4]
    _check_ranks(tensors)
    if q_rope.shape[:-1] != q_nope_abs.shape[:-1]:
        raise ValueError(
            f"q_nope_abs {list(q_nope_abs.shape)} and q_rope {list(q_rope.shape)} differ in [B, S_q, H]; both come "
            "from the same queries"
        )
    if k_rope.shape[:-1] != c_kv.shape[:-1]:
        raise ValueError(
            f"c_kv {list(c_kv.shape)} and k_rope {list(k_rope.shape)} differ before the last dimension; both hold one "
            "row a token"
        )
    batch, _, heads, rank = q_nope_abs.shape
    if rank != c_kv.shape[-1] or not rank or not heads:
        raise ValueError(
            f"q_nope_abs has H={heads}, R={rank} and c_kv has R={c_kv.shape[-1]}; one head at least, and both R must "
            "be kv_lora_rank: multiply q_nope by W_UK first"
        )
    if q_rope.shape[-1] != k_rope.shape[-1]:
        raise ValueError(
            f"q_rope has Dr={q_rope.shape[-1]}, k_rope has Dr={k_rope.shape[-1]}; both must be qk_rope_head_dim (0 for "
            "a model without rope)"
        )
    named = {"q_nope_abs": q_nope_abs, "q_rope": q_rope, "c_kv": c_kv, "k_rope": k_rope}
    if q_nope_abs.dtype not in DTYPES or any(x.dtype != q_nope_abs.dtype for x in named.values()):
        given = ", ".join(f"{name} {x.dtype}" for name, x in named.items())
        raise TypeError(f"{given}; one dtype of {', '.join(map(str, DTYPES))} is needed for all four: cast them")
    for name in ("c_kv", "k_rope"):
        _check_last_stride(name, named[name])
    if tensors.page_table is None:
        if c_kv.shape[0] != batch:
            raise ValueError(
                f"c_kv {list(c_kv.shape)} has {c_kv.shape[0]} sequences, q_nope_abs {list(q_nope_abs.shape)} has "
                f"{batch}; a cache without page_table is [B, S_kv, R]; a paged one needs page_table and seqlens_kv"
            )
    else:
        _check_pages(tensors)
    _check_indices("seqlens_kv", tensors.seqlens_kv, batch)
    _check_indices("leftpad_kv", tensors.leftpad_kv, batch)
    named |= {
        name: x for name in ("page_table", "seqlens_kv", "leftpad_kv") if (x := getattr(tensors, name)) is not None
    }
    if any(x.device != q_nope_abs.device for x in named.values()):
        given = ", ".join(f"{name} on {x.device}" for name, x in named.items())
        raise ValueError(f"{given}; all must be on one device: move them with .to({str(q_nope_abs.device)!r})")


def _check_ranks(tensors: DecodeTensors) -> None:
    for name, rank, layout in (
        ("c_kv", 3, "[B, S_kv, R], or [pages, page_size, R] with page_table"),
        ("k_rope", 3, "[B, S_kv, Dr], or [pages, page_size, Dr] with page_table"),
        ("page_table", 2, "[B, n]"),
        ("seqlens_kv", 1, "[B]"),
        ("leftpad_kv", 1, "[B]"),
    ):
        x = getattr(tensors, name)
        if x is None:
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is {type(x).__name__}; a torch.Tensor {layout} is needed")
        if x.dim() != rank:
            raise ValueError(f"{name} has shape {list(x.shape)}, {x.dim()} dimensions; it must be {layout}")


def _check_pages(tensors: DecodeTensors) -> None:
    if tensors.seqlens_kv is None:
        raise ValueError("page_table without seqlens_kv; a paged cache needs the lengths: int32 [B]")
    if tensors.c_kv.shape[1] == 0:
        raise ValueError(
            f"c_kv has shape {list(tensors.c_kv.shape)}, page_size 0; a paged cache is [pages, page_size, R]"
        )
    _check_indices("page_table", tensors.page_table, tensors.q_nope_abs.shape[0])


def _check_indices(name: str, x: torch.Tensor | None, batch: int) -> None:
    if x is None:
        return
    if x.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {x.dtype}; it must be int32: pass {name}.to(torch.int32)")
    if x.shape[0] != batch:
        raise ValueError(f"{name} has shape {list(x.shape)}; its first dimension must be B={batch}")
    _check_last_stride(name, x)


def _check_last_stride(name: str, x: torch.Tensor) -> None:
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(
            f"the last dimension of {name} has stride {x.stride(-1)}; it must be contiguous (other strides are free): "
            f"pass {name}.contiguous()"
        )


def check_values(tensors: DecodeTensors) -> None:
    """Lengths fit the cache and pages exist. It reads values: on the CPU, and on a device that may be waited for."""
    c_kv, seqlens_kv, page_table = tensors.c_kv, tensors.seqlens_kv, tensors.page_table
    if seqlens_kv is None:
        return
    capacity = c_kv.shape[1] * (1 if page_table is None else page_table.shape[1])
    lengths = seqlens_kv.tolist()
    if any(not 0 <= length <= capacity for length in lengths):
        raise ValueError(f"seqlens_kv={lengths}; the cache has room for 0 to {capacity} keys a sequence")
    if page_table is None:
        return
    pages, page_size = c_kv.shape[:2]
    for b, length in enumerate(lengths):
        used = page_table[b, : -(-length // page_size)]
        if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < pages:
            raise ValueError(f"page_table[{b}] begins with {used.tolist()}; the cache has the pages 0 to {pages - 1}")
