"""``batch_invariant`` decode by the Hopper kernel in the interpreter of ``gluon``: right, and the same bits alone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.language as tl

from mla_plugin.arguments import decode_layout
from mla_plugin.kernels.decode import launch as decode_launch
from mla_plugin.kernels.decode.hopper import launch as hopper_launch
from mla_plugin.kernels.decode.invariant import chunks
from mla_plugin.kernels.decode.invariant import launch as invariant
from mla_plugin.kernels.decode.invariant.chunks import most_chunks
from mla_plugin.kernels.decode.invariant.plan import chunk_range_of_few
from mla_plugin.kernels.decode.plan import FEW_SEQUENCES
from tests.kernels.decode_cases import Inputs, assert_as_good_as_pytorch, contiguous, paged, with_leftpad
from tests.kernels.gluon.hopper import hopper as hopper
from tests.kernels.gluon.translate import Program
from tests.kernels.gluon.values import Pointer, as_value
from tests.kernels.test_decode_invariant import CHUNK, assert_alone_as_among_others, assert_same, part, plan, run
from tests.kernels.test_decode_invariant import _nan_in_new_memory as _nan_in_new_memory
from tests.kernels.test_hopper_decode import tensors_of

pytestmark = pytest.mark.usefixtures("hopper", "few_programs_of_the_sum")
DEEPSEEK = (512, 64)
LENGTHS = [2 * CHUNK + 65, 0, CHUNK, 1]


def check(inputs: Inputs) -> None:
    """By the Hopper kernel, right, and each query has the bits that it has alone."""
    launches = invariant.make_launches(tensors_of(inputs), CHUNK)
    assert isinstance(launches.described, hopper_launch.Descriptors)
    found = run(inputs)
    assert_as_good_as_pytorch(*found, inputs, is_causal=True)
    assert_alone_as_among_others(inputs, found)


@pytest.mark.parametrize(("heads", "page_size"), [(5, 0), (5, 7), (33, 64), (1, 16)])
def test_queries_alone_and_among_others(heads: int, page_size: int) -> None:
    """Two queries of 33 heads are two row tiles; with pages of 7 and 16 tiles are gathered."""
    shape = (len(LENGTHS), 2, heads, *DEEPSEEK, max(LENGTHS))
    dtype = torch.bfloat16 if page_size else torch.float16
    check(paged(shape, page_size, dtype, LENGTHS) if page_size else contiguous(shape, dtype, LENGTHS))


def test_a_row_tile_that_sees_a_tile_less() -> None:
    """64 heads of the first query: the last key is of a tile, and a chunk, that only the second query sees."""
    lengths = [CHUNK + 1, 65, 1]
    check(paged((3, 2, 64, *DEEPSEEK, CHUNK + 1), 64, torch.bfloat16, lengths))


def test_what_rounds_to_minus_zero_is_zero_alone_too() -> None:
    """Alone it is one chunk's result; among others a sum with that of a chunk that the first query does not see."""
    inputs = contiguous((1, 2, 4, *DEEPSEEK, CHUNK + 1), torch.float16, [CHUNK + 1])
    inputs.c_kv.mul_(0.01)
    inputs.c_kv[..., 0] = 0
    inputs.c_kv[0, 0, 0] = -6e-8
    found = run(inputs)
    assert (found[0][0, 0, :, 0] == 0).all()
    assert_alone_as_among_others(inputs, found)


def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 1, 2, 2, 4, 4, ... times CHUNK keys."""
    for name, count in (("SINGLE", 1), ("DOUBLE", 2)):
        monkeypatch.setattr(chunks, name, tl.constexpr(count))
        monkeypatch.setattr(chunks, f"_{name}", count)


@pytest.mark.parametrize("seed", range(6))
def test_factors_in_combination(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    small_chunks(monkeypatch)
    monkeypatch.setattr(decode_launch, "choose_parts", lambda *_: draw.choice([1, 2, 3, 7]))
    batch, seqlen_q, heads = draw.choice([1, 2, 3]), draw.choice([1, 2, 3]), draw.choice([1, 2, 17, 33, 64])
    lengths = [draw.choice([0, 1, 64, CHUNK, CHUNK + 1, 3 * CHUNK, draw.randrange(900)]) for _ in range(batch)]
    shape = (batch, seqlen_q, heads, *DEEPSEEK, max(*lengths, 1))
    page_size, dtype = draw.choice([0, 0, 64, 128, 1, 48]), draw.choice([torch.bfloat16, torch.float16])
    inputs = paged(shape, page_size, dtype, lengths, seed) if page_size else contiguous(shape, dtype, lengths, seed)
    if not page_size and draw.random() < 0.5:
        inputs = with_leftpad(inputs, [draw.choice([0, 1, 63, length]) for length in lengths])
    check(inputs)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_larger_chunks_in_any_number_of_parts_and_rounds(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)
    lengths = [9 * CHUNK + 1, 3, 5 * CHUNK, 0, CHUNK + 1]
    inputs = paged((len(lengths), 1, 3, *DEEPSEEK, max(lengths)), 64, torch.bfloat16, lengths)
    wanted = run(inputs)
    assert_as_good_as_pytorch(*wanted, inputs, is_causal=True)
    monkeypatch.setattr(decode_launch, "choose_parts", lambda *_: parts)
    for most in (1 << 30, 12 * 3 * 512 * 2):
        monkeypatch.setattr(decode_layout, "_known", {})
        monkeypatch.setattr(invariant, "workspace_bytes", lambda _, most=most: most)
        assert_same(run(inputs), wanted)


def test_left_padding_moves_no_bit() -> None:
    """Up to all of the keys."""
    lengths, pads = [CHUNK + 90, 170, 140, 200], [0, 1, 137, 200]
    inputs = with_leftpad(contiguous((4, 2, 5, *DEEPSEEK, 220), torch.bfloat16, lengths), pads)
    found = run(inputs)
    assert_as_good_as_pytorch(*found, inputs, is_causal=True)
    for b, (length, pad) in enumerate(zip(lengths, pads, strict=True)):
        moved = replace(part(inputs, [b], slice(None), [length - pad]), leftpad_kv=None)
        moved = replace(moved, c_kv=moved.c_kv[:, pad:], k_rope=moved.k_rope[:, pad:])
        out, lse = run(moved)
        assert_same((out[0], lse[0]), (found[0][b], found[1][b]))


def test_left_padding_at_the_end_of_int32() -> None:
    """Of a sequence without a key: its rows see none, whatever the differences with the padding are."""
    inputs = with_leftpad(contiguous((3, 3, 64, *DEEPSEEK, 70), torch.bfloat16, [0, 70, 3]), [2**31 - 1, 2, 2**31 - 1])
    out, lse = run(inputs)
    assert not out[[0, 2]].any()
    assert lse[[0, 2]].isneginf().all()
    assert_as_good_as_pytorch(out[1:2], lse[1:2], part(inputs, [1], slice(None), [70]), is_causal=True)


@pytest.mark.parametrize("heads", [5, 16, 24])
def test_other_strides_give_the_same_bits(heads: int) -> None:
    """Some queries are copied, those that descriptors cannot read; and a cache that sequences share is gathered."""
    inputs = contiguous((2, 2, heads, *DEEPSEEK, 200), torch.bfloat16, [200, CHUNK])
    inputs = replace(inputs, **{name: getattr(inputs, name)[:1].repeat(2, 1, 1) for name in ("c_kv", "k_rope")})
    wanted = run(inputs)
    by_head = inputs.q_nope_abs.transpose(1, 2).contiguous().transpose(1, 2)
    off = torch.empty(inputs.q_rope.numel() + 1, dtype=torch.bfloat16)[1:].view(inputs.q_rope.shape)
    shared = {name: getattr(inputs, name)[:1].expand(2, -1, -1) for name in ("c_kv", "k_rope")}
    assert invariant.make_launches(tensors_of(replace(inputs, q_nope_abs=by_head)), CHUNK).copies_queries == (
        heads == 5
    )
    for changes in ({"q_nope_abs": by_head}, {"q_rope": off.copy_(inputs.q_rope)}, shared):
        assert_same(run(replace(inputs, **changes)), wanted)


@pytest.mark.parametrize("seed", range(8))
def test_few_sequences_are_divided_as_by_the_plan(seed: int) -> None:
    """The numbers of every part, and the list of sequences."""
    draw = random.Random(seed)
    batch, parts = draw.randint(1, FEW_SEQUENCES), draw.choice([1, 2, 7, 66, 132])
    lengths = [draw.choice([0, 1, CHUNK, CHUNK + 1, draw.randrange(40 * CHUNK), 150 * CHUNK]) for _ in range(batch)]
    chunks_of_all = sum(most_chunks(length, CHUNK) for length in lengths)
    listed, of_parts = plan(lengths, parts, 0, chunks_of_all, is_only_round=True)
    seqlens_kv, found = torch.tensor(lengths, dtype=torch.int32), torch.full((batch, 2), -1, dtype=torch.int32)
    divide = Program((1,), (0,), 0).translated(chunk_range_of_few)
    for number, expected in enumerate(of_parts):
        numbers = divide(
            *(as_value(number), number == parts - 1, Pointer.of(found), as_value(parts), Pointer.of(seqlens_kv), None),
            *(as_value(batch), as_value(2**30), CHUNK),
        )
        assert [int(x) for x in numbers] == expected
    assert found.tolist() == listed


def test_rounds_of_few_sequences_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their programs know a single round alone."""
    small_chunks(monkeypatch)
    lengths = [5 * CHUNK + 1, 5 * CHUNK + 3, 5 * CHUNK + 2]
    inputs = paged((3, 1, 3, *DEEPSEEK, max(lengths)), 64, torch.bfloat16, lengths)
    wanted = run(inputs)
    assert_as_good_as_pytorch(*wanted, inputs, is_causal=True)
    monkeypatch.setattr(decode_launch, "choose_parts", lambda *_: 2)
    monkeypatch.setattr(decode_layout, "_known", {})
    monkeypatch.setattr(invariant, "workspace_bytes", lambda _: 7 * 3 * 512 * 2)
    assert_same(run(inputs), wanted)
    (known,) = decode_layout._known.values()
    assert len(known.kept[invariant.kept_as(CHUNK)].rounds) > 1


def test_the_plan_of_few_sequences_is_no_kernel() -> None:
    """So their kernels differ, and are compiled together by themselves."""
    codes = set()
    for batch in (1, FEW_SEQUENCES, FEW_SEQUENCES + 1):
        inputs = paged((batch, 1, 16, *DEEPSEEK, 2 * CHUNK), 64, torch.bfloat16, [2 * CHUNK] * batch)
        launches = invariant.make_launches(tensors_of(inputs), CHUNK)
        assert (launches.rounds[0].plan is None) == (batch <= FEW_SEQUENCES)
        codes.add(launches.code)
    assert len(codes) == 2


def test_results_of_chunks_alone_stay_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored with evict_last: not what a sequence of one chunk gives, nor pieces without batch_invariant."""
    found: set[str] = set()
    store = Program._store

    def noting(self: Program, pointer: Pointer, value: Any, mask: Any = None, eviction_policy: str = "") -> None:
        if getattr(pointer.offset, "ndim", 0) == 2:
            found.add(eviction_policy)
        store(self, pointer, value, mask, eviction_policy)

    monkeypatch.setattr(Program, "_store", noting)
    for length, policy in ((CHUNK, ""), (2 * CHUNK, "evict_last")):
        found.clear()
        run(contiguous((1, 1, 4, *DEEPSEEK, length), torch.bfloat16, [length]))
        assert found == {policy}
    found.clear()
    monkeypatch.setattr(decode_launch, "choose_parts", lambda *_: 2)
    inputs = contiguous((1, 1, 64, *DEEPSEEK, 2 * CHUNK), torch.bfloat16, [2 * CHUNK])
    tensors = tensors_of(inputs)
    decode_launch.decode(tensors, decode_layout.known_of(tensors))
    assert found == {""}
