"""``batch_invariant`` decode: correct, and the same bits for any other queries in the batch.

In Triton's interpreter without a GPU, compiled with one.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from mla_plugin import DecodeTensors, environment
from mla_plugin.arguments import decode_layout
from mla_plugin.conformance.interpreted import products_by_row
from mla_plugin.kernels.decode import launch as decode_launch
from mla_plugin.kernels.decode import limits
from mla_plugin.kernels.decode.hopper import rule as hopper_rule
from mla_plugin.kernels.decode.invariant import launch as invariant
from mla_plugin.kernels.decode.invariant import plan as invariant_plan
from mla_plugin.kernels.decode.invariant.chunks import chunks_from, first_key, most_chunks
from mla_plugin.kernels.decode.invariant.combine import combine_chunks_kernel
from mla_plugin.kernels.decode.invariant.launch import combine_sizes
from mla_plugin.kernels.decode.invariant.plan import COUNTED_KEYS, NUMBERS, plan_chunks_kernel
from mla_plugin.kernels.decode.tiles import DECODE
from mla_plugin.variables import CHUNKS
from tests.kernels.decode_cases import (
    DEVICE,
    DTYPES,
    Inputs,
    assert_as_good_as_pytorch,
    contiguous,
    mixed,
    paged,
    with_leftpad,
)
from tests.kernels.gluon.translate import Program
from tests.kernels.gluon.values import as_value
from tests.kernels.test_decode import describe_for_the_interpreter

pytestmark = pytest.mark.usefixtures("few_programs_of_the_sum")
TILE = COUNTED_KEYS.value
CHUNK = 128  # here; two tiles, so that the interpreter has less to do
Results = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def _nan_in_new_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Outputs and the memory between the kernels start as NaN, and what was launched before is forgotten."""
    monkeypatch.setenv("MLA_PLUGIN_BATCH_INVARIANT_CHUNK", str(CHUNK))
    monkeypatch.setattr(decode_layout, "_known", {})
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    with products_by_row():
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full tiles are read through tensor descriptors wherever the strides allow it."""
    if DEVICE == "cpu":
        describe_for_the_interpreter(monkeypatch)
        device = decode_launch.device_of(torch.device("cpu"))
        monkeypatch.setattr(decode_launch, "device_of", lambda _: device._replace(has_descriptors=True))


def run(inputs: Inputs, is_causal: bool = True) -> Results:
    tensors = DecodeTensors(
        *inputs.tensors(),
        inputs.softmax_scale,
        is_causal and inputs.q_nope_abs.shape[1] > 1,
        True,
        inputs.page_table,
        inputs.seqlens_kv,
        inputs.leftpad_kv,
    )
    out, lse = invariant.decode(tensors, decode_layout.known_of(tensors), environment.batch_invariant_chunk())
    assert lse is not None
    return out, lse


def bits(x: torch.Tensor) -> torch.Tensor:
    """-0 and 0 are two of them."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def assert_same(found: Results, wanted: Results) -> None:
    for x, y in zip(found, wanted, strict=True):
        assert torch.equal(bits(x), bits(y))


def part(inputs: Inputs, sequences: list[int], queries: slice, lengths: list[int], wider: int = 0) -> Inputs:
    """Some sequences and queries with the first so many keys of each, and a wider page table."""
    page_table = inputs.page_table
    if page_table is not None:
        page_table = torch.nn.functional.pad(page_table[sequences], (0, wider), value=2**30)
    is_paged = page_table is not None
    return replace(
        inputs,
        q_nope_abs=inputs.q_nope_abs[sequences][:, queries],
        q_rope=inputs.q_rope[sequences][:, queries],
        c_kv=inputs.c_kv if is_paged else inputs.c_kv[sequences],
        k_rope=inputs.k_rope if is_paged else inputs.k_rope[sequences],
        tokens=inputs.tokens[sequences],
        page_table=page_table,
        seqlens_kv=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        leftpad_kv=None if inputs.leftpad_kv is None else inputs.leftpad_kv[sequences],
    )


def assert_alone_as_among_others(inputs: Inputs, found: Results, wider: int = 0) -> None:
    """Each query of each sequence by itself."""
    seqlen_q = inputs.q_nope_abs.shape[1]
    for (b, length), i in itertools.product(enumerate(inputs.lengths()), range(seqlen_q)):
        seen = max(length - (seqlen_q - 1 - i), 0)
        out, lse = run(part(inputs, [b], slice(i, i + 1), [seen], wider))
        assert_same((found[0][b, i], found[1][b, :, i]), (out[0, 0], lse[0, :, 0]))


LENGTHS = [CHUNK, 0, CHUNK + 1, 1]


@pytest.mark.parametrize(("page_size", "dtype"), list(zip((0, 64, 7), itertools.cycle(DTYPES))))
def test_queries_alone_and_among_others(page_size: int, dtype: torch.dtype) -> None:
    """Ragged lengths; every result is right, too."""
    shape = (len(LENGTHS), 2, 5, 64, 16, max(LENGTHS))
    inputs = paged(shape, page_size, dtype, LENGTHS) if page_size else contiguous(shape, dtype, LENGTHS)
    found = run(inputs)
    assert_as_good_as_pytorch(*found, inputs, is_causal=True)
    assert_alone_as_among_others(inputs, found, wider=40)


@pytest.mark.usefixtures("descriptors")
@pytest.mark.parametrize(("heads", "rank"), [(40, 64), (40, 96), (20, 512)])
def test_more_rows_than_a_tile_and_descriptors(heads: int, rank: int) -> None:
    """The last tile that all rows see is another one for a query among others."""
    lengths = [2 * CHUNK, 64]
    inputs = paged((2, 2, heads, rank, 16, max(lengths)), 64, torch.float16, lengths)
    found = run(inputs)
    assert_as_good_as_pytorch(*found, inputs, is_causal=True)
    assert_alone_as_among_others(inputs, found)
    by_descriptors = {
        known.kept[invariant.kept_as(CHUNK)].described is not None for known in decode_layout._known.values()
    }
    if decode_launch.device_of(inputs.c_kv.device).gpu_class == "Hopper":
        assert by_descriptors == {True}


@pytest.mark.usefixtures("descriptors")
@pytest.mark.parametrize("heads", [8, 40])
def test_every_page_size(heads: int) -> None:
    """Contiguous too."""
    lengths = [CHUNK + 5]
    shape = (1, 1, heads, 64, 16, CHUNK + 5)
    wanted = run(contiguous(shape, torch.float16, lengths))
    for page_size in (1, 7, 64, 256):
        assert_same(run(paged(shape, page_size, torch.float16, lengths)), wanted)


@pytest.mark.parametrize("heads", [1, 40])
def test_a_sequence_that_reaches_larger_chunks(heads: int) -> None:
    """The first chunk of 2 * CHUNK keys begins after 32 others; the second query sees one key more than the first."""
    lengths = [35 * CHUNK + 1]
    inputs = contiguous((1, 2, heads, 32, 0, lengths[0]), torch.float16, lengths)
    found = run(inputs)
    assert_as_good_as_pytorch(*found, inputs, is_causal=True)
    assert_alone_as_among_others(inputs, found)


def test_a_large_batch_in_another_order() -> None:
    lengths = [(37 * b) % 70 for b in range(30)]
    lengths[20] = CHUNK + 3
    inputs = paged((30, 1, 2, 32, 0, CHUNK + 3), 16, torch.float16, lengths)
    found = run(inputs)
    assert_as_good_as_pytorch(*found, inputs, is_causal=True)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0)).tolist()
    out, lse = run(part(inputs, order, slice(None), [lengths[b] for b in order]))
    assert_same((out, lse), (found[0][order], found[1][order]))
    for b in (0, 20):
        out, lse = run(part(inputs, [b], slice(None), [lengths[b]]))
        assert_same((out[0], lse[0]), (found[0][b], found[1][b]))


def test_what_rounds_to_minus_zero_is_zero_alone_too() -> None:
    """Alone it is one chunk's result; among others a sum with that of a chunk that the first query does not see."""
    inputs = contiguous((1, 2, 4, 32, 0, CHUNK + 1), torch.float16, [CHUNK + 1])
    inputs.c_kv.mul_(0.01)
    inputs.c_kv[..., 0] = 0
    inputs.c_kv[0, 0, 0] = -6e-8
    found = run(inputs)
    assert (found[0][0, 0, :, 0] == 0).all()
    assert_alone_as_among_others(inputs, found)


@pytest.mark.parametrize("is_causal", [False, True])
def test_left_padding_moves_no_bit(is_causal: bool) -> None:
    """Up to all of the keys; those after the padding are the same."""
    shape, pads = (4, 2, 7, 64, 16, 350), [0, 1, 200, 350]
    inputs = with_leftpad(contiguous(shape, torch.float16, [CHUNK + 90, 170, 340, 350]), pads)
    found = run(inputs, is_causal)
    assert_as_good_as_pytorch(*found, inputs, is_causal)
    for b, (length, pad) in enumerate(zip(inputs.lengths(), pads, strict=True)):
        moved = replace(part(inputs, [b], slice(None), [max(length - pad, 0)]), leftpad_kv=None)
        moved = replace(moved, c_kv=moved.c_kv[:, pad:], k_rope=moved.k_rope[:, pad:])
        out, lse = run(moved, is_causal)
        assert_same((out[0], lse[0]), (found[0][b], found[1][b]))


@pytest.mark.parametrize("parts", [1, 5])
def test_any_number_of_programs(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of rounds: a workspace that holds few chunks, and one that holds all."""
    lengths = [2 * CHUNK, 3, 0, 3 * CHUNK + 1, CHUNK + 1, 1, CHUNK, 500]
    inputs = paged((len(lengths), 1, 4, 32, 0, max(lengths)), 64, torch.float16, lengths)
    wanted = run(inputs)
    assert_as_good_as_pytorch(*wanted, inputs, is_causal=True)
    monkeypatch.setattr(decode_launch, "choose_parts", lambda *_: parts)
    for most, rounds in ((1 << 30, 1), (9 * 4 * 32 * 2, 8), (30 * 4 * 32 * 2, 2)):
        monkeypatch.setattr(decode_layout, "_known", {})
        monkeypatch.setattr(invariant, "workspace_bytes", lambda _, most=most: most)
        assert_same(run(inputs), wanted)
        (known,) = decode_layout._known.values()
        assert len(known.kept[invariant.kept_as(CHUNK)].rounds) == rounds


def size_of(chunk: int) -> int:
    """In CHUNK keys."""
    return 1 if chunk < 32 else 2 if chunk < 80 else 4


def first_of(chunk: int) -> int:
    """The first key of a chunk."""
    return CHUNK * sum(size_of(n) for n in range(chunk))


def plan(
    lengths: list[int], parts: int, begin: int, size: int, *, is_only_round: bool
) -> tuple[list[list[int]], list[list[int]]]:
    """The list of sequences, and the numbers of each part."""
    batch = len(lengths)
    numbers = torch.full((2 * batch + NUMBERS * parts,), -1, dtype=torch.int32, device=DEVICE)
    plan_chunks_kernel[(parts,)](
        numbers,
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        None,
        batch=batch,
        capacity=2**30,
        num_parts=parts,
        begin=begin,
        size=size,
        CHUNK=CHUNK,
        SINGLE_ROUND=is_only_round,
        DEPENDENT=False,
    )
    listed, of_parts = numbers[: 2 * batch].view(batch, 2), numbers[2 * batch :]
    return listed.tolist(), of_parts.view(parts, NUMBERS).tolist()


def check_rounds(draw: random.Random) -> None:
    """Every chunk has one part of one round, and in that round its own slot.

    No part is longer than the best of the divisions that ``_shares`` tries allows.
    """
    batch, most = draw.choice([1, 3, 40, 255, 257]), draw.choice([1, 2, 30, 300])
    lengths = [draw.choice([0, 1, CHUNK, CHUNK + 1, draw.randrange(CHUNK * most + 1)]) for _ in range(batch)]
    counts = [most_chunks(length, CHUNK) for length in lengths]
    parts = draw.choice([1, 2, 13, 200])
    rounds = draw.choice([1, 3, 7])
    size = -(-batch * max(counts) // rounds)
    slots = size + max(counts) + (size + max(counts)) % 2
    seen: list[list[int]] = [[] for _ in lengths]
    for begin in range(0, batch * max(counts), size):
        listed, of_parts = plan(lengths, parts, begin, size, is_only_round=rounds == 1)
        starts = [sum(counts[:b]) for b in range(batch)]
        in_round = [begin <= at < begin + size for at in starts]
        assert [count for _, count in listed] == [n if held else 0 for n, held in zip(counts, in_round, strict=True)]
        largest = CHUNK // TILE * size_of(max(counts) - 1)
        tiles_of_all = [-(-max(n, 1) // TILE) for n, held in zip(lengths, in_round, strict=True) if held]
        longest = -(-sum(tiles_of_all) // parts) + largest - 1
        if rounds == 1:
            for grain in (CHUNK // TILE, 2 * CHUNK // TILE, 4 * CHUNK // TILE):
                if grain == CHUNK // TILE or grain >= largest:
                    shares = sum(-(-n // grain) for n in tiles_of_all)
                    longest = min(longest, -(-shares // parts) * grain + max(largest - grain, 0))
        for first, last, slot, start, end in of_parts:
            tiles = 0
            for b in range(first, last):
                chunks = range(max(start - slot, 0), min(end - slot, counts[b]))
                seen[b] += chunks
                if chunks:
                    assert listed[b] == [slot, counts[b]]
                    assert 0 <= slot <= slot + counts[b] <= slots
                tiles += sum(-(-max(min(CHUNK * size_of(n), lengths[b] - first_of(n)), 1) // TILE) for n in chunks)
                slot += counts[b]
            assert tiles <= longest
    assert [sorted(chunks) for chunks in seen] == [list(range(count)) for count in counts]


@pytest.mark.parametrize(
    ("chunks", "parts", "expected"),
    [
        ([1.1, 1.1, 0.1, 1.1], 7, [1, 1, 1, 1, 1, 1, 1]),
        ([1.1, 0.5, 2.1, 0], 4, [2, 2, 2, 1]),
        ([40], 21, [2] * 16 + [1] * 4 + [0]),  # the last four have 2 * CHUNK keys
    ],
)
def test_parts_of_up_to_two_chunks_are_whole_ones(chunks: list[float], parts: int, expected: list[int]) -> None:
    lengths = [round(CHUNK * n) for n in chunks]
    most = sum(most_chunks(n, CHUNK) for n in lengths)
    _, of_parts = plan(lengths, parts, 0, most, is_only_round=True)
    assert [end - start for *_, start, end in of_parts] == expected


@pytest.mark.parametrize(("tiles", "is_rounded"), [(2**27 - 2, True), (2**27, False)])
def test_sequences_are_rounded_as_long_as_int32_holds_them(tiles: int, is_rounded: bool) -> None:
    """Of one chunk of 2 tiles each; rounded up to four chunks they would be 2^29 tiles."""
    shares = Program((1,), (0,), 0).translated(invariant_plan._shares)
    given = map(as_value, (tiles, 2, tiles, 2 * tiles, 4 * tiles, 132))
    divided, grain, share = (int(x) for x in shares(*given, CHUNK))
    assert (divided, grain) == (tiles, 2 if is_rounded else 1)
    assert share == (-(-tiles // 2 // 132) * 2 if is_rounded else 0)


def test_a_plan_of_as_many_tiles_as_int32_counts() -> None:
    """Tiles times parts are more."""
    lengths, parts = [2**25 - 3] * 64, 132
    chunks = most_chunks(lengths[0], CHUNK) * len(lengths)
    _, of_parts = plan(lengths, parts, 0, chunks, is_only_round=True)
    starts, ends = [start for *_, start, _ in of_parts], [end for *_, end in of_parts]
    assert [0, *ends] == [*starts, chunks]
    assert max(end - start for start, end in zip(starts, ends, strict=True)) <= -(-chunks // parts) + 90


@pytest.mark.parametrize("seed", range(6))
def test_rounds_and_parts_hold_every_chunk_once(seed: int) -> None:
    check_rounds(random.Random(seed))


@pytest.mark.gpu
def test_two_hundred_plans_on_a_gpu() -> None:
    draw = random.Random(200)
    for _ in range(200):
        check_rounds(draw)


def test_heads_decide_about_the_tile_and_the_rest_does_not() -> None:
    """The blocks of the sum may differ: it adds chunk after chunk."""
    shapes = [(1, 1, 16, 300), (7, 8, 16, 5000), (1, 8, 16, 300), (3, 1, 128, 300), (2, 4, 128, 70000)]
    found: dict[int, set[tuple[object, ...]]] = {}
    for batch, seqlen_q, heads, keys in shapes:
        q = torch.empty(batch, seqlen_q, heads, 64, dtype=torch.float16, device=DEVICE)
        row = torch.empty(1, 1, 80, dtype=torch.float16, device=DEVICE).expand(batch, keys, 80)
        launches = invariant.make_launches(DecodeTensors(q, q[..., :16], row[..., :64], row[..., 64:], 1.0), CHUNK)
        _, attend, combine = launches.rounds[0]
        assert combine is not None
        names = attend.kernel.arg_names[len(attend.given) :]
        constants = dict(zip(names, attend.arguments, strict=True))
        kept = (constants["BLOCK_M"], constants["BLOCK_N"], constants["CHUNK"], constants["HOPPER"])
        kept += (attend.options["num_warps"],)
        found.setdefault(heads, set()).add(kept)
        assert attend.options["enable_fp_fusion"] is combine.options["enable_fp_fusion"] is False
    assert [len(kept) for kept in found.values()] == [1, 1]


@triton.jit
def _chunks_kernel(Units, Counts, First, size, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.arange(0, BLOCK)
    tl.store(Counts + n, chunks_from(tl.load(Units + n, mask=n < size, other=0)), mask=n < size)
    tl.store(First + n, first_key(n, CHUNK), mask=n < size)


def test_chunks_grow_and_are_counted_alike_everywhere() -> None:
    """On the device, by the host, and by adding up their sizes: 32 of CHUNK keys, 48 of 2 * CHUNK, then 4 * CHUNK."""
    first, chunk = [0], 0
    while len(first) < 400:
        first.append(first[-1] + CHUNK * size_of(chunk))
        chunk += 1
    units = torch.arange(400, dtype=torch.int32, device=DEVICE)
    counts, found = torch.empty_like(units), torch.empty_like(units)
    _chunks_kernel[(1,)](units, counts, found, 400, CHUNK, 512)
    assert found.tolist() == first
    assert counts.tolist() == [sum(at < CHUNK * n for at in first) for n in range(400)]
    assert counts.tolist()[1:] == [most_chunks(CHUNK * n, CHUNK) for n in range(1, 400)]
    assert [most_chunks(keys, CHUNK) for keys in (0, 1, CHUNK + 1)] == [1, 1, 2]


def test_results_of_any_block_sizes_of_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch chooses them by the rows of the batch, the capacity and the rounds."""
    inputs = paged((2, 2, 3, 64, 16, 5 * CHUNK), 16, torch.float16, [5 * CHUNK, CHUNK + 1])
    found = []
    for sizes in ((1, 64, 32), (1, 128, 8), (1, 256, 8), (1, 512, 4), (4, 512, 4), (8, 32, 1)):
        monkeypatch.setattr(decode_layout, "_known", {})
        monkeypatch.setattr(invariant, "combine_sizes", lambda *_, sizes=sizes: sizes)
        found.append(run(inputs))
        assert_same(found[-1], found[0])
    assert_as_good_as_pytorch(*found[0], inputs, is_causal=True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((64, 200, 1), (1, 64, 32)),
        ((65, 200, 1), (1, 128, 8)),
        ((512, 2, 1), (1, 128, 8)),
        ((513, 40, 1), (1, 256, 8)),
        ((4096, 41, 1), (1, 128, 8)),
        ((4097, 200, 1), (1, 512, 4)),
        ((16, 200, 2), (4, 512, 4)),
    ],
    ids=str,
)
def test_sizes_of_the_sum(given: tuple[int, int, int], expected: tuple[int, int, int]) -> None:
    """Rows, columns and chunks, as they were measured; given are rows of the batch, chunks and rounds."""
    assert combine_sizes(*given) == expected


@pytest.mark.parametrize("memory", [0, 141 << 30])
def test_more_memory_means_fewer_rounds(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = decode_launch.Device("Hopper", 8, False, False, "fields", memory=memory)
    monkeypatch.setattr(decode_launch, "device_of", lambda _: device)
    q = torch.empty(256, 1, 128, 576, dtype=torch.float16, device=DEVICE)
    row = torch.empty(1, 1, 576, dtype=torch.float16, device=DEVICE).expand(256, 8192, 576)
    launches = invariant.make_launches(
        DecodeTensors(q[..., :512], q[..., 512:], row[..., :512], row[..., 512:], 1.0), 256
    )
    assert len(launches.rounds) == (1 if memory else 3)


@pytest.mark.parametrize("block", [(1, 32, 1), (4, 64, 32), (8, 512, 4)])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_the_sum_over_chunks(is_mixed: bool, block: tuple[int, int, int]) -> None:
    """Of sequences of 2 to 80 chunks, some of which a row does not see, against float64."""
    counts, heads, seqlen_q, rank = [2, 80, 17, 3], 2, 3, 128
    rows, slots, generator = heads * seqlen_q, sum(counts), torch.Generator().manual_seed(1)
    parts = torch.randn(slots, rows, rank, generator=generator).half()
    lse_log2 = 8 * torch.randn(slots, rows, generator=generator)
    lse_log2[torch.rand(slots, rows, generator=generator) < 0.2] = -torch.inf
    lse_log2[slots - counts[-1] :, -1] = -torch.inf  # a row that sees nothing
    lse_log2[counts[0] + 70, 0] = 300.0  # the maximum, found in a later step than the first
    parts[lse_log2 == -torch.inf] = 0
    firsts = [sum(counts[:b]) for b in range(len(counts))]
    listed = torch.tensor(list(zip(firsts, counts, strict=True)), dtype=torch.int32, device=DEVICE)
    stored = mixed(parts) if is_mixed else parts
    workspace = torch.cat([stored.flatten(), lse_log2.flatten().view(torch.float16)]).to(DEVICE)
    out = torch.full((len(counts), seqlen_q, heads, rank), torch.nan, dtype=torch.float16, device=DEVICE)
    lse = torch.full((len(counts), heads, seqlen_q), torch.nan, device=DEVICE)
    columns = min(rank, block[1])
    combine_chunks_kernel[(len(counts) * -(-rows // block[0]), rank // columns)](
        workspace,
        listed,
        out,
        lse,
        num_heads=heads,
        seqlen_q=seqlen_q,
        slots=slots,
        R=rank,
        BLOCK_ROWS=block[0],
        BLOCK_R=columns,
        BLOCK_CHUNKS=block[2],
        MIXED=is_mixed,
        DEPENDENT=False,
        enable_fp_fusion=False,
    )
    for b, (first, count) in enumerate(zip(firsts, counts, strict=True)):
        of_chunks = lse_log2[first : first + count].double()
        total = torch.logsumexp(of_chunks * math.log(2), 0)
        weights = torch.exp(of_chunks * math.log(2) - total).nan_to_num(0.0)
        wanted = (weights[..., None] * parts[first : first + count].double()).sum(0).view(seqlen_q, heads, rank)
        torch.testing.assert_close(out[b].cpu().double(), wanted, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(lse[b].cpu().double(), total.view(seqlen_q, heads).T, rtol=1e-5, atol=1e-4)


def test_a_chunk_is_whole_tiles_of_every_entry_of_the_table() -> None:
    tiles = [tile for entries in DECODE.values() for _, tile in entries]
    assert all(chunk % tile.block_n == 0 for chunk in CHUNKS for tile in tiles)
    assert all(chunk % (2 * hopper_rule.TILE) == 0 for chunk in CHUNKS)  # the first tile of each is in stage 0


def test_chunks_of_another_size_are_launches_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one process, of the same layout."""
    inputs = paged((2, 1, 2, 32, 0, 4 * CHUNK), 64, torch.float16, [4 * CHUNK, CHUNK + 1])
    found = {}
    for chunk in (CHUNK, 2 * CHUNK, CHUNK):
        monkeypatch.setenv("MLA_PLUGIN_BATCH_INVARIANT_CHUNK", str(chunk))
        results = run(inputs)
        assert_as_good_as_pytorch(*results, inputs, is_causal=False)
        assert_same(results, found.setdefault(chunk, results))
    (known,) = decode_layout._known.values()
    assert {invariant.kept_as(chunk) for chunk in found} <= known.kept.keys()


def test_a_capacity_that_int32_cannot_count_is_refused() -> None:
    with pytest.raises(ValueError, match="up to 2147483600 keys, expected at most 2147450880"):
        limits.count_tiles(1, 2147483600, CHUNK)
    q = torch.empty(200, 1, 2, 64, dtype=torch.float16, device=DEVICE)
    row = torch.empty(1, 1, 80, dtype=torch.float16, device=DEVICE).expand(200, 2**30, 80)
    with pytest.raises(ValueError, match="200"):
        invariant.make_launches(DecodeTensors(q, q[..., :16], row[..., :64], row[..., 64:], 1.0), CHUNK)


@pytest.mark.parametrize("batch", [1, 64, 256])
@pytest.mark.parametrize("capacity", [1, CHUNK, 6000, 128 << 10, 4 << 20])
@pytest.mark.parametrize("slot_bytes", [2, 16 << 10, 128 << 10, 1 << 20])
@pytest.mark.parametrize("memory", [0, 24 << 30, 141 << 30])
def test_the_workspace_is_bounded(batch: int, capacity: int, slot_bytes: int, memory: int) -> None:
    """By a share of the memory or by two sequences, and the rounds take every chunk."""
    chunks = most_chunks(capacity, CHUNK)
    most = invariant.workspace_bytes(memory)
    assert most == max(512 << 20, memory // 128)
    rounds, size, slots = invariant.rounds_of(batch, chunks, slot_bytes, most)
    assert slots * slot_bytes <= max(most, 2 * chunks * slot_bytes)
    assert (rounds - 1) * size < batch * chunks <= rounds * size
    assert slots >= (batch * chunks if rounds == 1 else size + chunks)


def test_two_runs_agree_and_other_values_of_one_layout_do_not_share() -> None:
    for seed, lengths in ((0, [CHUNK + 9, 5]), (1, [64, CHUNK + 1]), (2, [0, 1])):
        inputs = paged((2, 1, 4, 64, 16, CHUNK + 9), 16, torch.float16, lengths, seed)
        found = run(inputs)
        assert_as_good_as_pytorch(*found, inputs, is_causal=False)
        assert_same(run(inputs), found)
    assert len(decode_layout._known) == 1
