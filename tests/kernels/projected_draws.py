"""Calls of absorbed decode with W_UK and W_UV drawn at random, in float64 and by plain PyTorch."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.kernels.decode.projected import launch as projected

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Call:
    """Arguments of ``decode_projected``; what the cache holds outside of a sequence's range of keys is NaN."""

    query: torch.Tensor
    c_kv: torch.Tensor
    k_rope: torch.Tensor
    weight: torch.Tensor
    dim_nope: int
    dim_v: int
    softmax_scale: float
    ranges: torch.Tensor | None

    @property
    def seqlens_kv(self) -> torch.Tensor | None:
        return None if self.ranges is None else self.ranges[0, 0, 0]

    @property
    def leftpad_kv(self) -> torch.Tensor | None:
        return None if self.ranges is None or self.ranges.shape[2] < 2 else self.ranges[0, 0, 1]

    @property
    def shape(self) -> str:
        query, c_kv = list(self.query.shape), list(self.c_kv.shape)
        return f"query {query}, c_kv {c_kv}, {self.dim_nope} + {self.dim_v}, lengths {self.seqlens_kv}"

    def tensors(self) -> DecodeTensors:
        batch, heads, seqlen_q, _ = self.query.shape
        absorbed = self.query.new_empty(batch, seqlen_q, heads, self.c_kv.shape[3])
        rope = self.query[..., self.dim_nope :].transpose(1, 2)
        cache = self.c_kv[:, 0], self.k_rope[:, 0]
        lengths = self.seqlens_kv, self.leftpad_kv
        return DecodeTensors(absorbed, rope, *cache, 1.0, seqlen_q > 1, False, None, *lengths)

    def find_step(self) -> projected.Step | None:
        return projected.step_of(self.tensors(), self.query, self.weight, self.dim_nope, self.dim_v, self.ranges)

    def step(self) -> projected.Step:
        found = self.find_step()
        assert found is not None
        return found

    def run(self, step: projected.Step) -> torch.Tensor:
        given = self.query, self.c_kv, self.k_rope, self.weight, self.dim_nope
        return projected.decode(step, *given, self.ranges, self.softmax_scale)

    def plainly(self, dtype: torch.dtype) -> torch.Tensor:
        """By plain PyTorch, row by row."""
        heads, seqlen_q, seqlen_kv = self.query.shape[1], self.query.shape[2], self.c_kv.shape[2]
        w = self.weight.to(dtype).view(heads, self.dim_nope + self.dim_v, -1)
        w_uk, w_uv = w[:, : self.dim_nope], w[:, self.dim_nope :]
        rows = []
        for b, q in enumerate(self.query.to(dtype)):
            end = seqlen_kv if self.seqlens_kv is None else int(self.seqlens_kv[b])
            start = 0 if self.leftpad_kv is None else int(self.leftpad_kv[b])
            keys, rope = (x[b, 0].to(dtype) for x in (self.c_kv, self.k_rope))
            out = q.new_zeros(heads, seqlen_q, self.dim_v)
            for i in range(seqlen_q):
                last = end - seqlen_q + i + 1
                if last <= start:
                    continue
                absorbed = torch.einsum("hd,hdr->hr", q[:, i, : self.dim_nope], w_uk)
                scores = absorbed @ keys[start:last].T + q[:, i, self.dim_nope :] @ rope[start:last].T
                latent = (scores * self.softmax_scale).softmax(-1) @ keys[start:last]
                out[:, i] = torch.einsum("hr,hdr->hd", latent, w_uv)
            rows.append(out.transpose(0, 1))
        return torch.stack(rows)

    def assert_right(self, found: torch.Tensor) -> None:
        """Within twice plain PyTorch's error in the same dtype, and 0 where no key is seen."""
        exact, plain = self.plainly(torch.float64), self.plainly(self.query.dtype)
        assert found.shape == exact.shape, self.shape
        assert found.dtype == self.query.dtype
        assert found.is_contiguous()
        size = exact.norm().clamp_min(1e-30)
        error, limit = ((x.double() - exact).norm() / size for x in (found, plain))
        # in one row PyTorch's rounding may happen to be small
        eps = torch.finfo(self.query.dtype).eps
        assert error <= 2 * limit + eps / 2, f"{error:.1e} > 2 * {limit:.1e}: {self.shape}"
        assert (found[exact == 0] == 0).all()


def draw(seed: int, dtype: torch.dtype, *, small: bool) -> Call:
    """Every factor by chance; ``small`` for the interpreter."""
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(DEVICE, dtype)

    seqlen_q = chance.choice((1, 1, 1, 2, 3, 4))
    batch = chance.randint(1, min(5, projected.ROWS // seqlen_q))
    heads = chance.choice((1, 2, 3) if small else (1, 7, 16, 40, 64, 128))
    rank = chance.choice((16, 64, 96) if small else (64, 256, 320, 512))
    rope = chance.choice((16, 32, 64))
    dim_nope, dim_v = chance.choice(
        ((32, 32), (24, 40), (64, 16), (48, 24)) if small else ((128, 128), (64, 64), (192, 256))
    )
    seqlen_kv = chance.choice((1, 5, 64, 130, 333) if small else (1, 63, 300, 1024, 2500))
    row = randn(batch, heads, seqlen_q, dim_nope + rope)
    if chance.random() < 0.5:  # as a transposed projection of the tokens
        row = randn(batch, seqlen_q, heads, dim_nope + rope).transpose(1, 2)
    tokens = randn(batch, 1, seqlen_kv + chance.choice((0, 3)), rank + rope)[:, :, :seqlen_kv]
    ranges = None
    kind = chance.choice(("none", "lengths", "padding"))
    if kind != "none":
        ends = [chance.choice((0, 1, seqlen_kv, chance.randint(0, seqlen_kv))) for _ in range(batch)]
        starts = [chance.choice((0, chance.randint(0, end))) if kind == "padding" else 0 for end in ends]
        for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
            tokens[b, :, end:] = torch.nan
            tokens[b, :, :start] = torch.nan
        rows = torch.tensor([ends, starts] if kind == "padding" else [ends], dtype=torch.int32, device=DEVICE)
        room = batch + chance.choice((0, 3))
        ranges = rows.new_full((1, 1, len(rows), room), -7)[..., :batch].copy_(rows)
    c_kv, k_rope = tokens[..., :rank], tokens[..., rank:]  # one cache
    if chance.random() < 0.5:
        c_kv, k_rope = c_kv.contiguous(), k_rope.contiguous()
    weight = randn(heads * (dim_nope + dim_v), rank + chance.choice((0, 16)))[:, :rank] * rank**-0.5
    return Call(row, c_kv, k_rope, weight, dim_nope, dim_v, (dim_nope + rope) ** -0.5, ranges)
