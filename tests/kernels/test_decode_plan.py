"""The plan of decoding by itself: every tile of every sequence is worked on once, and the results find their slots."""

import random

import pytest
import torch

from mla_plugin.kernels.decode.plan import FEW_SEQUENCES, SHARE_NUMBERS, _part_size, part_range_of_few, plan_kernel
from tests.kernels.decode_cases import DEVICE
from tests.kernels.gluon.translate import Program
from tests.kernels.gluon.values import Pointer, as_value

BLOCK_N = 16


def plan(lengths: list[int], parts: int, overhead: int) -> list[list[int]]:
    """The four numbers of each part."""
    found = torch.full((parts, SHARE_NUMBERS.value), -1, dtype=torch.int32, device=DEVICE)
    plan_kernel[(parts,)](
        found,
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        None,
        batch=len(lengths),
        capacity=2**30,
        num_parts=parts,
        overhead=overhead,
        BLOCK_N=BLOCK_N,
        DEPENDENT=False,
    )
    numbers: list[list[int]] = found.tolist()
    return numbers


def tiles_of(lengths: list[int]) -> list[int]:
    return [max(1, -(-length // BLOCK_N)) for length in lengths]


def part_size(tiles: list[int], overhead: int, parts: int) -> int:
    """The even size, or the next one, up to a 25th larger, that divides every sequence or that every sequence divides.

    A sequence may have no more parts than the even size needs at least.
    """
    costs = [count + overhead for count in tiles]
    even = -(-sum(costs) // parts)
    if len(costs) <= FEW_SEQUENCES or sum(costs) != costs[0] * len(costs):
        return even
    cost = costs[0]
    sizes = range(even, even + even // 25 + 1)
    return next((size for size in sizes if size % cost == 0 or cost == cost // even * size), even)


def check_runs(lengths: list[int], parts: int, overhead: int) -> None:
    tiles = tiles_of(lengths)
    seen: list[list[range]] = [[] for _ in tiles]
    for part, (first, last, begin, size) in enumerate(plan(lengths, parts, overhead)):
        assert size == part_size(tiles, overhead, parts)
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
    if draw.random() < 0.25:
        return [lengths[0]] * batch
    if draw.random() < 0.5:
        lengths[draw.randrange(batch)] = draw.choice([3000, 100_000])
    return lengths


@pytest.mark.parametrize("seed", range(6))
def test_runs_hold_every_tile_once(seed: int) -> None:
    draw = random.Random(seed)
    check_runs(random_lengths(draw), draw.choice([1, 2, 13]), draw.choice([0, 1, 4]))


@pytest.mark.gpu
def test_five_hundred_plans_on_a_gpu() -> None:
    draw = random.Random(500)
    for _ in range(500):
        check_runs(random_lengths(draw), draw.choice([1, 2, 13, 66, 132, 264]), draw.choice([0, 1, 4]))


@pytest.mark.parametrize(
    ("batch", "tiles", "parts", "pieces"),
    [(64, 96, 66, 1), (128, 64, 66, 1), (128, 128, 264, 2), (32, 128, 132, 4), (256, 32, 264, 1), (60, 96, 66, 3)],
)
def test_equal_sequences_are_cut_no_more_than_needed(batch: int, tiles: int, parts: int, pieces: int) -> None:
    """The last case would need parts longer by more than a 25th."""
    counts = [0] * batch
    for part, (first, last, begin, size) in enumerate(plan([tiles * BLOCK_N] * batch, parts, 4)):
        for b in range(first, last):
            begin += 4
            counts[b] += max(part * size - begin, 0) < min(part * size + size - begin, tiles)
            begin += tiles
    assert max(counts) == pieces


@pytest.mark.parametrize(("batch", "longer"), [(2**13 - 1, True), (2**13, False)])
def test_parts_become_longer_as_long_as_int32_holds_their_ends(batch: int, longer: bool) -> None:
    """Sequences of 2^17 tiles, as many as together have just less than 2^30, or that."""
    size_of = Program((1,), (0,), 0).translated(_part_size)
    cost, parts = 2**17, batch + batch // 32
    size = int(size_of(*map(as_value, (batch * cost, cost, batch, parts))))
    assert size == (cost if longer else -(-batch * cost // parts))
    assert parts * size < 2**31


@pytest.mark.parametrize("overhead", [0, 4])
def test_lengths_that_end_with_a_part(overhead: int) -> None:
    """Sequences of exactly one part, none, a part and a tile more."""
    check_runs([8 * BLOCK_N, 0, 8 * BLOCK_N, 8 * BLOCK_N + 1, 7 * BLOCK_N, 1], 4, overhead)


def check_few(lengths: list[int], parts: int, overhead: int) -> None:
    batch, seqlens_kv = len(lengths), torch.tensor(lengths, dtype=torch.int32)
    divide = Program((1,), (0,), 0).translated(part_range_of_few)
    for part, expected in enumerate(plan(lengths, parts, overhead)):
        given = (as_value(part), as_value(parts), Pointer.of(seqlens_kv), as_value(batch), as_value(2**30))
        assert [int(x) for x in divide(*given, as_value(overhead), BLOCK_N)] == expected


@pytest.mark.parametrize("seed", range(8))
def test_few_sequences_are_divided_as_by_the_plan(seed: int) -> None:
    """By each program of the Hopper kernel, without a plan."""
    draw = random.Random(seed)
    lengths = [draw.choice([0, 1, BLOCK_N, BLOCK_N + 1, draw.randrange(5000), 100_000]) for _ in range(FEW_SEQUENCES)]
    check_few(lengths[: draw.randint(1, FEW_SEQUENCES)], draw.choice([1, 2, 13, 66]), draw.choice([0, 1, 4]))


def test_few_equal_sequences_are_divided_evenly() -> None:
    """41 parts of 98 tiles; parts of 100 would give each sequence ten."""
    check_few([996 * BLOCK_N] * FEW_SEQUENCES, 41, 4)
