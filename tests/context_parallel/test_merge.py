"""Sums over sections, and which section sees what."""

from __future__ import annotations

import itertools

import pytest
import torch

from mla_plugin.arguments.layout import LAYOUTS
from mla_plugin.context_parallel import p2p
from mla_plugin.context_parallel.merge import merge
from mla_plugin.context_parallel.partition import position_ids
from mla_plugin.context_parallel.sections import Lengths, half, section, sections_of


@pytest.mark.parametrize("name", LAYOUTS)
def test_merge(name):
    """Softmaxes over two sets of keys, of which a row may see none, one, the other or both."""
    layout = LAYOUTS[name]
    scores = torch.randn(2, 4, 6, 10, dtype=torch.float64)
    scores[:, :, 0, :5] = scores[:, :, 1, 5:] = scores[:, :, 2] = -torch.inf
    v = torch.randn(2, 4, 10, 3, dtype=torch.float64)
    if layout.is_packed:
        scores, v = scores[:1], v[:1]

    def attend(keys):
        s = scores[..., keys]
        out = (s.softmax(-1).nan_to_num() @ v[:, :, keys]).contiguous()
        lse = s.logsumexp(-1)
        return layout.from_bhsd(out).contiguous(), lse.squeeze(0) if layout.is_packed else lse

    out, lse = attend(slice(0, 5))
    merge(out, lse, *attend(slice(5, 10)), layout)
    for found, exact in zip((out, lse), attend(slice(0, 10)), strict=True):
        torch.testing.assert_close(found, exact)
    assert not layout.to_bhsd(out)[:, :, 2].any()


@pytest.mark.parametrize(("size", "is_causal"), list(itertools.product((1, 2, 3, 5), (True, False))))
def test_sections_cover_the_mask_once(size, is_causal):
    tokens = 4 * size
    for rank in range(size):
        seen = torch.zeros(tokens, tokens, dtype=torch.int)
        for owner in range(size):
            which = section(rank, owner, is_causal=is_causal)
            assert which in sections_of(size, rank, is_causal=is_causal)
            rows = half(position_ids(tokens, size, rank), which.queries, 0)
            keys = half(position_ids(tokens, size, owner), which.keys, 0)
            part = torch.ones(len(rows), len(keys), dtype=torch.int)
            seen[rows[:, None], keys] += part.tril() if which.is_causal else part
        rows = position_ids(tokens, size, rank)
        mask = torch.ones(tokens, tokens, dtype=torch.int)
        assert torch.equal(seen[rows], (mask.tril() if is_causal else mask)[rows])


@pytest.mark.parametrize("size", [2, 3])
def test_lengths_of_the_ranks(size):
    """Counted token by token."""
    lengths = torch.tensor([7, 1, 0, 12, 5])
    padded = torch.tensor([12, 12, 12, 12, 24])
    cu, cu_padded = (torch.nn.functional.pad(x.cumsum(0), (1, 0)).int() for x in (lengths, padded))
    found = Lengths.packed(cu, cu_padded, size, int(padded.sum()) // size + 3)
    for rank in range(size):
        for number, (length, slots) in enumerate(zip(lengths.tolist(), padded.tolist(), strict=True)):
            front, back = (position_ids(slots, size, rank) < length).chunk(2)
            assert found.front[rank, number] == front.sum()
            assert found.back[rank, number] == back.sum()
            assert not back.any() or front.all()  # true tokens are a prefix
        assert found.of(rank, "all").starts.tolist() == [
            *(cu_padded[:-1] // size).tolist(),
            int(padded.sum()) // size + 3,
        ]
        middles = (cu_padded[:-1] // size + padded // (2 * size)).tolist()
        assert found.of(rank, "back").starts.tolist()[:-1] == middles
        assert found.of(rank, "back").cu_seqlens.diff().tolist() == found.back[rank].tolist()


def test_two_buffers_whatever_the_ring():
    given = (torch.zeros(3), torch.zeros(2))
    buffers = p2p._Buffers(given, 9)
    found = [[x.data_ptr() for x in buffers.next()] for _ in range(7)]
    assert len({tuple(addresses) for addresses in found}) == 2
    assert all(one != two for one, two in itertools.pairwise(found))
    assert len(p2p._Buffers(given, 2)._made) == 1
