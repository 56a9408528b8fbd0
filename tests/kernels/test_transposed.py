"""The transposed decode kernel in the interpreter of ``gluon``, against float64."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest
import torch

from mla_plugin.arguments.cache_format import FP8, ROPE
from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.arguments.decode_layout import known_of
from mla_plugin.kernels.decode import launch as decode_launch
from mla_plugin.kernels.decode.transposed import launch as transposed
from tests.kernels.decode_cases import Inputs, assert_as_good_as_pytorch, assert_out_as_good_as_pytorch, attend
from tests.kernels.gathered_cases import call_of, with_queries
from tests.kernels.gluon.hopper import hopper as hopper

pytestmark = pytest.mark.usefixtures("hopper")
BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
ROWS = ((1, 1), (1, 3), (2, 1), (4, 4), (16, 1), (8, 2), (5, 3), (17, 1), (20, 1), (24, 1), (8, 4), (16, 2), (32, 1))
"""Heads and queries of a sequence."""
GATHERED = (1, 2, 16, 32, 48, 96)
"""Page sizes that TMA cannot load."""


def is_taken(tensors: DecodeTensors) -> bool:
    """Whether the transposed kernel computes a call."""
    return isinstance(decode_launch.make_launches(tensors).described, transposed.Descriptors)


@pytest.fixture(autouse=True)
def _nan_in_new_memory() -> Iterator[None]:
    """Results and the workspace start as NaN: what is not written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def decode(tensors: DecodeTensors) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = decode_launch.decode(tensors, known_of(tensors))
    assert lse is not None
    return out, lse


def _without_lse(tensors: DecodeTensors) -> torch.Tensor:
    """out of a call that does not want the log-sum-exp."""
    given = tensors._replace(return_lse=False)
    out, lse = decode_launch.decode(given, known_of(given))
    assert lse is None
    return out


def check(inputs: Inputs, tensors: DecodeTensors) -> None:
    """As good as PyTorch over the same numbers, by the transposed kernel."""
    assert is_taken(tensors)
    assert_as_good_as_pytorch(*decode(tensors), inputs, tensors.causal)
    # more than 16 rows of bfloat16 are then multiplied in e4m3
    assert_out_as_good_as_pytorch(_without_lse(tensors), inputs, tensors.causal)


@pytest.mark.parametrize("heads", [16, 20])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 128, 129, 192, 193, 500])
def test_lengths_around_a_tile(length: int, heads: int) -> None:
    dtype = (BFLOAT16, FLOAT16)[length % 2]
    page_size = (None, 64)[length % 3 % 2]
    check(*call_of((1, 1, heads, 500), page_size, FP8, dtype, [length]))
    if heads == 16:
        check(*call_of((1, 1, heads, 500), GATHERED[length % len(GATHERED)], FP8, dtype, [length]))


@pytest.mark.parametrize("parts", [1, 2, 13])
@pytest.mark.parametrize("seed", range(6))
def test_factors_in_combination(seed: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty sequences among others, more or fewer of them than parts, rows of several queries."""
    monkeypatch.setattr(decode_launch, "choose_parts", lambda *_: parts)
    draw = random.Random(100 * parts + seed)
    batch = draw.choice([1, 2, 3, 7])
    heads, seqlen_q = ROWS[(6 * [1, 2, 13].index(parts) + seed) % len(ROWS)]
    page_size = draw.choice([None, 64, 128, 192, *(GATHERED if heads * seqlen_q <= 16 else ())])
    lengths = [draw.choice([0, 1, 63, 64, 65, draw.randrange(300)]) for _ in range(batch)]
    dtype, is_causal = draw.choice([BFLOAT16, FLOAT16]), draw.random() < 0.7
    check(*call_of((batch, seqlen_q, heads, 300), page_size, FP8, dtype, lengths, seed, is_causal))


@pytest.mark.parametrize(("heads", "seqlen_q"), [(1, 32), (8, 4), (5, 3)])
def test_the_last_query_sees_a_tile_more(heads: int, seqlen_q: int) -> None:
    """And the first ones of a short sequence see no key."""
    check(*call_of((3, seqlen_q, heads, 129), 64, FP8, BFLOAT16, [65, 129, 2], is_causal=True))


@pytest.mark.parametrize("page_size", [None, 64, 48])
def test_c_kv_and_k_rope_of_unlike_strides(page_size: int | None) -> None:
    inputs, tensors = call_of((2, 1, 15, 300), page_size, FP8, BFLOAT16, [193, 300])
    gap = torch.cat([tensors.k_rope, tensors.k_rope], -1)[..., :ROPE]
    check(inputs, tensors._replace(c_kv=tensors.c_kv.contiguous(), k_rope=gap))


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_queries_that_lie_apart(dtype: torch.dtype) -> None:
    """Heads before queries, and an address that is a multiple of the element alone."""
    inputs, tensors = call_of((2, 3, 7, 200), 64, FP8, dtype, [193, 70], is_causal=True)
    q_nope_abs = inputs.q_nope_abs.transpose(1, 2).contiguous().transpose(1, 2)
    whole = torch.full((2, 3, 7, 2 * ROPE + 1), torch.nan, dtype=dtype)
    q_rope = whole[..., 1 : ROPE + 1].copy_(inputs.q_rope)
    check(*with_queries(inputs, tensors, q_nope_abs, q_rope))


@pytest.mark.parametrize("page_size", [64, 1, 16, 48])
def test_no_entry_behind_the_last_page_is_read(page_size: int) -> None:
    """The table ends with it."""
    inputs, tensors = call_of((1, 1, 16, 192), page_size, FP8, BFLOAT16, [192])
    assert tensors.page_table is not None
    check(inputs, tensors._replace(page_table=tensors.page_table[:, : 192 // page_size].clone()))


@pytest.mark.parametrize("shared", [("c_kv", "k_rope"), ("k_rope",)])
def test_sequences_that_share_a_cache(shared: tuple[str, ...]) -> None:
    """There is no descriptor for a stride of 0, also if k_rope alone has one."""
    inputs, tensors = call_of((1, 1, 16, 300), None, FP8, BFLOAT16, [300])
    queries = (inputs.q_nope_abs.expand(3, -1, -1, -1), inputs.q_rope.expand(3, -1, -1, -1))
    lengths = torch.tensor([300, 0, 129], dtype=torch.int32)
    inputs = dataclasses.replace(inputs, tokens=inputs.tokens.expand(3, -1, -1), seqlens_kv=lengths)
    caches = {"c_kv": tensors.c_kv.expand(3, -1, -1), "k_rope": tensors.k_rope.expand(3, -1, -1)}
    caches |= {name: x.contiguous() for name, x in caches.items() if name not in shared}
    check(*with_queries(inputs, tensors._replace(**caches, seqlens_kv=lengths), *queries))


def test_runs_agree_bit_for_bit_in_any_order_of_warps() -> None:
    _, tensors = call_of((3, 1, 17, 500), 64, FP8, BFLOAT16, [500, 333, 64])
    first = decode(tensors)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(decode(tensors), first, strict=True))


def test_a_call_may_want_no_lse() -> None:
    _, tensors = call_of((2, 1, 16, 200), 64, FP8, BFLOAT16, [200, 0])
    expected, _ = decode_launch.decode(tensors, known_of(tensors))
    without = tensors._replace(return_lse=False)
    out, lse = decode_launch.decode(without, known_of(without))
    assert lse is None
    assert torch.equal(out, expected)


@pytest.mark.parametrize("scale", [1.0, 2.0**-40, 2.0**60])
def test_terms_of_queries_are_exact(scale: float) -> None:
    """One element of a row has any of the 128 significands of bfloat16: the scores lose none of its bits.

    Plain PyTorch rounds scores to bfloat16, so its error would hide a term that is cut off.
    """
    inputs, tensors = call_of((4, 1, 32, 65), 64, FP8, BFLOAT16, [65] * 4)
    q_nope_abs, q_rope = torch.zeros_like(inputs.q_nope_abs), torch.zeros_like(inputs.q_rope)
    q_nope_abs[..., 100] = (1 + torch.arange(128) / 128).view(4, 1, 32) * scale
    inputs, tensors = with_queries(inputs, tensors, q_nope_abs.bfloat16(), q_rope)
    softmax_scale = 8.0 / scale
    inputs = dataclasses.replace(inputs, softmax_scale=softmax_scale)
    out = _without_lse(tensors._replace(softmax_scale=softmax_scale))
    exact, _ = attend(inputs, False, torch.float64)
    assert (out.double() - exact).norm() <= 2.5e-3 * exact.norm()


@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_query_that_is_not_finite_spoils_its_row_alone(value: float, heads: int) -> None:
    inputs, tensors = call_of((1, 1, heads, 130), 64, FP8, BFLOAT16, [130])
    q_nope_abs, q_rope = inputs.q_nope_abs.clone(), inputs.q_rope.clone()
    q_nope_abs[0, 0, 3, 300], q_rope[0, 0, 10, 5] = value, value
    expected = _without_lse(tensors)
    out = _without_lse(with_queries(inputs, tensors, q_nope_abs, q_rope)[1])
    spoiled = torch.zeros(heads, dtype=torch.bool)
    spoiled[[3, 10]] = True
    assert out[0, 0, spoiled].isnan().all()
    assert torch.equal(out[0, 0, ~spoiled], expected[0, 0, ~spoiled])


def test_a_cache_without_room_has_no_descriptor() -> None:
    """CUDA encodes none of an empty tensor."""
    _, tensors = call_of((3, 1, 16, 1), None, FP8, BFLOAT16, [0, 0, 0])
    tensors = tensors._replace(c_kv=tensors.c_kv[:, :0], k_rope=tensors.k_rope[:, :0])
    assert not is_taken(tensors)
    out, lse = decode(tensors)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))
