"""Few KV heads over short sequences: the query heads that share a KV head are divided among dK/dV programs.

A dK/dV program has one tile of keys and sums over all query heads that share it. With 64 query heads over 4, or 32 over
one, a short sequence gives fewer such programs than a GPU has SMs, or one of them takes as long as all the others
together: on an H200 the backward of (1, 32/1, 3000), 192/128, reached 0.22 of FlashAttention 4's speed.

So each KV head is repeated, every copy gets an equal share of the query heads, and the gradients of the copies, in
float32, are summed in a fixed order. The kernels see an ordinary call with more KV heads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from mla_plugin.kernels.prefill.packing import Kind, multiprocessors

KEYS = 128
"""Keys of a program, approximately: a tile of 64 keys gives twice as many programs."""
QUERIES = 64
"""Queries per step of a program's loop, which takes about 2 us on an H200 at 192/128."""
LEAST_STEPS = 64
"""Least number of steps saved in the longest program: copies, sums and their launches take 40 us of host time."""
LEAST_IMBALANCE = 1.5
"""Below this no copies are made: at 1.3, (1, 32/8, 3000), our backward is the fastest of all without."""
ENOUGH = 0.8
"""Share of the estimated imbalance that the copies should remove."""


def _queries(kind: Kind, len_q: int, len_kv: int) -> Iterator[int]:
    """For each tile of keys of a sequence of these lengths, the number of queries that see it."""
    left, right, _ = kind.band
    offset = kind.band.offset(len_q, len_kv)
    for start in range(0, len_kv, KEYS):
        first = max(start - offset - right, 0) if right >= 0 else 0
        last = min(len_q, start + KEYS - offset + left) if left >= 0 else len_q
        yield max(last - first, 0)


@functools.lru_cache(maxsize=4096)
def copies(kind: Kind) -> int:
    """Number of copies of each KV head that balances the dK/dV programs; 1: no copies."""
    group = kind.num_heads // kind.num_kv_heads
    if group == 1:
        return 1
    longest = max(_queries(kind, kind.seqlen_q, kind.seqlen_kv), default=0)
    mean_q, mean_kv = kind.seqlen_q, kind.seqlen_kv
    if kind.layout.is_packed:  # the host knows the longest length and the sum of all
        mean_q, mean_kv = (max(shape[0] // kind.num_sequences, 1) for shape in (kind.q_shape, kind.k_shape))
    total = sum(_queries(kind, mean_q, mean_kv)) * kind.num_kv_heads * kind.num_sequences
    imbalance = longest * multiprocessors(kind.device) / total if total else 0.0
    if imbalance < LEAST_IMBALANCE:
        return 1
    divisors = (n for n in range(2, group + 1) if group % n == 0)
    found = next((n for n in divisors if n >= ENOUGH * imbalance), group)
    saved = group * longest / QUERIES * (1 - 1 / found)
    return found if saved >= LEAST_STEPS else 1


def repeated(x: torch.Tensor, axis: int, times: int) -> torch.Tensor:
    """x with each head repeated ``times`` times, contiguous; ``axis``: of the heads."""
    shape = list(x.shape)
    shape.insert(axis + 1, times)
    return x.unsqueeze(axis + 1).expand(shape).flatten(axis, axis + 1).contiguous()


def added(x: torch.Tensor, axis: int, times: int, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of ``repeated``, contiguous, from the gradient of its result in float32."""
    summed: torch.Tensor = x.view(*x.shape[:axis], -1, times, *x.shape[axis + 1 :]).sum(axis + 1)
    return summed.to(dtype)
