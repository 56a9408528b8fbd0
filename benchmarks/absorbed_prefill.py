"""Prefill with absorbed weights (head_dim_qk 576, head_dim_v 512, one KV head, bfloat16) on this GPU: forward.

    python -m benchmarks.absorbed_prefill

Keys are [c_kv | k_rope], values are c_kv. ``v in k`` is our attention on v = k[..., :512], which the Hopper kernel
takes, ``v elsewhere`` the same with v in other memory, which the plain kernels take. The others: ``mla_plugin.decode``
with all queries at once, by backends that take unpaged caches, and PyTorch's memory-efficient SDPA on expanded heads. A
result whose error against float64, in the first and the last 64 queries of the first sequence, in two heads, is more
than twice that of plain PyTorch in bfloat16 is not timed. Milliseconds are of the GPU, from CUDA graphs in short
bursts, in shuffled turns. TFLOP/s count 2 H 1088 operations for each visible key of each query. Packed lengths are
log-normal. Writes benchmarks/results/absorbed_prefill_<gpu>.json, prints a table last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import mla_plugin
from benchmarks.common import error, in_shuffled_turns, parser, write
from benchmarks.prefill_cases import Case as PrefillCase
from benchmarks.prefill_cases import lengths_of

RANK, WIDTH = 512, 576
SCALE = 192**-0.5  # DeepSeek-V3's: of the heads before absorption
DECODE = ("triton", "fa3")
ROWS = 64


class Case(NamedTuple):
    """``batch`` packed sequences of ``seqlen`` tokens in the mean, or one sequence."""

    heads: int
    seqlen: int
    causal: bool = True
    batch: int = 1

    @property
    def lengths(self) -> list[int]:
        """Of the sequences."""
        if self.batch == 1:
            return [self.seqlen]
        return lengths_of(PrefillCase((WIDTH, RANK), self.heads, 1, self.batch, self.seqlen, packed=True))


CASES = (
    *(Case(heads, seqlen) for heads in (16, 128) for seqlen in (512, 2048, 4096)),
    *(Case(16, 16384), Case(128, 4096, causal=False)),
    *(Case(heads, 4096, batch=8) for heads in (16, 128)),
)

Call = Callable[[], torch.Tensor]


class Problem:
    """The tensors of a case, packed: q [T, H, 576], k [T, 1, 576]."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        self.case = case
        tokens = sum(case.lengths)
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
        self.q = torch.randn(tokens, case.heads, WIDTH, **options) / 2
        self.k = torch.randn(tokens, 1, WIDTH, **options)

    def _plain(self, rows: slice, head: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows of the first sequence."""
        keys = self.k[: self.case.lengths[0], 0].to(dtype)
        scores = self.q[rows, head].to(dtype) @ keys.T * SCALE
        if self.case.causal:
            position = torch.arange(rows.start, rows.stop, device="cuda")[:, None]
            scores = scores.masked_fill(torch.arange(keys.shape[0], device="cuda") > position, -torch.inf)
        return scores.softmax(-1) @ keys[:, :RANK]

    def is_right(self, out: torch.Tensor) -> bool:
        """``out``: [T, H, 512]."""
        length = self.case.lengths[0]
        assert length >= ROWS
        for rows in (slice(0, ROWS), slice(length - ROWS, length)):
            for head in (0, self.case.heads - 1):
                exact = self._plain(rows, head, torch.float64)
                limit = 2 * error(self._plain(rows, head, torch.bfloat16), exact)
                if not error(out[rows, head], exact) <= limit:
                    return False
        return True

    def _ours(self, v: torch.Tensor) -> torch.Tensor:
        mask = "causal" if self.case.causal else "no_mask"
        options: dict[str, Any] = {"softmax_scale": SCALE, "backend": "triton", "attn_mask_type": mask}
        if self.case.batch == 1:
            return mla_plugin.attention(self.q[None], self.k[None], v[None], **options)[0]
        longest = max(self.case.lengths)
        lengths = {"max_seqlen_q": longest, "max_seqlen_kv": longest}
        return mla_plugin.attention(
            self.q, self.k, v, qkv_format="thd", cu_seqlens_q=self.sums, cu_seqlens_kv=self.sums, **lengths, **options
        )

    @functools.cached_property
    def sums(self) -> torch.Tensor:
        """Where the sequences begin."""
        return torch.tensor([0, *self.case.lengths], device="cuda").cumsum(0).int()

    def _decode(self, backend: str) -> torch.Tensor:
        q = self.q[None]
        return mla_plugin.decode(
            q[..., :RANK],
            q[..., RANK:],
            self.k[:, 0][None],
            softmax_scale=SCALE,
            causal=self.case.causal,
            backend=backend,
        )[0]

    def _sdpa(self) -> torch.Tensor:
        q, k = (x[None].transpose(1, 2) for x in (self.q, self.k.expand(-1, self.case.heads, -1)))
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, k[..., :RANK], is_causal=self.case.causal, scale=SCALE
            )
        return out[0].transpose(0, 1)

    def calls(self, missing: dict[str, str]) -> dict[str, Call]:
        """The calls that are right; why the others are not timed is noted in ``missing``."""
        v = self.k[..., :RANK]
        calls: dict[str, Call] = {
            "v in k": functools.partial(self._ours, v),
            "v elsewhere": functools.partial(self._ours, v.contiguous()),
        }
        if self.case.batch == 1:
            calls |= {f"decode by {name}": functools.partial(self._decode, name) for name in DECODE}
            calls["memory-efficient"] = self._sdpa
        found = {}
        for name, call in calls.items():
            try:
                out = call()
            except Exception as reason:  # of a library, of any type
                missing[name] = str(reason)[:200]
                continue
            if self.is_right(out):
                found[name] = call
            else:
                missing[name] = "its error is more than twice plain PyTorch's"
        return found


def operations(case: Case) -> float:
    """Of a forward."""
    keys = sum(length * (length + 1) / 2 if case.causal else length**2 for length in case.lengths)
    return 2 * case.heads * keys * (WIDTH + RANK)


def main() -> None:
    """Measure every case, write, print."""
    options = parser(__doc__).parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: nothing to time")
    rows = []
    with torch.no_grad():
        for case in CASES:
            missing: dict[str, str] = {}
            times = in_shuffled_turns(Problem(case).calls(missing), options.rounds)
            speeds = {name: operations(case) / ms / 1e9 for name, ms in times.items()}
            rows.append({**case._asdict(), "ms": times, "tflop_per_s": speeds, "missing": missing})
            shown = "  ".join(f"{name} {speed:.0f}" for name, speed in speeds.items())
            print(f"H {case.heads} S {case.seqlen} B {case.batch} {'causal' * case.causal}  {shown}", flush=True)
            torch.cuda.empty_cache()
    print(write("absorbed_prefill", {"rows": rows}, options.commit))


if __name__ == "__main__":
    main()
