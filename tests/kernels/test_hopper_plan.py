"""The list of query tiles of packed sequences, and what the same kernel fills, in Triton's interpreter."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from mla_plugin.kernels.hopper import plan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QUERIES = 128
RANKS = ("top_left", "bottom_right", "length")


def offsets(values: list[int], first: int = 0) -> torch.Tensor:
    return torch.tensor(list(itertools.accumulate(values, initial=first)), dtype=torch.int32, device=DEVICE)


def expected(lengths_q: list[int], lengths_kv: list[int], rank: str) -> list[list[int]]:
    def keys(entry: tuple[int, int]) -> tuple[int, int, int]:
        tile, b = entry
        first = {"top_left": 0, "bottom_right": (lengths_kv[b] - lengths_q[b]) // QUERIES, "length": lengths_kv[b]}
        return -first[rank] - (0 if rank == "length" else tile), b, tile

    entries = [(tile, b) for b, length in enumerate(lengths_q) for tile in range(-(-length // QUERIES))]
    return [list(entry) for entry in sorted(entries, key=keys)]


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("seed", range(8))
def test_every_tile_once_and_the_longest_first(seed: int, rank: str) -> None:
    rng = random.Random(seed)
    count = rng.choice((1, 2, 5, 70, 130))
    lengths_q = [rng.choice((0, 1, 127, 128, 129, 300, 1000 if count > 9 else 6000)) for _ in range(count)]
    lengths_kv = [max(0, length + rng.choice((0, 0, -200, 129, 3000))) for length in lengths_q]
    slots = [length + rng.choice((0, 0, 1, 3)) for length in lengths_q]
    starts = offsets(slots, rng.choice((0, 2)))
    rows, heads, width = int(starts[-1]) + rng.choice((0, 4)), 3, 8
    capacity = plan.capacity(rows, count, QUERIES)
    work = torch.full((plan.HEADER + 2 * capacity,), -7, dtype=torch.int32, device=DEVICE)
    out = torch.full((rows, heads, width), 7.0, device=DEVICE)
    lse = torch.full((heads, rows), 7.0, device=DEVICE)
    second = torch.full((rows, 5), 7.0, device=DEVICE) if seed % 2 else None
    plan.plan_kernel[(count + 1, rng.choice((1, 3)))](
        *(work, out, second, lse, offsets(lengths_q), offsets(lengths_kv), starts, count, rows, heads),
        *(heads * width, 5, QUERIES, rank, plan.TILES_AT_ONCE, plan.SEQUENCES_AT_ONCE, 16),
    )
    wanted = expected(lengths_q, lengths_kv, rank)
    assert work[: plan.HEADER].tolist() == [0, len(wanted)]
    assert work[plan.HEADER : plan.HEADER + 2 * len(wanted)].view(-1, 2).tolist() == wanted
    assert (work[plan.HEADER + 2 * len(wanted) :] == -7).all()
    is_gap = torch.ones(rows, dtype=torch.bool, device=DEVICE)
    for start, length in zip(starts.tolist(), lengths_q, strict=False):
        is_gap[start : start + length] = False
    assert (out[is_gap] == 0).all()
    assert (out[~is_gap] == 7).all()
    assert (lse[:, is_gap] == -torch.inf).all()
    assert (lse[:, ~is_gap] == 7).all()
    assert second is None or ((second[is_gap] == 0).all() and (second[~is_gap] == 7).all())


def test_no_sequence() -> None:
    rows, heads, width = 5, 2, 8
    work = torch.full((2,), -7, dtype=torch.int32, device=DEVICE)
    out, lse = torch.full((rows, heads, width), 7.0, device=DEVICE), torch.full((heads, rows), 7.0, device=DEVICE)
    none = offsets([])
    plan.plan_kernel[(1, 2)](
        work, out, None, lse, none, none, none, 0, rows, heads, heads * width, 0, QUERIES, "length", 32, 64, 16
    )
    assert work.tolist() == [0, 0]
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_key_tiles_with_most_queries_come_first(seed: int, bottom_right: bool) -> None:
    """Listed with queries and keys exchanged, as the backward's launch does; in 128ths, as the list counts."""
    rng = random.Random(seed)
    lengths_q = [rng.choice((0, 1, 128, 300, 1000, 6000)) for _ in range(7)]
    lengths_kv = [max(0, length + rng.choice((0, 0, -200, 129, 3000))) for length in lengths_q]
    starts = offsets(lengths_kv)
    rows = int(starts[-1])
    work = torch.full((plan.HEADER + 2 * plan.capacity(rows, 7, QUERIES),), -7, dtype=torch.int32, device=DEVICE)
    dk = torch.full((rows, 3), 7.0, device=DEVICE)
    plan.plan_kernel[(8, 2)](
        *(work, dk, None, None, starts, offsets(lengths_q), starts, 7, rows, 1, 3, 0, QUERIES),
        *(plan.rank(True, is_shifted=not bottom_right), plan.TILES_AT_ONCE, plan.SEQUENCES_AT_ONCE, 4),
    )
    tiles = work[plan.HEADER : plan.HEADER + 2 * int(work[1])].view(-1, 2).tolist()
    wanted = [(tile, b) for b, length in enumerate(lengths_kv) for tile in range(-(-length // QUERIES))]
    assert sorted(map(tuple, tiles)) == sorted(wanted)

    def queries(tile: int, b: int) -> int:
        """Of the tile's first key; tiles count from the end."""
        first_key = (-(-lengths_kv[b] // QUERIES) - 1 - tile) * QUERIES
        diagonal = lengths_kv[b] - lengths_q[b] if bottom_right else 0
        return lengths_q[b] - first_key + diagonal

    found = [queries(*tile) for tile in tiles]
    assert all(found[j] < found[i] + 2 * QUERIES for i in range(len(found)) for j in range(i, len(found)))
