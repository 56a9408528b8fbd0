"""Inputs of the decode kernels, what float64 says about them, and what plain PyTorch makes of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter multiplies bfloat16 bit patterns as integers
DTYPES = (torch.float16, torch.float32, torch.bfloat16) if DEVICE == "cuda" else (torch.float16, torch.float32)


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call; the cache as the kernels get it, and as one row a token: [B, S_kv, R + Dr]."""

    q_nope_abs: torch.Tensor
    q_rope: torch.Tensor
    c_kv: torch.Tensor
    k_rope: torch.Tensor
    tokens: torch.Tensor
    softmax_scale: float
    page_table: torch.Tensor | None = None
    seqlens_kv: torch.Tensor | None = None
    leftpad_kv: torch.Tensor | None = None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.q_nope_abs, self.q_rope, self.c_kv, self.k_rope

    def options(self) -> dict[str, object]:
        return {
            "softmax_scale": self.softmax_scale,
            "page_table": self.page_table,
            "seqlens_kv": self.seqlens_kv,
            "leftpad_kv": self.leftpad_kv,
        }

    def lengths(self) -> list[int]:
        if self.seqlens_kv is None:
            return [self.tokens.shape[1]] * self.tokens.shape[0]
        return self.seqlens_kv.tolist()

    def leftpads(self) -> list[int]:
        return [0] * self.tokens.shape[0] if self.leftpad_kv is None else self.leftpad_kv.tolist()


def as_engines_have_it(inputs: Inputs) -> Inputs:
    """The same call with q_nope_abs head-major, and q_rope as columns of the unabsorbed queries.

    So a product with W_UK for each head and a view of the projection leave them in vLLM and SGLang.
    """
    by_head = inputs.q_nope_abs.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    projected = inputs.q_rope.new_full((*inputs.q_rope.shape[:-1], 192), torch.nan)
    projected[..., 128:] = inputs.q_rope
    return replace(inputs, q_nope_abs=by_head, q_rope=projected[..., 128:])


Shape = tuple[int, int, int, int, int, int]  # B, S_q, H, R, Dr, S_kv


def contiguous(shape: Shape, dtype: torch.dtype, lengths: list[int] | None = None, seed: int = 0) -> Inputs:
    """One tensor [B, S_kv, R + Dr]; c_kv and k_rope are views of it. Rows from a length on are NaN."""
    batch, seqlen_q, heads, rank, rope, seqlen_kv = shape
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(DEVICE, dtype)

    tokens = draw(batch, seqlen_kv, rank + rope)
    cache = tokens.clone()
    seqlens_kv = None
    if lengths is not None:
        seqlens_kv = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        for b, length in enumerate(lengths):
            cache[b, length:] = torch.nan
    return Inputs(
        q_nope_abs=draw(batch, seqlen_q, heads, rank),
        q_rope=draw(batch, seqlen_q, heads, rope),
        c_kv=cache[..., :rank],
        k_rope=cache[..., rank:],
        tokens=tokens,
        softmax_scale=(rank + rope) ** -0.5,
        seqlens_kv=seqlens_kv,
    )


def paged(shape: Shape, page_size: int, dtype: torch.dtype, lengths: list[int], seed: int = 0) -> Inputs:
    """The same tokens in shuffled pages; all other pages and rows are NaN, all other entries of the table garbage."""
    inputs = contiguous(shape, dtype, seed=seed)
    batch, seqlen_kv, width = inputs.tokens.shape
    rank = inputs.c_kv.shape[-1]
    pages_each = -(-seqlen_kv // page_size)
    order = torch.randperm(batch * pages_each + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    cache = torch.full((len(order), page_size, width), torch.nan, dtype=dtype, device=DEVICE)
    page_table = torch.full((batch, pages_each + 2), 2**30, dtype=torch.int32, device=DEVICE)
    for b, length in enumerate(lengths):
        pages = torch.tensor([order.pop() for _ in range(-(-length // page_size))], dtype=torch.int64, device=DEVICE)
        keys = torch.arange(length, device=DEVICE)
        cache[pages[keys // page_size], keys % page_size] = inputs.tokens[b, :length]
        page_table[b, : len(pages)] = pages
    return replace(
        inputs,
        c_kv=cache[..., :rank],
        k_rope=cache[..., rank:],
        page_table=page_table,
        seqlens_kv=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
    )


def with_leftpad(inputs: Inputs, leftpads: list[int]) -> Inputs:
    """The same call without the first keys of each sequence, whose rows become NaN."""
    for b, count in enumerate(leftpads):
        for n in range(min(count, inputs.lengths()[b])):
            block, row = b, n
            if inputs.page_table is not None:
                page_size = inputs.c_kv.shape[1]
                block, row = int(inputs.page_table[b, n // page_size]), n % page_size
            inputs.c_kv[block, row] = torch.nan
            inputs.k_rope[block, row] = torch.nan
    return replace(inputs, leftpad_kv=torch.tensor(leftpads, dtype=torch.int32, device=DEVICE))


def attend(inputs: Inputs, is_causal: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse by plain PyTorch in ``dtype``, one sequence after the other."""
    q = torch.cat([inputs.q_nope_abs, inputs.q_rope], -1).to(dtype)
    batch, seqlen_q, heads, _ = q.shape
    rank = inputs.c_kv.shape[-1]
    out = torch.zeros(batch, seqlen_q, heads, rank, dtype=dtype, device=q.device)
    lse = torch.full((batch, heads, seqlen_q), -torch.inf, dtype=dtype, device=q.device)
    for b, (length, leftpad) in enumerate(zip(inputs.lengths(), inputs.leftpads(), strict=True)):
        keys = inputs.tokens[b, leftpad:length].to(dtype)
        for i in range(seqlen_q):
            seen = (length - seqlen_q + i + 1 if is_causal else length) - leftpad
            if seen > 0:
                scores = (q[b, i] @ keys[:seen].T) * inputs.softmax_scale
                out[b, i] = scores.softmax(-1) @ keys[:seen, :rank]
                lse[b, :, i] = scores.logsumexp(-1)
    return out, lse


def _error(x: torch.Tensor, exact: torch.Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm().clamp_min(1e-300)).item()


def assert_out_as_good_as_pytorch(out: torch.Tensor, inputs: Inputs, is_causal: bool) -> torch.Tensor:
    """out has at most twice the error of plain PyTorch in the same dtype; rows without keys are exactly 0.

    Returns:
        the exact log-sum-exp.
    """
    exact, exact_lse = attend(inputs, is_causal, torch.float64)
    plain, _ = attend(inputs, is_causal, out.dtype)
    rounding = 2 * torch.finfo(torch.float32).eps  # of the softmax weights and of the sums, as in the conformance suite
    assert out.shape == exact.shape
    assert out.dtype == inputs.q_nope_abs.dtype
    empty = (exact_lse == -torch.inf).transpose(1, 2)
    assert torch.equal(out[empty], torch.zeros_like(out[empty]))
    assert _error(out, exact) <= 2 * _error(plain, exact) + rounding
    return exact_lse


def assert_as_good_as_pytorch(out: torch.Tensor, lse: torch.Tensor, inputs: Inputs, is_causal: bool) -> None:
    """At most twice the error of plain PyTorch in the same dtype (lse: in float32); empty rows exactly 0 and -inf."""
    exact_lse = assert_out_as_good_as_pytorch(out, inputs, is_causal)
    _, plain_lse = attend(inputs, is_causal, torch.float32)
    rounding = 2 * torch.finfo(torch.float32).eps
    assert lse.shape == exact_lse.shape
    assert lse.dtype == torch.float32
    empty = exact_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    seen = ~empty
    found, plain_found, wanted = (x[seen].double() for x in (lse, plain_lse, exact_lse))
    if out.dtype != torch.float32:
        rounding *= 4  # the matrix units cut sums off where float32 rounds
    floor = rounding * (wanted.square().sum() + wanted.numel()).sqrt()  # lse may be near 0, its scores are not
    assert (found - wanted).norm() <= 2 * (plain_found - wanted).norm() + floor


def mixed(x: torch.Tensor) -> torch.Tensor:
    """Columns in the order in which the Hopper kernel stores them, by the docstring of ``in_order``."""
    places = torch.empty(x.shape[-1], dtype=torch.long)
    for block, i, j, k in itertools.product(range(x.shape[-1] // 32), range(4), range(4), range(2)):
        places[32 * block + 8 * j + 2 * i + k] = 32 * block + 8 * i + 2 * j + k
    return x[..., places.to(x.device)]
