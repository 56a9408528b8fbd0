"""The plan of decoding by itself: every tile of every sequence is worked on once, and the results find their slots."""

import random

import pytest
import torch

from mla_plugin.kernels.decode.plan import plan_kernel
from tests.kernels.decode_cases import DEVICE

BLOCK_N = 16


def plan(lengths: list[int], parts: int, programs: int, overhead: int = 0, **options: int) -> list[list[int]]:
    """The four numbers of each program."""
    batch = len(lengths)
    before = 2 * parts + 2 * parts + 2 * min(batch, parts)  # rows of one column, their lse, the list
    workspace = torch.full((before + 4 * programs,), -1, dtype=torch.float32, device=DEVICE)
    plan_kernel[(programs,)](
        workspace,
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        None,
        batch=batch,
        capacity=2**30,
        num_parts=parts,
        slots=options.get("slots", parts),
        overhead=overhead,
        least=options.get("least", 0),
        num_rows=1,
        R=1,
        BLOCK_N=BLOCK_N,
        PIECES=bool(options),
        DEPENDENT=False,
    )
    found: list[list[int]] = workspace.view(torch.int32)[before:].view(programs, 4).tolist()
    return found


def tiles_of(lengths: list[int]) -> list[int]:
    return [max(1, -(-length // BLOCK_N)) for length in lengths]


def check_runs(lengths: list[int], parts: int, overhead: int) -> None:
    tiles = tiles_of(lengths)
    total = sum(tiles) + overhead * len(tiles)
    seen: list[list[range]] = [[] for _ in tiles]
    for part, (first, last, begin, size) in enumerate(plan(lengths, parts, parts, overhead)):
        assert size == -(-total // parts)
        for b in range(first, last):
            begin += overhead
            low, high = max(part * size - begin, 0), min(part * size + size - begin, tiles[b])
            seen[b] += [range(low, high)] if low < high else []
            begin += tiles[b]
    for pieces, count in zip(seen, tiles, strict=True):
        assert [n for piece in pieces for n in piece] == list(range(count))


def random_lengths(draw: random.Random) -> list[int]:
    batch = draw.choice([1, 2, 7, 40, 255, 256, 257, 300])
    top = draw.choice([1, 5, 40, 300])
    tiles = draw.choice([0, 1, 2, 50])
    lengths = [draw.choice([0, 1, BLOCK_N * tiles, BLOCK_N * tiles + 1, draw.randrange(top + 1)]) for _ in range(batch)]
    if draw.random() < 0.5:
        lengths[draw.randrange(batch)] = draw.choice([3000, 100_000])
    return lengths


@pytest.mark.parametrize("seed", range(4))
def test_runs_hold_every_tile_once(seed: int) -> None:
    draw = random.Random(seed)
    check_runs(random_lengths(draw), draw.choice([1, 2, 13, 30]), draw.choice([0, 1, 4]))


@pytest.mark.parametrize("seed", range(4))
def test_pieces_hold_every_tile_once(seed: int) -> None:
    draw = random.Random(seed)
    lengths, parts = random_lengths(draw), draw.choice([1, 2, 13])
    tiles = tiles_of(lengths)
    found = plan(lengths, 2 * parts, 2 * parts + len(lengths), slots=parts, least=draw.choice([0, 4]))
    seen: list[dict[int, range]] = [{} for _ in tiles]
    firsts: list[set[int]] = [set() for _ in tiles]
    for program, (b, piece, first, size) in enumerate(found):
        if b == len(tiles):
            continue
        count = -(-tiles[b] // size)
        assert piece < count - 1
        assert piece < 0 or program == first + piece
        piece = count - 1 if piece < 0 else piece
        seen[b][piece] = range(piece * size, min(tiles[b], piece * size + size))
        firsts[b].add(first)
    for pieces, count, first in zip(seen, tiles, firsts, strict=True):
        assert [n for k in sorted(pieces) for n in pieces[k]] == list(range(count))
        assert len(first) == 1
