"""Placement of tokens and its inverse; nothing here needs a second process."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from mla_plugin.arguments.layout import LAYOUTS
from mla_plugin.context_parallel import (
    held_positions,
    held_tokens,
    packed_position_ids,
    pad_lengths,
    partition,
    position_ids,
    shard,
    unshard,
)
from mla_plugin.context_parallel.order import by_rank, in_order, of_rank, packed_order

SLOTS = {1: [0, 4, 4, 10], 2: [0, 8, 8, 12, 28], 3: [0, 12, 12, 18, 42], 4: [0, 8, 24, 24, 64]}


def offsets(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(("size", "dim"), list(itertools.product((1, 2, 3, 4), (0, 1, 2))))
def test_shard_and_unshard(size, dim):
    x = torch.randn(12 * size, 24 * size, 36 * size).movedim(0, dim)
    parts = [shard(x, size, rank, dim=dim) for rank in range(size)]
    assert torch.equal(unshard(parts, dim=dim), x)
    assert {part.shape[dim] for part in parts} == {x.shape[dim] // size}


def test_the_placement_is_that_of_other_libraries():
    """Megatron-Core's get_batch_on_this_cp_rank: view as [2 size, S / 2 size], select (rank, 2 size - rank - 1)."""
    x = torch.arange(32).view(1, 32)
    for rank in range(4):
        chunks = x.view(1, 8, 4).index_select(1, torch.tensor([rank, 8 - rank - 1])).view(1, 8)
        assert torch.equal(shard(x, 4, rank), chunks)
    assert position_ids(16, 4, 1).tolist() == [2, 3, 12, 13]


@pytest.mark.parametrize("size", SLOTS)
def test_packed(size):
    """TransformerEngine's thd_get_partitioned_indices, slot by slot: the first half of a sequence's slots on a rank are
    those of chunk ``rank``, the second half those of chunk ``2 size - 1 - rank``.
    """
    cu = offsets(SLOTS[size])
    x = torch.randn(int(cu[-1]), 3)
    parts = [shard(x, size, rank, dim=0, cu_seqlens_padded=cu) for rank in range(size)]
    assert torch.equal(unshard(parts, dim=0, cu_seqlens_padded=cu), x)
    for rank, part in enumerate(parts):
        expected = []
        for start, length in zip(cu.tolist(), cu.diff().tolist(), strict=False):
            chunk = length // size // 2
            for slot in range(2 * chunk):
                jumped = rank if slot < chunk else 2 * (size - 1) - rank
                expected.append(start + slot + jumped * chunk)
        assert partition.packed_indices(cu, size, rank).tolist() == expected
        sequences = [shard(y, size, rank, dim=0) for y in x.split(cu.diff().tolist())]
        assert torch.equal(part, torch.cat(sequences))
        positions = [position_ids(length, size, rank) for length in cu.diff().tolist()]
        assert torch.equal(packed_position_ids(cu, size, rank), torch.cat(positions))


@pytest.mark.parametrize(("size", "tail"), list(itertools.product((2, 3, 4), (0, 1, 5))))
def test_packed_order_on_the_device(size, tail):
    """What the ways use without reading offsets is the same placement; slots after the sequences are kept too."""
    cu = offsets(SLOTS[size])
    total = int(cu[-1])
    whole = torch.arange(total + tail * size)
    behind = whole[total:].chunk(size) if tail else [whole[:0]] * size
    parts = [torch.cat([shard(whole[:total], size, r, dim=0, cu_seqlens_padded=cu), behind[r]]) for r in range(size)]
    order = packed_order(cu, size, total // size + tail)
    layout = LAYOUTS["thd"]
    assert torch.equal(in_order(torch.stack(parts)[..., None], layout, order)[:, 0], whole)
    inverse = order.argsort()
    assert torch.equal(by_rank(whole[:, None], layout, size, inverse)[..., 0], torch.stack(parts))
    for rank, part in enumerate(parts):
        assert torch.equal(of_rank(whole, size, rank, inverse), part)


@pytest.mark.parametrize("name", ["bshd", "sbhd", "bhsd"])
def test_dense_order(name):
    layout, size = LAYOUTS[name], 3
    x = torch.randn(layout.shape(2, 4, 12, 5))
    parts = torch.stack([shard(x, size, rank, dim=layout.tokens) for rank in range(size)])
    assert torch.equal(in_order(parts, layout, None), x)
    assert torch.equal(by_rank(x, layout, size, None), parts)


def test_the_dimension_may_be_of_numpy():
    x = torch.arange(16.0).view(2, 8)
    assert torch.equal(shard(x, 2, 0, dim=np.int64(-1)), shard(x, 2, 0, dim=-1))


def test_gradients_go_through():
    x = torch.randn(1, 8, 2, requires_grad=True)
    shard(x, 2, 1).sum().backward()
    assert x.grad[0, :, 0].tolist() == [0, 0, 1, 1, 1, 1, 0, 0]


def test_pad_lengths():
    assert pad_lengths(offsets([0, 7, 7, 8, 40]), 4).tolist() == [0, 8, 8, 16, 48]
    assert pad_lengths(offsets([0]), 4).tolist() == [0]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: shard(torch.zeros(1, 30), 4, 0),
            r"of shape \(1, 30\) has 30 tokens.*multiple of 8: pad to 32",
        ),
        (lambda: shard(torch.zeros(1, 32), 4, 4), "rank=4 of size=4"),
        (
            lambda: shard(torch.zeros(8), 4, 0, dim=0, cu_seqlens_padded=offsets([0, 4, 8])),
            "sequence 0 .* 4 tokens",
        ),
        (lambda: shard(torch.zeros(9), 2, 0, dim=0, cu_seqlens_padded=offsets([0, 4, 8])), "9 tokens .* ends at 8"),
        (lambda: partition.packed_indices(offsets([0, 8, 4]), 2, 0), "offsets never decrease"),
        (lambda: partition.packed_indices(offsets([4, 8]), 2, 0), "start at 0"),
        (lambda: unshard([torch.zeros(1, 3)] * 2), "all parts has 6 tokens"),
        (lambda: unshard([torch.zeros(1, 4), torch.zeros(1, 8)]), r"shapes \[\(1, 4\), \(1, 8\)\]"),
        (lambda: unshard([]), r"shapes \[\]"),
    ],
)
def test_errors(call, text):
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: shard([1, 2], 2, 0), TypeError, "x is list; expected a torch.Tensor"),
        (lambda: shard(torch.zeros(1, 8), 2.0, 0), TypeError, "size=2.0; expected an int"),
        (lambda: shard(torch.zeros(1, 8), 2, None), TypeError, "rank=None; expected an int"),
        (lambda: shard(torch.zeros(1, 8), 2, 0, dim=2), ValueError, "dim=2 and x has shape"),
        (lambda: shard(torch.zeros(1, 8), 2, 0, cu_seqlens_padded=[0, 8]), TypeError, "cu_seqlens_padded is list"),
        (lambda: shard(torch.zeros(1, 8), 2, 0, cu_seqlens_padded=offsets([[0, 8]])), ValueError, "int32 .B . 1."),
        (lambda: unshard([1, 2]), TypeError, "parts.0. is int; expected a torch.Tensor"),
        (lambda: unshard(torch.zeros(2, 4)), TypeError, "parts is Tensor; expected a list of tensors"),
        (lambda: partition.position_ids(-8, 2, 0), ValueError, "tokens=-8; expected at least 0"),
        (lambda: pad_lengths([0, 3], 2), TypeError, "cu_seqlens is list; expected a torch.Tensor"),
        (lambda: pad_lengths(offsets([[0, 3]]), 2), ValueError, r"cu_seqlens is torch.int32 \[1, 2\]; expected int32"),
        (lambda: pad_lengths(torch.tensor([0.0, 3.0]), 2), ValueError, "cu_seqlens is torch.float32"),
        (lambda: packed_position_ids(torch.tensor([0j, 4j]), 2, 0), ValueError, "cu_seqlens_padded is torch.complex64"),
        (lambda: partition.token_dim("hsbd"), ValueError, "qkv_format='hsbd'; expected one of bshd"),
        (lambda: shard(torch.zeros(8, 8), 2, 0, dim=True), ValueError, "dim=True and x has shape"),
        (lambda: pad_lengths(offsets([0, 3]), 0), ValueError, "size=0; expected at least 1"),
        (lambda: held_tokens("5", 2, 0), TypeError, "tokens='5'; expected an int"),
        (lambda: held_tokens(-5, 2, 0), ValueError, "tokens=-5; expected at least 0"),
        (lambda: held_positions(-5, 2, 0), ValueError, "tokens=-5; expected at least 0"),
    ],
)
def test_arguments_of_another_kind(call, error, text):
    with pytest.raises(error, match=text):
        call()
