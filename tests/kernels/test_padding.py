"""Filling gaps: every gap, nothing else, for any strides and numbers of programs."""

from __future__ import annotations

import pytest
import torch

from mla_plugin.kernels.prefill import padding
from tests.plugins import flash_on_cpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCHES = {
    "tail": ([0, 3, 7], None),
    "no_gap": ([0, 3, 12], None),
    "between": ([0, 5, 9, 12], [2, 4, 1]),
    "before": ([2, 5, 9], [3, 3]),
    "empty_sequences": ([0, 0, 4, 8, 8], [0, 0, 4, 0]),
    "nothing_but_gaps": ([0, 4, 8], [0, 0]),
    "one": ([0, 12], [1]),
}


@pytest.fixture(params=[1, 5, 528])
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "_PROGRAMS", request.param)


def offsets(values: list[int] | None) -> torch.Tensor | None:
    return None if values is None else torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_rows(batch: tuple[list[int], list[int] | None]) -> None:
    starts, lengths = map(offsets, batch)
    x = torch.randn(12, 2, 24, device=DEVICE).to(torch.bfloat16)
    expected = x.cpu().clone()
    flash_on_cpu.write_gaps(expected, starts.cpu(), None if lengths is None else lengths.cpu())
    padding.write_gaps(x, starts, lengths)
    assert torch.equal(x.cpu(), expected)


@pytest.mark.parametrize("block", [8, 1024])
def test_strides_and_values(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first columns of wider rows; lse [H, T]; more elements in a row than a block has."""
    monkeypatch.setattr(padding, "_BLOCK", block)
    monkeypatch.setattr(padding, "_PROGRAMS", 6)
    starts, lengths = offsets([1, 5, 9]), offsets([2, 3])
    whole = torch.ones(12, 3, 24, device=DEVICE)
    padding.write_gaps(whole[..., :16], starts, lengths)
    inside = torch.tensor([0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0], dtype=torch.bool, device=DEVICE)
    assert (whole[inside] == 1).all()
    assert (whole[~inside][..., :16] == 0).all()
    assert (whole[..., 16:] == 1).all()
    lse = torch.ones(3, 12, device=DEVICE)
    padding.write_gaps(lse.t().unsqueeze(-1), starts, lengths, -torch.inf)
    assert torch.equal(lse == 1, inside.expand(3, 12))
    assert torch.equal(lse.isneginf(), ~inside.expand(3, 12))


def test_offsets_and_lengths_that_are_columns_of_a_table() -> None:
    table = torch.tensor([[0, 2], [5, 4], [9, 1], [12, 0]], dtype=torch.int32, device=DEVICE)
    x = torch.ones(12, 2, 8, device=DEVICE)
    padding.write_gaps(x, table[:, 0], table[:3, 1])
    assert x[:, 0, 0].tolist() == [1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0]


def test_nothing_to_fill() -> None:
    padding.write_gaps(torch.empty(0, 3, 8, device=DEVICE), offsets([0, 0]), None)


@pytest.mark.gpu
@pytest.mark.large_memory(12)
def test_more_elements_than_32_bits_count() -> None:
    x = torch.ones(2**31 // 1024 + 100, 8, 128, dtype=torch.bfloat16, device="cuda")
    rows = x.shape[0]
    padding.write_gaps(x, offsets([0, rows - 50]), offsets([rows - 100]))
    assert (x[: rows - 100].amin(), x[rows - 100 :].amax()) == (1, 0)


@pytest.mark.gpu
@pytest.mark.large_memory(6)
def test_heads_further_apart_than_32_bits_count() -> None:
    """Heads first in memory: the last one starts 2**31 elements after the first."""
    apart = 2**29
    x = torch.ones(4 * apart + 16, dtype=torch.float16, device="cuda").as_strided((2, 5, 8), (8, apart, 1))
    padding.write_gaps(x, offsets([0, 1]), None)
    assert x[0].eq(1).all()
    assert not x[1].any()


@pytest.mark.gpu
def test_a_captured_graph_follows_the_offsets() -> None:
    starts, lengths = offsets([0, 5, 9]), offsets([2, 4])
    x = torch.ones(12, 2, 24, device="cuda")
    padding.write_gaps(x, starts, lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        padding.write_gaps(x, starts, lengths)
    x.fill_(1)
    lengths.copy_(offsets([5, 1]))
    graph.replay()
    assert x[:, 0, 0].tolist() == [1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
