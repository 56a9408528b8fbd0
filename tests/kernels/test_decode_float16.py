"""Decode over e4m3 in float16, by both Gluon kernels in the interpreter of ``gluon``, against float64.

Rows of queries have a scale of their own there, and weights are relative to their tile.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mla_plugin.arguments.cache_format import FP8, RANK
from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.arguments.decode_layout import known_of
from mla_plugin.kernels.decode import launch as decode_launch
from mla_plugin.kernels.decode.hopper import launch as hopper_launch
from mla_plugin.kernels.decode.invariant import launch as invariant
from mla_plugin.kernels.decode.transposed import launch as transposed
from tests.kernels.decode_cases import Inputs, assert_as_good_as_pytorch, attend
from tests.kernels.gathered_cases import call_of, with_queries
from tests.kernels.gluon.hopper import hopper as hopper
from tests.kernels.test_decode_invariant import CHUNK, bits
from tests.kernels.test_decode_invariant import _nan_in_new_memory as _nan_in_new_memory

pytestmark = pytest.mark.usefixtures("hopper", "few_programs_of_the_sum")
BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
HEADS = (16, 40)
"""For the transposed kernel, and for that of many heads."""


def decode(tensors: DecodeTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """By the kernel of so many heads."""
    described = decode_launch.make_launches(tensors).described
    wanted = transposed.Descriptors if tensors.q_nope_abs.shape[2] <= 32 else hopper_launch.Descriptors
    assert isinstance(described, wanted)
    out, lse = decode_launch.decode(tensors, known_of(tensors))
    assert lse is not None
    return out, lse


def by_chunks(tensors: DecodeTensors, chunk: int = CHUNK) -> tuple[torch.Tensor, torch.Tensor]:
    """``batch_invariant``."""
    out, lse = invariant.decode(tensors, known_of(tensors), chunk)
    assert lse is not None
    return out, lse


def check(inputs: Inputs, tensors: DecodeTensors) -> None:
    """As good as PyTorch over the same numbers."""
    assert_as_good_as_pytorch(*decode(tensors), inputs, tensors.causal)


def with_sink(
    inputs: Inputs, tensors: DecodeTensors, gap: float, key: int = 0, *, is_empty: bool = True
) -> tuple[Inputs, DecodeTensors]:
    """A key has a score that is ``gap`` above those of the others, which have none of rope, and, if empty, no value."""
    assert tensors.kv_scale is not None
    tokens = inputs.tokens.clone()
    tokens[0, :, RANK:] = 0
    tokens[0, key, RANK] = tensors.kv_scale  # e4m3 of 1
    tensors.k_rope[0] = 0
    tensors.k_rope[0, key, 0] = 0x38
    if is_empty:
        tokens[0, key, :RANK] = 0
        tensors.c_kv[0, key] = 0
    q_rope = torch.zeros_like(inputs.q_rope)
    q_rope[..., 0] = gap / float(tensors.kv_scale * inputs.softmax_scale)
    inputs = dataclasses.replace(inputs, tokens=tokens)
    return with_queries(inputs, tensors, inputs.q_nope_abs * 0.1, q_rope)


@pytest.mark.parametrize(("dtype", "factors"), [(BFLOAT16, (1e-30, 1e4, 1.0, 0.0)), (FLOAT16, (1e-3, 50.0, 1.0, 0.0))])
@pytest.mark.parametrize("heads", [8, 32, 64])
def test_each_row_has_a_scale_of_its_own(heads: int, dtype: torch.dtype, factors: tuple[float, ...]) -> None:
    """Each kind of row by itself, so that none hides in the norm of others."""
    inputs, tensors = call_of((1, 1, heads, 150), 64, FP8, dtype, [131])
    scale = torch.tensor(factors).repeat_interleave(heads // 4)[:, None]
    queries = [(x.float() * scale).to(dtype) for x in (inputs.q_nope_abs, inputs.q_rope)]
    inputs, tensors = with_queries(inputs, tensors, *queries)
    out, lse = decode(tensors)
    for first in range(0, heads, heads // 4):
        rows = slice(first, first + heads // 4)
        some = dataclasses.replace(inputs, q_nope_abs=queries[0][:, :, rows], q_rope=queries[1][:, :, rows])
        assert_as_good_as_pytorch(out[:, :, rows], lse[:, rows], some, False)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("heads", HEADS)
def test_queries_of_nope_and_rope_of_unlike_sizes(heads: int, which: int) -> None:
    """The larger ones decide about the row's scale."""
    inputs, tensors = call_of((1, 1, heads, 150), 64, FP8, BFLOAT16, [131])
    queries = [inputs.q_nope_abs, inputs.q_rope]
    queries[which] = queries[which] * 2.0**-12
    check(*with_queries(inputs, tensors, *queries))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("gap", [0.0, 10.0, 14.0, 18.0, 20.0])
@pytest.mark.parametrize(("length", "parts"), [(64, 1), (600, 1), (600, 4)])
def test_weights_beside_a_key_that_dominates(
    heads: int, length: int, parts: int, gap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attention sink: a key of zeros whose score is ``gap`` above the others. The result is the others'."""
    monkeypatch.setattr(decode_launch, "choose_parts", lambda *_: parts)
    inputs, tensors = call_of((1, 1, heads, length), None, FP8, BFLOAT16, [length])
    inputs, tensors = with_sink(inputs, tensors, gap)
    check(inputs, tensors)


@pytest.mark.parametrize("heads", HEADS)
def test_weights_in_other_tiles_than_a_key_that_dominates(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have a maximum of their own: 40 above all of theirs it still loses no more than the weights in its tile."""
    monkeypatch.setattr(decode_launch, "choose_parts", lambda *_: 1)
    inputs, tensors = call_of((1, 1, heads, 600), None, FP8, BFLOAT16, [600])
    inputs, tensors = with_sink(inputs, tensors, 40.0)
    out, lse = decode(tensors)
    others = dataclasses.replace(inputs, tokens=inputs.tokens[:, 64:], seqlens_kv=None)
    wanted, lse_of_others = attend(others, False, torch.float64)
    wanted = wanted * (lse_of_others - lse.double()).exp().transpose(1, 2)[..., None]  # their share of the weights
    assert (out.double() - wanted).norm() <= 0.01 * wanted.norm()


@pytest.mark.parametrize("key", [0, 64, 130, 200, 383])
@pytest.mark.parametrize("heads", HEADS)
def test_a_key_far_above_all_others(heads: int, key: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that count for nothing follow it: sums relative to their maxima would exceed float32."""
    monkeypatch.setattr(decode_launch, "choose_parts", lambda *_: 1)
    inputs, tensors = call_of((1, 1, heads, 384), None, FP8, BFLOAT16, [384])
    check(*with_sink(inputs, tensors, 200.0, key, is_empty=False))


@pytest.mark.parametrize("chunk", [128, 256])
@pytest.mark.parametrize("gap", [0.0, 14.0, 200.0])
def test_batch_invariant(gap: float, chunk: int) -> None:
    """Each chunk of keys begins anew."""
    inputs, tensors = call_of((1, 1, 40, 600), None, FP8, BFLOAT16, [600])
    inputs, tensors = with_sink(inputs, tensors, gap, 70, is_empty=gap < 100)
    assert isinstance(invariant.make_launches(tensors, chunk).described, hopper_launch.Descriptors)
    assert_as_good_as_pytorch(*by_chunks(tensors, chunk), inputs, False)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    ("kv_scale", "factor"),
    [
        *((kv_scale, factor) for kv_scale in (1.0, 2.0**-20, 1e-12, 0.0) for factor in (0.0, 1.0)),
        *((0.01 * 2.0**power, 2.0**-power) for power in (40, 80, 100)),
    ],
)
def test_any_kv_scale(heads: int, kv_scale: float, factor: float) -> None:
    """Also with queries of zeros: what is masked stays so where the scale of a row is below float32's numbers.

    And tiny queries over huge values, whose scores are usual ones.
    """
    inputs, tensors = call_of((1, 1, heads, 150), 64, FP8, BFLOAT16, [70])
    assert tensors.kv_scale is not None
    tokens = inputs.tokens.double() / tensors.kv_scale.double() * torch.tensor(kv_scale).double()
    inputs = dataclasses.replace(inputs, tokens=tokens)
    tensors = tensors._replace(kv_scale=torch.tensor(kv_scale))
    queries = (inputs.q_nope_abs * factor, inputs.q_rope * factor)
    check(*with_queries(inputs, tensors, *queries))


@pytest.mark.parametrize(("heads", "seqlen_q"), [(40, 2), (24, 3), (5, 8)])
def test_bits_of_a_query_alone(heads: int, seqlen_q: int) -> None:
    """Also where other queries of its sequence see a tile more, and beside a sequence without keys."""
    lengths = [2 * CHUNK + 65, 0, CHUNK + 1, 65, 1, 129]
    _, tensors = call_of((len(lengths), seqlen_q, heads, 400), None, FP8, BFLOAT16, lengths, is_causal=True)
    out, lse = by_chunks(tensors)
    for b, length in enumerate(lengths):
        for n in range(seqlen_q):
            queries = {name: getattr(tensors, name)[b : b + 1, n : n + 1] for name in ("q_nope_abs", "q_rope")}
            cache = {name: getattr(tensors, name)[b : b + 1] for name in ("c_kv", "k_rope")}
            seen = torch.tensor([max(length + n + 1 - seqlen_q, 0)], dtype=torch.int32)
            found, lse_found = by_chunks(tensors._replace(**queries, **cache, seqlens_kv=seen, causal=False))
            assert torch.equal(bits(found), bits(out[b : b + 1, n : n + 1]))
            assert torch.equal(bits(lse_found), bits(lse[b : b + 1, :, n : n + 1]))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_is_so_alone(heads: int, bad: float) -> None:
    inputs, tensors = call_of((1, 1, heads, 150), 64, FP8, BFLOAT16, [131])
    out, lse = decode(tensors)
    q_nope_abs = inputs.q_nope_abs.clone()
    q_nope_abs[0, 0, 3, 7] = bad
    found, lse_found = decode(with_queries(inputs, tensors, q_nope_abs, inputs.q_rope)[1])
    assert found[0, 0, 3].isnan().all()
    others = torch.arange(heads) != 3
    assert torch.equal(found[:, :, others], out[:, :, others])
    assert torch.equal(lse_found[:, others], lse[:, others])


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("power", [22, 24, 25, 27, 30])
def test_scores_that_are_whole_numbers(heads: int, power: int) -> None:
    """From 2^24 on float32 does not hold a score minus 15; no weight becomes infinite."""
    inputs, tensors = call_of((1, 1, heads, 70), None, FP8, BFLOAT16, [70])
    inputs, tensors = with_sink(inputs, tensors, 2.0**power, 66, is_empty=False)
    check(inputs, tensors)
