"""What ``mla_decode_attention`` accepts; every error says what was given, what is accepted and what to do."""

from __future__ import annotations

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _shape(x: torch.Tensor) -> list[int]:
    return list(x.shape)


def check_arguments(
    q_nope_abs: torch.Tensor,
    q_rope: torch.Tensor,
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    page_table: torch.Tensor | None,
    seqlens_kv: torch.Tensor | None,
    leftpad_kv: torch.Tensor | None,
) -> None:
    """Raise ValueError or TypeError unless the arguments fit each other and the kernels."""
    _check_ranks(q_nope_abs, q_rope, c_kv, k_rope)
    _check_shapes(q_nope_abs, q_rope, c_kv, k_rope)
    tensors = {"q_nope_abs": q_nope_abs, "q_rope": q_rope, "c_kv": c_kv, "k_rope": k_rope}
    if q_nope_abs.dtype not in DTYPES or any(x.dtype != q_nope_abs.dtype for x in tensors.values()):
        given = ", ".join(f"{name} {x.dtype}" for name, x in tensors.items())
        raise TypeError(f"{given}; one of bfloat16, float16, float32 is needed, the same for all four: cast them")
    for name, x in tensors.items():
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(
                f"the last dimension of {name} has stride {x.stride(-1)}; it must be contiguous (other strides are "
                f"free): pass {name}.contiguous()"
            )
    batch = q_nope_abs.shape[0]
    if page_table is None:
        if c_kv.shape[0] != batch:
            raise ValueError(
                f"c_kv {_shape(c_kv)} has {c_kv.shape[0]} sequences, q_nope_abs {_shape(q_nope_abs)} has {batch}; a "
                "cache without page_table is [B, S_kv, R]; give page_table and seqlens_kv for a paged cache"
            )
    else:
        if c_kv.shape[1] == 0:
            raise ValueError(f"c_kv has shape {_shape(c_kv)}, page_size 0; a paged cache is [pages, page_size, R]")
        if seqlens_kv is None:
            raise ValueError("page_table without seqlens_kv; a paged cache needs the lengths: int32 [B]")
        _check_indices("page_table", page_table, (batch, page_table.shape[-1] if page_table.dim() else 0))
        tensors["page_table"] = page_table
    for name, counts in (("seqlens_kv", seqlens_kv), ("leftpad_kv", leftpad_kv)):
        if counts is not None:
            _check_indices(name, counts, (batch,))
            tensors[name] = counts
    if any(x.device != q_nope_abs.device for x in tensors.values()):
        given = ", ".join(f"{name} on {x.device}" for name, x in tensors.items())
        raise ValueError(f"{given}; all must be on one device: move them with .to({str(q_nope_abs.device)!r})")


def _check_ranks(q_nope_abs: torch.Tensor, q_rope: torch.Tensor, c_kv: torch.Tensor, k_rope: torch.Tensor) -> None:
    for name, x, rank, layout in (
        ("q_nope_abs", q_nope_abs, 4, "[B, S_q, H, R]"),
        ("q_rope", q_rope, 4, "[B, S_q, H, Dr]"),
        ("c_kv", c_kv, 3, "[B, S_kv, R], or [pages, page_size, R] with page_table"),
        ("k_rope", k_rope, 3, "[B, S_kv, Dr], or [pages, page_size, Dr] with page_table"),
    ):
        if x.dim() != rank:
            raise ValueError(f"{name} has shape {_shape(x)}, {x.dim()} dimensions; it must be {layout}")


def _check_shapes(q_nope_abs: torch.Tensor, q_rope: torch.Tensor, c_kv: torch.Tensor, k_rope: torch.Tensor) -> None:
    if q_rope.shape[:-1] != q_nope_abs.shape[:-1]:
        raise ValueError(
            f"q_nope_abs {_shape(q_nope_abs)} and q_rope {_shape(q_rope)} differ in [B, S_q, H]; both come from the "
            "same queries"
        )
    if k_rope.shape[:-1] != c_kv.shape[:-1]:
        raise ValueError(
            f"c_kv {_shape(c_kv)} and k_rope {_shape(k_rope)} differ before the last dimension; both hold one row a "
            "token"
        )
    if c_kv.shape[-1] != q_nope_abs.shape[-1] or c_kv.shape[-1] == 0:
        raise ValueError(
            f"q_nope_abs has R={q_nope_abs.shape[-1]}, c_kv has R={c_kv.shape[-1]}; both must be kv_lora_rank: "
            "multiply q_nope by W_UK first"
        )
    if k_rope.shape[-1] != q_rope.shape[-1]:
        raise ValueError(
            f"q_rope has Dr={q_rope.shape[-1]}, k_rope has Dr={k_rope.shape[-1]}; both must be qk_rope_head_dim (0 for "
            "a model without rope)"
        )


def _check_indices(name: str, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    layout = "[B, n]" if len(shape) == 2 else "[B]"
    if x.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {x.dtype}; it must be int32: pass {name}.to(torch.int32)")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {_shape(x)}; it must be {layout} with B={shape[0]}")
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(
            f"the last dimension of {name} has stride {x.stride(-1)}; it must be contiguous: {name}.contiguous()"
        )
