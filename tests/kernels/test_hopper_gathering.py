"""The gathering warpgroup of the Hopper decode kernel in the interpreter of ``gluon``, against float64."""

from __future__ import annotations

import random

import pytest
import torch

from mla_plugin.arguments.cache_format import FP8, FP8_DS_MLA, PLAIN
from mla_plugin.kernels.decode import launch as decode_launch
from tests.kernels.gathered_cases import call_of, check
from tests.kernels.gluon.hopper import hopper as hopper

pytestmark = pytest.mark.usefixtures("hopper")
BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
KINDS = [(FP8, BFLOAT16), (FP8, FLOAT16), (FP8_DS_MLA, BFLOAT16), (PLAIN, BFLOAT16), (PLAIN, FLOAT16)]
PAGES = (1, 2, 16, 32, 48)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 129, 192, 193, 500])
@pytest.mark.parametrize(("kv_format", "dtype"), KINDS)
def test_lengths_around_a_tile(kv_format: str, dtype: torch.dtype, length: int) -> None:
    page_size = PAGES[length % len(PAGES)]
    check(*call_of((1, 1, 20, 500), page_size, kv_format, dtype, [length]))


@pytest.mark.parametrize("parts", [1, 2, 13])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kv_format", [FP8, FP8_DS_MLA, PLAIN])
def test_factors_in_combination(kv_format: str, seed: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty sequences among others, more or fewer of them than parts, rows of several queries in one tile."""
    monkeypatch.setattr(decode_launch, "choose_parts", lambda *_: parts)
    draw = random.Random(f"{kv_format} {100 * parts + seed}")
    batch, seqlen_q, heads = draw.choice([1, 2, 3, 7]), draw.choice([1, 2, 3, 4]), draw.choice([24, 48, 128])
    lengths = [draw.choice([0, 1, 63, 64, 65, draw.randrange(300)]) for _ in range(batch)]
    page_size = draw.choice(PAGES if kv_format == PLAIN else [None, 64, *PAGES])
    dtype = draw.choice([dtype for name, dtype in KINDS if name == kv_format])
    check(*call_of((batch, seqlen_q, heads, 300), page_size, kv_format, dtype, lengths, seed, draw.random() < 0.7))
