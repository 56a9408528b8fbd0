"""The wide decode kernel in the interpreter of ``gluon``, against float64."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mla_plugin.arguments.cache_format import FP8, RANK, ROPE
from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.arguments.decode_layout import known_of
from mla_plugin.kernels.decode import launch as decode_launch
from mla_plugin.kernels.decode.wide import launch as wide
from tests.kernels import gathered_cases
from tests.kernels.decode_cases import Inputs, as_engines_have_it, assert_out_as_good_as_pytorch, attend
from tests.kernels.gathered_cases import with_queries
from tests.kernels.gluon.hopper import hopper as hopper

pytestmark = pytest.mark.usefixtures("hopper")
BFLOAT16 = torch.bfloat16
ROWS = ((33, 1), (11, 3), (40, 1), (16, 4), (64, 1), (5, 13), (65, 1), (24, 4), (128, 1), (3, 43))
"""Heads and queries of a sequence."""


def is_taken(tensors: DecodeTensors) -> bool:
    """Whether the wide kernel computes a call."""
    return isinstance(decode_launch.make_launches(tensors).described, wide.Descriptors)


@pytest.fixture(autouse=True)
def _nan_in_new_memory() -> Iterator[None]:
    """Results and the workspace start as NaN: what is not written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def call_of(*given: Any, **options: Any) -> tuple[Inputs, DecodeTensors]:
    """A call that does not want the log-sum-exp."""
    inputs, tensors = gathered_cases.call_of(*given, **options)
    return inputs, tensors._replace(return_lse=False)


def decode(tensors: DecodeTensors) -> torch.Tensor:
    out, lse = decode_launch.decode(tensors, known_of(tensors))
    assert lse is None
    return out


def check(inputs: Inputs, tensors: DecodeTensors) -> None:
    """As good as PyTorch over the same numbers, by the wide kernel."""
    assert is_taken(tensors)
    assert_out_as_good_as_pytorch(decode(tensors), inputs, tensors.causal)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 128, 129, 192, 193, 500])
def test_lengths_around_a_tile(length: int) -> None:
    page_size = (None, 64)[length % 3 % 2]
    check(*call_of((1, 1, (40, 64)[length % 2], 500), page_size, FP8, BFLOAT16, [length]))


@pytest.mark.parametrize("parts", [1, 2, 13])
@pytest.mark.parametrize("seed", range(6))
def test_factors_in_combination(seed: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty sequences among others, more or fewer of them than parts, several row tiles, rows of several queries."""
    monkeypatch.setattr(decode_launch, "choose_parts", lambda *_: parts)
    draw = random.Random(100 * parts + seed)
    batch = draw.choice([1, 2, 3, 7])
    heads, seqlen_q = ROWS[(6 * [1, 2, 13].index(parts) + seed) % len(ROWS)]
    page_size = draw.choice([None, 64, 128, 192])
    lengths = [draw.choice([0, 1, 63, 64, 65, draw.randrange(300)]) for _ in range(batch)]
    check(*call_of((batch, seqlen_q, heads, 300), page_size, FP8, BFLOAT16, lengths, seed, draw.random() < 0.7))


@pytest.mark.parametrize(("heads", "seqlen_q"), [(1, 64), (16, 4), (5, 30)])
def test_the_last_query_sees_a_tile_more(heads: int, seqlen_q: int) -> None:
    """And the first ones of a short sequence see no key."""
    check(*call_of((3, seqlen_q, heads, 129), 64, FP8, BFLOAT16, [65, 129, 2], is_causal=True))


@pytest.mark.parametrize("page_size", [None, 64])
def test_c_kv_and_k_rope_of_unlike_strides(page_size: int | None) -> None:
    inputs, tensors = call_of((2, 1, 48, 300), page_size, FP8, BFLOAT16, [193, 300])
    gap = torch.cat([tensors.k_rope, tensors.k_rope], -1)[..., :ROPE]
    check(inputs, tensors._replace(c_kv=tensors.c_kv.contiguous(), k_rope=gap))


def test_queries_within_wider_rows() -> None:
    """A view of a projection that has both parts, as engines have it."""
    inputs, tensors = call_of((2, 3, 20, 200), 64, FP8, BFLOAT16, [193, 70], is_causal=True)
    whole = torch.cat([inputs.q_nope_abs, inputs.q_rope], -1)
    check(*with_queries(inputs, tensors, *whole.split([512, ROPE], -1)))


@pytest.mark.parametrize(("heads", "seqlen_q"), [(16, 4), (16, 3), (128, 2), (24, 2), (8, 9), (2, 40), (96, 1)])
def test_queries_of_several_tokens_as_engines_have_them(heads: int, seqlen_q: int) -> None:
    inputs, tensors = call_of((2, seqlen_q, heads, 200), 64, FP8, BFLOAT16, [193, 70], is_causal=True)
    queries = as_engines_have_it(inputs)
    check(*with_queries(inputs, tensors, queries.q_nope_abs, queries.q_rope))


def test_queries_that_descriptors_cannot_read_are_copied() -> None:
    """Head-major ones of 17 heads; an address that is a multiple of the element alone."""
    inputs, tensors = call_of((2, 3, 17, 200), 64, FP8, BFLOAT16, [193, 70], is_causal=True)
    q_nope_abs = as_engines_have_it(inputs).q_nope_abs
    whole = torch.full((2, 3, 17, 2 * ROPE + 1), torch.nan, dtype=BFLOAT16)
    q_rope = whole[..., 1 : ROPE + 1].copy_(inputs.q_rope)
    for queries in ((q_nope_abs, inputs.q_rope), (inputs.q_nope_abs, q_rope)):
        given = with_queries(inputs, tensors, *queries)
        assert decode_launch.make_launches(given[1]).copies_queries
        check(*given)


def test_no_entry_behind_the_last_page_is_read() -> None:
    """The table ends with it."""
    inputs, tensors = call_of((1, 1, 64, 192), 64, FP8, BFLOAT16, [192])
    assert tensors.page_table is not None
    check(inputs, tensors._replace(page_table=tensors.page_table[:, :3].clone()))


@pytest.mark.parametrize("name", ["c_kv", "k_rope"])
def test_sequences_that_share_a_cache_are_left_to_others(name: str) -> None:
    """There is no descriptor for a stride of 0."""
    _, tensors = call_of((2, 1, 64, 100), None, FP8, BFLOAT16, [100, 50])
    shared = getattr(tensors, name)[:1].expand(2, -1, -1)
    assert is_taken(tensors)
    assert not is_taken(tensors._replace(**{name: shared}))


@pytest.mark.parametrize(("largest", "at"), [(1e3, 5), (3e38, 511), (1e-38, 0), (0.0, 0)])
def test_queries_of_unlike_sizes(largest: float, at: int) -> None:
    """One element of a row far above the others or all of them tiny or 0; a row of zeros weighs all keys equally."""
    inputs, tensors = call_of((1, 1, 64, 130), 64, FP8, BFLOAT16, [130])
    q_nope_abs, q_rope = inputs.q_nope_abs.clone(), inputs.q_rope.clone()
    if largest < 1:
        q_nope_abs[:, :, ::2] = q_nope_abs[:, :, ::2].sign() * largest
        q_rope[:, :, ::2] = 0
    else:
        q_nope_abs[:, :, ::2, at] = largest
    inputs, tensors = with_queries(inputs, tensors, q_nope_abs, q_rope)
    if largest == 3e38:
        tensors = tensors._replace(softmax_scale=1e-37)
        assert decode(tensors).isfinite().all()
        return
    check(inputs, tensors)


@pytest.mark.parametrize("scale", [1.0, 2.0**-40, 2.0**60])
def test_terms_of_queries_are_exact(scale: float) -> None:
    """One element of a row has any of the 128 significands of bfloat16: the scores lose none of its bits.

    Plain PyTorch rounds scores to bfloat16, so its error would hide a term that is cut off.
    """
    inputs, tensors = call_of((2, 1, 64, 65), 64, FP8, BFLOAT16, [65] * 2)
    q_nope_abs, q_rope = torch.zeros_like(inputs.q_nope_abs), torch.zeros_like(inputs.q_rope)
    q_nope_abs[..., 100] = (1 + torch.arange(128) / 128).view(2, 1, 64) * scale
    inputs, tensors = with_queries(inputs, tensors, q_nope_abs.bfloat16(), q_rope)
    softmax_scale = 8.0 / scale
    inputs = dataclasses.replace(inputs, softmax_scale=softmax_scale)
    out = decode(tensors._replace(softmax_scale=softmax_scale))
    exact, _ = attend(inputs, False, torch.float64)
    assert (out.double() - exact).norm() <= 2.5e-3 * exact.norm()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_query_that_is_not_finite_spoils_its_row_alone(value: float) -> None:
    inputs, tensors = call_of((1, 1, 64, 130), 64, FP8, BFLOAT16, [130])
    expected = decode(tensors)
    q_nope_abs, q_rope = inputs.q_nope_abs.clone(), inputs.q_rope.clone()
    q_nope_abs[0, 0, 3, 300], q_rope[0, 0, 40, 5] = value, value
    out = decode(with_queries(inputs, tensors, q_nope_abs, q_rope)[1])
    spoiled = torch.zeros(64, dtype=torch.bool)
    spoiled[[3, 40]] = True
    assert out[0, 0, spoiled].isnan().all()
    assert torch.equal(out[0, 0, ~spoiled], expected[0, 0, ~spoiled])


@pytest.mark.parametrize("key", [3, 70, 140, 200])
def test_a_key_far_above_all_others(key: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weight alone is not 0, in tiles of either warpgroup: both know the highest score so far."""
    monkeypatch.setattr(decode_launch, "choose_parts", lambda *_: 1)
    inputs, tensors = call_of((1, 1, 64, 256), 64, FP8, BFLOAT16, [256])
    q_nope_abs, q_rope = inputs.q_nope_abs.clone(), inputs.q_rope.clone()
    q_nope_abs[:] = (inputs.tokens[0, key, :RANK] * 30).bfloat16()
    inputs, tensors = with_queries(inputs, tensors, q_nope_abs, q_rope)
    softmax_scale = 300 / float(q_nope_abs[0, 0, 0].double() @ inputs.tokens[0, key, :RANK].double())
    inputs = dataclasses.replace(inputs, softmax_scale=softmax_scale)
    check(inputs, tensors._replace(softmax_scale=softmax_scale))


@pytest.mark.parametrize("length", [64, 130])
def test_a_cache_whose_scale_is_zero_gives_zeros(length: int) -> None:
    """Also where keys are masked: their scores are -inf, and -inf * 0 is NaN."""
    _, tensors = call_of((1, 1, 64, 192), 64, FP8, BFLOAT16, [length])
    assert tensors.kv_scale is not None
    out = decode(tensors._replace(kv_scale=torch.zeros_like(tensors.kv_scale)))
    assert torch.equal(out, torch.zeros_like(out))


def test_runs_agree_bit_for_bit_in_any_order_of_warps() -> None:
    _, tensors = call_of((3, 1, 70, 500), 64, FP8, BFLOAT16, [500, 333, 64])
    first = decode(tensors)
    for _ in range(3):
        assert torch.equal(decode(tensors), first)


def test_calls_that_want_the_log_sum_exp_are_left_to_others() -> None:
    _, tensors = call_of((2, 1, 64, 200), 64, FP8, BFLOAT16, [200, 0])
    assert is_taken(tensors)
    assert not is_taken(tensors._replace(return_lse=True))


def test_a_cache_without_room_has_no_descriptor() -> None:
    """CUDA encodes none of an empty tensor."""
    _, tensors = call_of((3, 1, 64, 1), None, FP8, BFLOAT16, [0, 0, 0])
    tensors = tensors._replace(c_kv=tensors.c_kv[:, :0], k_rope=tensors.k_rope[:, :0])
    assert not is_taken(tensors)
    out = decode(tensors)
    assert torch.equal(out, torch.zeros_like(out))
