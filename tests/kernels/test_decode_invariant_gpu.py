"""``batch_invariant`` decode at the sizes of real models, compiled, on a GPU: bits are compared, not numbers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from mla_plugin import DecodeTensors, environment
from mla_plugin.arguments import decode_layout
from mla_plugin.kernels.decode import launch as decode_launch
from mla_plugin.kernels.decode.hopper.kernel import hopper_decode_kernel
from mla_plugin.kernels.decode.invariant import launch as invariant
from tests.kernels.decode_cases import Inputs, assert_as_good_as_pytorch, contiguous, paged, with_leftpad
from tests.kernels.test_decode_gpu import ragged
from tests.kernels.test_decode_invariant import assert_same, part, run

pytestmark = pytest.mark.gpu

CHUNK = environment.batch_invariant_chunk()
HEADS = [1, 8, 16, 24, 32, 48, 64, 96, 128]


def alone(inputs: Inputs, b: int, i: int) -> Inputs:
    """Query ``i`` of sequence ``b`` by itself, with a wider page table."""
    last = inputs.q_nope_abs.shape[1] - 1
    return part(inputs, [b], slice(i, i + 1), [max(inputs.lengths()[b] - (last - i), 0)], wider=100)


def assert_queries_alone(inputs: Inputs, sequences: list[int]) -> None:
    out, lse = run(inputs)
    assert_as_good_as_pytorch(out, lse, inputs, is_causal=True)
    for b in sequences:
        for i in range(inputs.q_nope_abs.shape[1]):
            found = run(alone(inputs, b, i))
            assert_same((out[b, i], lse[b, :, i]), (found[0][0, 0], found[1][0, :, 0]))


LENGTHS = [CHUNK, 0, 2 * CHUNK + 1, 1, 5000, CHUNK - 1, 4 * CHUNK, 4 * CHUNK + 3, 64, 65, 7]
FARTHEST = CHUNK * (32 + 2 * 48)  # from here on chunks are largest


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("page_size", [0, 1, 16, 64, 256])
@pytest.mark.parametrize("heads", HEADS)
def test_queries_alone_and_among_others(heads: int, page_size: int, dtype: torch.dtype) -> None:
    """Two to eight queries: the tile at the end of what all rows see differs from that of a single query."""
    seqlen_q = {8: 8, 16: 4, 24: 3, 32: 5}.get(heads, 2)
    shape = (len(LENGTHS), seqlen_q, heads, 512, 64, max(LENGTHS))
    inputs = paged(shape, page_size, dtype, LENGTHS) if page_size else contiguous(shape, dtype, LENGTHS)
    assert_queries_alone(inputs, list(range(len(LENGTHS))))


@pytest.mark.parametrize("rank", [(256, 32), (96, 16), (512, 0), (320, 64)])
@pytest.mark.parametrize("heads", [16, 40, 128])
def test_other_widths(heads: int, rank: tuple[int, int]) -> None:
    inputs = paged((4, 3, heads, *rank, 1300), 64, torch.bfloat16, [1300, CHUNK + 1, 2, 2 * CHUNK])
    assert_queries_alone(inputs, [0, 1, 2, 3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", HEADS)
def test_every_page_size_and_a_contiguous_cache(heads: int, dtype: torch.dtype) -> None:
    lengths = [3000, CHUNK, 2 * CHUNK + 64, 1]
    shape = (4, 1, heads, 512, 64, 3000)
    wanted = run(contiguous(shape, dtype, lengths))
    for page_size in (1, 7, 16, 32, 64, 128, 256):
        assert_same(run(paged(shape, page_size, dtype, lengths)), wanted)


@pytest.mark.parametrize("heads", [16, 24, 128])
@pytest.mark.parametrize("batch", [2, 33, 256])
def test_batches_of_all_sizes(batch: int, heads: int) -> None:
    """A sequence alone, in another place, and among fewer."""
    draw = random.Random(batch)
    lengths = [draw.choice([0, 1, CHUNK, draw.randrange(2000)]) for _ in range(batch)]
    lengths[batch // 2] = 9000
    inputs = ragged(lengths, 1, heads, 64, batch)
    found = run(inputs)
    for few in ([batch // 2], [batch - 1, 0], draw.sample(range(batch), batch // 2), list(range(batch))[::-1]):
        got = run(part(inputs, few, slice(None), [lengths[b] for b in few], wider=3000))
        assert_same(got, (found[0][few], found[1][few]))


@pytest.mark.parametrize("heads", [16, 128])
def test_any_number_of_programs_and_rounds(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = ragged([3000, 17, 0, 9000, CHUNK, 700, 2000] * 5, 1, heads, 64, 0)
    wanted = run(inputs)
    choose = decode_launch.choose_parts
    for factor, most in ((0.01, 512 << 20), (0.5, 512 << 20), (3, 8 << 20), (1, 1 << 20)):
        monkeypatch.setattr(decode_layout, "_known", {})
        monkeypatch.setattr(
            decode_launch, "choose_parts", lambda *given, factor=factor: int(choose(*given) * factor) + 1
        )
        monkeypatch.setattr(invariant, "workspace_bytes", lambda _, most=most: most)
        assert_same(run(inputs), wanted)


@pytest.mark.parametrize("heads", [16, 40, 128])
def test_left_padding_moves_no_bit(heads: int) -> None:
    pads = [0, 1, 100, 1000, 700, 800]
    lengths = [2000, 1999, 700, 1001, 700, 700]
    inputs = with_leftpad(contiguous((6, 2, heads, 512, 64, 2000), torch.bfloat16, lengths), pads)
    out, lse = run(inputs)
    assert_as_good_as_pytorch(out, lse, inputs, is_causal=True)
    for b, (length, pad) in enumerate(zip(inputs.lengths(), pads, strict=True)):
        moved = replace(part(inputs, [b], slice(None), [max(length - pad, 0)]), leftpad_kv=None)
        moved = replace(moved, c_kv=moved.c_kv[:, pad:], k_rope=moved.k_rope[:, pad:])
        found = run(moved)
        assert_same((found[0][0], found[1][0]), (out[b], lse[b]))


@pytest.mark.parametrize("seqlen_q", [1, 4])
@pytest.mark.parametrize("heads", [16, 128])
def test_a_captured_graph_gives_the_bits_of_a_call(heads: int, seqlen_q: int) -> None:
    """Of another batch, too, in the same memory."""
    shape = (4, seqlen_q, heads, 512, 64, 4096)
    inputs = paged(shape, 64, torch.bfloat16, [4096, 3000, 64, 1])
    run(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run(inputs)
    for lengths, seed in (([4096, 3000, 64, 1], 0), ([5, 0, 4095, CHUNK], 1), ([CHUNK + 1, 1, 1, 1], 2)):
        other = paged(shape, 64, torch.bfloat16, lengths, seed)
        for name in ("q_nope_abs", "q_rope", "c_kv", "k_rope", "page_table", "seqlens_kv"):
            getattr(inputs, name).copy_(getattr(other, name))
        out.fill_(torch.nan)
        graph.replay()
        assert_same((out, lse), run(other))
        for b in range(4):
            found = run(alone(other, b, 0))
            assert_same((out[b, :1], lse[b, :, :1]), (found[0][0], found[1][0]))


@pytest.mark.parametrize("page_size", [0, 1, 64])
@pytest.mark.parametrize("heads", [1, 16, 128])
def test_the_hopper_kernel_runs_where_there_is_one(heads: int, page_size: int) -> None:
    if not decode_launch.device_of(torch.device("cuda", 0)).has_gluon:
        pytest.skip("not run: another GPU than Hopper")
    shape = (2, 1, heads, 512, 64, 300)
    inputs = paged(shape, page_size, torch.bfloat16, [300, 5]) if page_size else contiguous(shape, torch.bfloat16)
    tensors = DecodeTensors(*inputs.tensors(), 1.0, False, True, inputs.page_table, inputs.seqlens_kv)
    (launches,) = invariant.make_launches(tensors, CHUNK).rounds
    assert launches.attend.kernel is hopper_decode_kernel


@pytest.mark.parametrize("heads", [8, 40])
def test_sequences_that_share_one_cache(heads: int) -> None:
    """Of batch stride 0: they are gathered, since no descriptor is made for such a stride."""
    inputs = contiguous((3, 2, heads, 512, 64, 700), torch.bfloat16, [700, CHUNK, 0])
    copied = {name: getattr(inputs, name)[:1].repeat(3, 1, 1) for name in ("c_kv", "k_rope")}
    wanted = run(replace(inputs, **copied))
    shared = replace(inputs, **{name: x[:1].expand(3, -1, -1) for name, x in copied.items()})
    assert_same(run(shared), wanted)
    for b, length in enumerate(inputs.lengths()):
        alone_b = replace(part(shared, [b], slice(None), [length]), **{n: x[:1] for n, x in copied.items()})
        found = run(alone_b)
        assert_same((found[0][0], found[1][0]), (wanted[0][b], wanted[1][b]))


@pytest.mark.parametrize("heads", [8, 24, 128])
def test_chunks_of_every_size(heads: int) -> None:
    """Sequences that end where chunks begin to be larger, and around the ends of larger ones."""
    ends = (CHUNK * 32, CHUNK * 34, FARTHEST, FARTHEST + 4 * CHUNK)
    lengths = [length + more for length in ends for more in (-1, 0, 1, 65)]
    inputs = ragged(lengths, 2, heads, 64, 3)
    assert_queries_alone(inputs, list(range(len(lengths))))


@pytest.mark.parametrize("heads", [12, 16, 24])
def test_queries_as_they_lie_give_the_bits_of_contiguous_ones(heads: int) -> None:
    """Head-major ones, which are copied for 12 heads, and ones that do not start on 16 bytes, which always are."""
    inputs = paged((3, 2, heads, 512, 64, 900), 64, torch.bfloat16, [900, CHUNK, 1])
    wanted = run(inputs)
    by_head = replace(inputs, q_nope_abs=inputs.q_nope_abs.transpose(1, 2).contiguous().transpose(1, 2))
    shifted = torch.empty(inputs.q_rope.numel() + 1, dtype=torch.bfloat16, device="cuda")[1:].view_as(inputs.q_rope)
    for other in (by_head, replace(inputs, q_rope=shifted.copy_(inputs.q_rope))):
        assert_same(run(other), wanted)


def test_a_hundred_random_ragged_batches() -> None:
    """Against float64, and one sequence of each alone."""
    draw = random.Random(7)
    for seed in range(100):
        batch, seqlen_q = draw.choice([1, 2, 7, 40, 140]), draw.choice([1, 1, 2, 3])
        top = draw.choice([5, 300, 1500])
        lengths = [draw.choice([0, 1, CHUNK, CHUNK + 1, draw.randrange(top + 1)]) for _ in range(batch)]
        inputs = ragged(lengths, seqlen_q, draw.choice(HEADS), draw.choice([1, 16, 64]), seed)
        assert_queries_alone(inputs, [draw.randrange(batch)])


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.large_memory(8)
def test_a_cache_of_more_than_2_31_elements(heads: int) -> None:
    """Pages at both ends of it."""
    inputs = paged((1, 1, heads, 512, 64, 1024), 64, torch.bfloat16, [1024])
    cache = torch.full((2**31 // (64 * 576) + 100, 64, 576), torch.nan, dtype=torch.bfloat16, device="cuda")
    scattered = torch.linspace(0, len(cache) - 1, 16, device="cuda").long()
    cache[scattered] = inputs.tokens[0].view(16, 64, 576)
    far = replace(inputs, c_kv=cache[..., :512], k_rope=cache[..., 512:], page_table=scattered.int()[None])
    assert_same(run(far), run(inputs))
