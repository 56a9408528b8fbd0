"""The Hopper decode kernel in the interpreter of ``gluon``, against float64."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
import torch

from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.types import Accepted
from mla_plugin.kernels import mla_decode_attention
from mla_plugin.kernels.decode import launch as decode_launch
from mla_plugin.kernels.decode.hopper import launch as hopper_launch
from mla_plugin.kernels.decode.hopper import storing
from mla_plugin.kernels.hopper.common import product_layout
from mla_plugin.plugins.triton import decode
from tests.kernels.decode_cases import (
    Inputs,
    as_engines_have_it,
    assert_as_good_as_pytorch,
    contiguous,
    paged,
    with_leftpad,
)
from tests.kernels.gluon.hopper import hopper as hopper
from tests.kernels.gluon.translate import Program
from tests.kernels.gluon.values import Pointer, Value, as_value
from tests.requests import H100

pytestmark = pytest.mark.usefixtures("hopper")
DEEPSEEK = (512, 64)


def run(inputs: Inputs, is_causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return mla_decode_attention(*inputs.tensors(), is_causal=is_causal, return_lse=True, **inputs.options())


def tensors_of(inputs: Inputs) -> DecodeTensors:
    options = inputs.options()
    del options["softmax_scale"]
    return DecodeTensors(*inputs.tensors(), inputs.softmax_scale, **options)


def is_taken(inputs: Inputs) -> bool:
    """Whether the launches of a call are the Hopper kernel's."""
    return isinstance(decode_launch.make_launches(tensors_of(inputs)).described, hopper_launch.Descriptors)


def check(inputs: Inputs, is_causal: bool = False) -> None:
    assert is_taken(inputs)
    assert_as_good_as_pytorch(*run(inputs, is_causal), inputs, is_causal)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 129, 192, 193, 1000])
def test_lengths_around_a_tile(length: int) -> None:
    check(paged((1, 1, 20, *DEEPSEEK, 1000), 64, torch.bfloat16, [length]))


@pytest.mark.parametrize("parts", [1, 2, 13])
@pytest.mark.parametrize("seed", range(4))
def test_factors_in_combination(seed: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty sequences among others, more or fewer of them than parts, rows of several queries in one tile."""
    monkeypatch.setattr(decode_launch, "choose_parts", lambda *_: parts)
    draw = random.Random(100 * parts + seed)
    batch, seqlen_q, page_size = draw.choice([1, 2, 3, 7]), draw.choice([1, 2, 4]), draw.choice([64, 128, 192])
    heads = draw.choice([70, 33, 20, 17])
    lengths = [draw.choice([0, 1, 64, 65, draw.randrange(400)]) for _ in range(batch)]
    dtype = draw.choice([torch.bfloat16, torch.float16])
    shape = (batch, seqlen_q, heads, *DEEPSEEK, 400)
    inputs = paged(shape, page_size, dtype, lengths, seed) if draw.random() < 0.7 else contiguous(shape, dtype, lengths)
    check(inputs, is_causal=draw.random() < 0.7)


@pytest.mark.parametrize(("heads", "seqlen_q"), [(63, 2), (21, 4), (9, 8)])
def test_the_last_row_of_a_tile_sees_one_key_more(heads: int, seqlen_q: int) -> None:
    """And with it a key tile that no other row of its tile sees."""
    shape = (2, seqlen_q, heads, *DEEPSEEK, 129)
    check(paged(shape, 64, torch.bfloat16, [65, 129]), is_causal=True)


@pytest.mark.parametrize("seed", range(16))
def test_many_short_sequences(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warpgroup may begin the next one before the other has read the sums of this one."""
    monkeypatch.setattr(decode_launch, "choose_parts", lambda *_: 1)
    lengths = [random.Random(seed).choice([1, 7, 64]) for _ in range(5)]
    check(paged((5, 1, 17, *DEEPSEEK, 64), 64, torch.bfloat16, lengths, seed))


def test_more_sequences_than_parts_over_undefined_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of split sequences is indexed by part then, and says where none is."""
    monkeypatch.setattr(decode_launch, "choose_parts", lambda *_: 3)
    torch.use_deterministic_algorithms(True, warn_only=True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        check(paged((7, 1, 20, *DEEPSEEK, 130), 64, torch.bfloat16, [64, 64, 1, 64, 0, 130, 64]))
    finally:
        torch.use_deterministic_algorithms(False)


def test_queries_that_are_views() -> None:
    """Columns of one tensor."""
    inputs = paged((2, 1, 64, *DEEPSEEK, 300), 64, torch.bfloat16, [300, 17])
    queries = torch.cat([inputs.q_nope_abs, inputs.q_rope], -1)
    check(dataclasses.replace(inputs, q_nope_abs=queries[..., :512], q_rope=queries[..., 512:]))


@pytest.mark.parametrize(
    ("heads", "seqlen_q"),
    [(16, 4), (16, 5), (128, 2), (24, 3), (48, 2), (96, 2), (8, 9), (40, 3), (4, 7), (1, 70), (2, 40), (200, 2)],
)
def test_queries_of_several_tokens_as_engines_have_them(heads: int, seqlen_q: int) -> None:
    """Each head's together: a row tile is some heads of a query, or all heads of some queries, or several such."""
    dtype = (torch.bfloat16, torch.float16)[seqlen_q % 2]
    inputs = paged((3, seqlen_q, heads, *DEEPSEEK, 200), 64, dtype, [200, 0, seqlen_q + 1])
    check(as_engines_have_it(inputs), is_causal=True)
    of_each_sequence = inputs.q_nope_abs.transpose(1, 2).contiguous().transpose(1, 2)
    check(dataclasses.replace(inputs, q_nope_abs=of_each_sequence))


def assert_copied(inputs: Inputs, is_causal: bool) -> None:
    """Descriptors cannot read the queries as they lie; results are as good as from contiguous ones."""
    assert decode_launch.make_launches(tensors_of(inputs)).copies_queries
    check(inputs, is_causal)


@pytest.mark.parametrize("heads", [12, 20, 33])
def test_queries_of_which_a_copy_would_have_few_rows_are_copied(heads: int) -> None:
    """A panel's swizzle repeats after 8 rows."""
    inputs = paged((2, 3, heads, *DEEPSEEK, 200), 64, torch.bfloat16, [200, 17])
    assert not decode_launch.make_launches(tensors_of(inputs)).copies_queries
    assert_copied(as_engines_have_it(inputs), is_causal=True)


def test_queries_that_repeat_are_copied() -> None:
    """No descriptor is made for a stride of 0."""
    inputs = paged((3, 2, 24, *DEEPSEEK, 200), 64, torch.bfloat16, [200, 0, 17])
    assert_copied(dataclasses.replace(inputs, q_nope_abs=inputs.q_nope_abs[:1].expand(3, -1, -1, -1)), is_causal=True)
    assert_copied(dataclasses.replace(inputs, q_rope=inputs.q_rope[:, :, :1].expand(-1, -1, 24, -1)), is_causal=False)


def test_rows_beyond_2_to_the_31_elements() -> None:
    """4 M rows of a sequence, as of 32,768 queries of 128 heads."""
    tile = 2**31 // (64 * 512)
    out = torch.zeros(64, 512, dtype=torch.bfloat16)
    base = Pointer.of(out) + -tile * 64 * 512
    acc = Value(torch.ones(64, 256), product_layout.fn(256))
    store = Program((1,), (0,), 0).translated(storing._store_half)
    store(base, acc, as_value(tile), as_value(64 * (tile + 1)), as_value(True), 1, 512, False, "")
    assert torch.equal(out, torch.cat([torch.zeros(64, 256), torch.ones(64, 256)], 1).bfloat16())


def test_a_cache_without_room_has_no_descriptor() -> None:
    """CUDA encodes none of an empty tensor."""
    inputs = contiguous((3, 1, 20, *DEEPSEEK, 0), torch.bfloat16)
    assert not is_taken(inputs)
    out, lse = run(inputs, False)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))


def usual(
    heads: int = 64, rank: int = 512, page_size: int = 64, dtype: torch.dtype = torch.float16, gap: int = 0
) -> Inputs:
    """A call of two sequences; with ``gap`` more columns in the cache than c_kv and k_rope have."""
    inputs = paged((2, 1, heads, rank, 64, 300), page_size, dtype, [300, 17])
    cache = torch.cat([inputs.c_kv, inputs.k_rope, inputs.c_kv[..., :gap]], -1)
    return dataclasses.replace(inputs, c_kv=cache[..., :rank], k_rope=cache[..., rank : rank + 64])


def test_queries_off_16_bytes_are_copied() -> None:
    inputs = usual()
    off = torch.empty(inputs.q_rope.numel() + 1, dtype=torch.float16)[1:].view(inputs.q_rope.shape)
    assert_copied(dataclasses.replace(inputs, q_rope=off.copy_(inputs.q_rope)), is_causal=False)


@pytest.mark.parametrize(
    ("make", "note"),
    [
        (usual, "by the Hopper kernel"),
        (lambda: usual(heads=17), "by the Hopper kernel"),
        (lambda: usual(page_size=192), "by the Hopper kernel"),
        (lambda: with_leftpad(usual(), [3, 0]), "by the plain kernel: leftpad_kv"),
        (lambda: usual(page_size=16), "by the Hopper kernel"),
        (lambda: usual(heads=16), "by the plain kernel: 16 (query, head) pairs"),
        (lambda: usual(rank=256), "by the plain kernel: kv_lora_rank=256"),
        (lambda: usual(dtype=torch.float32), "by the plain kernel: torch.float32"),
        (lambda: usual(gap=1), "by the plain kernel: rows of the cache that do not start on 16 bytes"),
    ],
)
def test_the_kernel_that_runs_is_the_one_that_the_backend_names(make: Callable[[], Inputs], note: str) -> None:
    inputs = make()
    accepted = decode.select(DecodeRequest.of(tensors_of(inputs)).replace(device_type="cuda"), H100)
    assert isinstance(accepted, Accepted)
    assert [given[: len(note)] for given in accepted.notes] == [note]
    assert is_taken(inputs) == (note == "by the Hopper kernel")


def test_runs_agree_bit_for_bit_in_any_order_of_warps() -> None:
    inputs = paged((3, 1, 17, *DEEPSEEK, 500), 64, torch.bfloat16, [500, 333, 64])
    first = run(inputs, False)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(run(inputs, False), first, strict=True))
