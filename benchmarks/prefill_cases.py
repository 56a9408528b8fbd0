"""The attention calls that are measured backend by backend, from small to large, plain and packed."""

from __future__ import annotations

import math
import random
from typing import NamedTuple


class Case(NamedTuple):
    """One shape: ``mask`` is causal, full or a window of so many tokens to the left."""

    dims: tuple[int, int]
    heads: int
    kv_heads: int
    batch: int
    seqlen: int
    mask: str | int = "causal"
    packed: bool = False
    deterministic: bool = False

    @property
    def name(self) -> str:
        """In the table."""
        shape = f"{self.dims[0]}/{self.dims[1]} H {self.heads}/{self.kv_heads} B {self.batch} S {self.seqlen}"
        flags = (name for name in ("packed", "deterministic") if getattr(self, name))
        return " ".join((shape, str(self.mask), *flags))


MLA, EVEN, WIDE, SMALL = (192, 128), (128, 128), (256, 256), (64, 64)
CASES = (
    *(Case(MLA, 16, 16, 1, s) for s in (512, 1024, 2048, 4096, 8192, 16384)),
    *(Case(MLA, 128, 128, 1, s) for s in (1024, 4096, 8192)),
    *(Case(MLA, 16, 16, b, 1024) for b in (2, 16)),
    *(Case(MLA, h, h, 1, s, "full") for h, s in ((16, 1024), (16, 4096), (128, 4096), (16, 16384))),
    *(Case(MLA, 64, 4, 1, s) for s in (2048, 8192)),
    *(Case(MLA, 16, 16, 1, s, 4096) for s in (8192, 16384)),
    *(Case(MLA, h, h, 8, s, "causal", True) for h, s in ((16, 512), (16, 4096), (128, 512), (128, 4096))),
    Case(MLA, 16, 16, 8, 4096, "full", True),
    *(Case(EVEN, 16, 16, 1, s) for s in (1024, 4096, 16384)),
    *(Case(EVEN, h, 8, 1, s) for h, s in ((32, 2048), (32, 8192))),
    *(Case(EVEN, 16, 16, 1, s, "full") for s in (1024, 8192)),
    *(Case(EVEN, 16, 16, 8, s, "causal", True) for s in (512, 4096)),
    Case(EVEN, 16, 16, 1, 16384, 4096),
    *(Case(WIDE, 16, 16, 1, s) for s in (1024, 8192)),
    Case(WIDE, 16, 16, 1, 4096, "full"),
    Case(WIDE, 16, 16, 8, 4096, "causal", True),
    *(Case(SMALL, 16, 16, 1, s) for s in (1024, 8192)),
    Case(SMALL, 16, 16, 8, 4096, "causal", True),
    *(Case((96, 64), 40, 40, 1, s) for s in (1024, 8192)),
    *(Case(dims, 16, 16, 1, s, deterministic=True) for dims in (MLA, EVEN) for s in (1024, 8192)),
    *(Case(dims, 16, 16, 8, 4096, "causal", True, deterministic=True) for dims in (MLA, EVEN)),
    *(Case(MLA, h, h, b, s) for h, b, s in ((32, 1, 3000), (64, 4, 2048), (8, 1, 700), (40, 2, 6000), (16, 1, 32768))),
    *(Case(MLA, h, h, b, s, "full") for h, b, s in ((32, 2, 2000), (64, 1, 6000))),
    *(Case(MLA, h, h, b, s, "causal", True) for h, b, s in ((32, 16, 1000), (64, 4, 8000), (16, 3, 20000))),
    *(Case(MLA, 32, kv, 1, 3000) for kv in (1, 8)),
    *(Case(MLA, 32, 32, 1, s, w) for s, w in ((4096, 1024), (12000, 512))),
    *(Case(EVEN, h, kv, 2, s) for h, kv, s in ((32, 32, 3000), (64, 8, 5000), (16, 2, 900))),
    Case(EVEN, 32, 32, 6, 2500, "causal", True),
    *(Case((160, 128), 16, 16, 2, s) for s in (1500, 6000)),
    Case((96, 96), 32, 32, 2, 3000),
    Case((192, 192), 16, 16, 1, 3000),
    Case((256, 256), 8, 2, 2, 3000),
    Case(MLA, 32, 32, 1, 3000, deterministic=True),
)
BETWEEN = (
    *(Case(MLA, h, h, b, s) for h, b, s in ((24, 1, 5000), (128, 2, 1500), (16, 8, 400), (64, 1, 12000))),
    *(Case(MLA, h, h, b, s, "full") for h, b, s in ((48, 1, 3000), (16, 4, 900), (24, 1, 10000))),
    *(Case(MLA, h, h, b, s, "causal", True) for h, b, s in ((24, 32, 700), (64, 16, 2500), (128, 3, 6000))),
    Case(MLA, 32, 32, 12, 1500, "full", True),
    *(Case(MLA, h, kv, 1, s) for h, kv, s in ((48, 4, 5000), (32, 2, 1200))),
    *(Case(MLA, h, h, 2, s, w) for h, s, w in ((16, 6000, 2048), (64, 3000, 700))),
    *(Case(EVEN, h, kv, b, s) for h, kv, b, s in ((40, 40, 1, 5000), (48, 8, 1, 3500), (32, 4, 8, 700))),
    *(Case(EVEN, 24, 24, 1, s, "full") for s in (2500, 12000)),
    Case(EVEN, 24, 24, 10, 1500, "causal", True),
    Case((160, 128), 24, 24, 1, 3500),
    Case((80, 80), 24, 24, 2, 2500),
    Case((192, 192), 24, 24, 2, 1500),
    Case(WIDE, 24, 24, 1, 3000),
    Case(SMALL, 24, 24, 4, 2500),
    *(Case(dims, 24, 24, 1, 5000, deterministic=True) for dims in (MLA, EVEN)),
)
"""Shapes between those of ``CASES``; the resolver's table for the H200 holds them too."""
DRAWN = (
    Case(MLA, 40, 5, 2, 16303),
    Case(EVEN, 128, 32, 1, 7029, deterministic=True),
    Case(MLA, 16, 16, 2, 9264, "full"),
    Case(MLA, 40, 40, 4, 8822, deterministic=True),
    Case(SMALL, 32, 32, 8, 2048, "causal", True),
    Case(MLA, 96, 48, 4, 439, "full"),
    Case(WIDE, 96, 48, 1, 14099, "full"),
    Case(MLA, 24, 24, 6, 9317),
    Case(MLA, 96, 96, 1, 10635, "full"),
)
"""Shapes drawn at random, which no table held when they were measured on an H100."""
QUICK = (Case(MLA, 16, 16, 1, 4096), Case(MLA, 16, 16, 1, 4096, "full"), Case(MLA, 16, 16, 8, 4096, "causal", True))


def lengths_of(case: Case) -> list[int]:
    """Log-normal lengths of a packed batch, as many tokens in all as B times S."""
    drawn = random.Random(0)
    weights = [math.exp(0.6 * drawn.gauss(0, 1)) for _ in range(case.batch)]
    lengths = [max(1, int(case.batch * case.seqlen * weight / sum(weights))) for weight in weights]
    return [*lengths[:-1], case.batch * case.seqlen - sum(lengths[:-1])]
