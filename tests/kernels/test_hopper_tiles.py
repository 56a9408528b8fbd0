"""Which tiles belong to a tile, by the functions that both sides of a Hopper kernel call, run as plain Python."""

from __future__ import annotations

import random
import types
from typing import Any

import pytest

from mla_plugin.kernels import tile_math
from mla_plugin.kernels.hopper import common, loading_latent

ROWS = 64
LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129, 200, 300)


class _Scalars:
    """What the functions use of Triton's language, of Python's numbers; division rounds towards 0, as on the GPU."""

    maximum, minimum = max, min

    @staticmethod
    def cdiv(x: int, y: int) -> int:
        assert x >= 0
        return (x + y - 1) // y


class _Number(int):
    """An int whose operations give such ints, and whose division rounds towards 0."""

    def __floordiv__(self, other: int) -> _Number:
        return _Number(int(int(self) / int(other)))

    def __add__(self, other: int) -> _Number:
        return _Number(int(self) + int(other))

    def __sub__(self, other: int) -> _Number:
        return _Number(int(self) - int(other))

    def __neg__(self) -> _Number:
        return _Number(-int(self))

    def __mul__(self, other: int) -> _Number:
        return _Number(int(self) * int(other))

    __radd__, __rmul__ = __add__, __mul__


def python(function: Any, **names: Any) -> Any:
    return types.FunctionType(function.fn.__code__, {"gl": _Scalars, "tl": _Scalars, "ROWS": ROWS, **names})


query_tiles = python(common.query_tiles, rows_with_keys=python(tile_math.rows_with_keys))
steps_of = python(loading_latent.steps_of, KEYS=64)
kv_tiles = python(common.kv_tiles, _tile_bounds=python(tile_math.tile_bounds))


def draws(seed: int) -> tuple[int, int, int, int, bool]:
    rng = random.Random(seed)
    windows = (-1, 0, 1, 30, 64, 200)
    return (*rng.choices(LENGTHS, k=2), *rng.choices(windows, k=2), rng.random() < 0.5)


def seen(query: int, key: int, lengths: tuple[int, int], left: int, right: int, diagonal: int) -> bool:
    ahead = key - query - diagonal
    inside = query < lengths[0] and key < lengths[1]
    return inside and (left < 0 or ahead >= -left) and (right < 0 or ahead <= right)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("seed", range(40))
def test_query_tiles_of_a_key_tile(seed: int, block: int) -> None:
    seqlen_q, seqlen_kv, left, right, bottom_right = draws(seed)
    lengths, diagonal = (seqlen_q, seqlen_kv), seqlen_kv - seqlen_q if bottom_right else 0
    rows = [any(seen(i, j, lengths, left, right, diagonal) for j in range(seqlen_kv)) for i in range(seqlen_q)]
    for start_n in range(0, 384, block):
        first, whole_first, whole_last, last, lowest, highest = query_tiles(
            *map(_Number, (start_n, *lengths, left, right, block)), bottom_right, left >= 0, right >= 0
        )
        assert first <= last
        needed = [
            m
            for m in range(8)
            if any(
                seen(i, j, lengths, left, right, diagonal)
                for i in range(m * ROWS, (m + 1) * ROWS)
                for j in range(start_n, start_n + block)
            )
        ]
        assert all(first <= m < last for m in needed)
        if start_n >= seqlen_kv:
            assert first == last
            continue
        if first == last:
            continue
        assert needed[-1:] == [last - 1] or right < 0 or left >= 0
        assert first < whole_first <= whole_last <= last
        assert [i for i in range(seqlen_q) if rows[i]] == list(range(max(lowest, 0), max(lowest, highest, 0)))
        for m in range(whole_first, whole_last):
            assert lowest <= m * ROWS
            assert (m + 1) * ROWS <= highest
            for j in (start_n, min(start_n + block, seqlen_kv) - 1):
                assert seen(m * ROWS, j, lengths, left, right, diagonal)
                assert seen((m + 1) * ROWS - 1, j, lengths, left, right, diagonal)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("seed", range(40))
def test_key_tiles_of_a_query_tile(seed: int, block: int) -> None:
    seqlen_q, seqlen_kv, left, right, bottom_right = draws(seed)
    lengths, diagonal = (seqlen_q, seqlen_kv), seqlen_kv - seqlen_q if bottom_right else 0
    for start_m in range(0, 384, 2 * ROWS):
        last, whole_last, whole_first, first = kv_tiles(
            *map(_Number, (start_m, *lengths, left, right, block)), bottom_right, left >= 0, right >= 0
        )
        if start_m >= seqlen_q:
            assert first == last
            continue
        for n in range(6):
            pairs = [
                seen(i, j, lengths, left, right, diagonal)
                for i in range(start_m, min(start_m + 2 * ROWS, seqlen_q))
                for j in range(n * block, (n + 1) * block)
            ]
            assert not any(pairs) or first <= n < last
            if whole_first <= n < whole_last:
                assert all(pairs)
        assert first == last or first <= whole_first <= whole_last < last


@pytest.mark.parametrize("seed", range(40))
def test_key_tiles_of_a_query_tile_over_latents(seed: int) -> None:
    seqlen_q, seqlen_kv, _, right, bottom_right = draws(seed)
    lengths, diagonal = (seqlen_q, seqlen_kv), seqlen_kv - seqlen_q if bottom_right else 0
    for start_m in range(0, 384, ROWS):
        steps, seen_by_all, found = steps_of(*map(_Number, (start_m, *lengths, right)), bottom_right, right >= 0)
        rows = range(start_m, min(start_m + ROWS, seqlen_q))
        keys = [j for j in range(seqlen_kv) if any(seen(i, j, lengths, -1, right, diagonal) for i in rows)]
        assert steps * 64 > max(keys, default=-1)
        assert found == diagonal
        if start_m >= seqlen_q:
            assert steps == 0
            continue
        of_64_rows = seqlen_kv if right < 0 else min(seqlen_kv, start_m + 63 + diagonal + right + 1)
        assert steps == -(-max(of_64_rows, 0) // 64)
        first_row = [j for j in range(seqlen_kv) if seen(start_m, j, lengths, -1, right, diagonal)]
        assert max(seen_by_all, 0) == len(first_row)
