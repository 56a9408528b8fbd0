"""The decode kernels at the sizes of real models, compiled, on a GPU."""

import random
from dataclasses import replace

import pytest
import torch
import triton

from mla_plugin.arguments import decode_layout
from mla_plugin.kernels import mla_decode_attention
from mla_plugin.kernels.decode import launch as decode_launch
from mla_plugin.kernels.decode import run as decode_run
from mla_plugin.kernels.decode import tiles as decode_tiles
from mla_plugin.kernels.decode.plan import FEW_SEQUENCES
from tests.kernels.decode_cases import Inputs, as_engines_have_it, assert_as_good_as_pytorch, contiguous, paged

pytestmark = pytest.mark.gpu

MODELS = {
    "deepseek_tp8": (3, 1, 16, 512, 64, 1500),
    "deepseek": (2, 1, 128, 512, 64, 2100),
    "deepseek_speculative": (2, 4, 128, 512, 64, 1100),
    "deepseek_tp8_speculative": (2, 3, 16, 512, 64, 700),
    "seven_heads": (2, 2, 7, 512, 64, 333),
    "one_head": (2, 1, 1, 512, 64, 333),
    "twenty_heads": (2, 1, 20, 512, 64, 333),
    "minicpm3": (2, 1, 40, 256, 32, 1333),
    "small": (2, 1, 128, 128, 64, 1333),
    "no_rope": (2, 1, 16, 512, 0, 1333),
    "tiny": (2, 1, 64, 64, 16, 1333),
}


def run(inputs: Inputs, is_causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return mla_decode_attention(*inputs.tensors(), is_causal=is_causal, return_lse=True, **inputs.options())


def check(inputs: Inputs, is_causal: bool) -> None:
    assert_as_good_as_pytorch(*run(inputs, is_causal), inputs, is_causal)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
def test_models(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(contiguous(shape, dtype), is_causal=True)
    lengths = [shape[-1], 1, 130][: shape[0]]
    check(contiguous(shape, dtype, lengths), is_causal=False)


@pytest.mark.parametrize("page_size", [1, 7, 16, 64, 256])
@pytest.mark.parametrize("name", ["deepseek_tp8", "deepseek", "deepseek_speculative", "minicpm3"])
def test_paged_models(name: str, page_size: int) -> None:
    shape = MODELS[name]
    check(paged(shape, page_size, torch.bfloat16, [shape[-1], 65, 0][: shape[0]]), is_causal=True)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize(
    ("heads", "seqlen_q"), [(16, 4), (16, 7), (24, 3), (48, 2), (96, 2), (128, 2), (2, 40), (12, 3)]
)
def test_queries_of_several_tokens_as_engines_have_them(heads: int, seqlen_q: int, page_size: int) -> None:
    """Their rows have no common stride; those of 12 heads are copied."""
    for dtype in (torch.bfloat16, torch.float16):
        inputs = paged((5, seqlen_q, heads, 512, 64, 1500), page_size, dtype, [1500, 0, seqlen_q + 1, 65, 1300])
        check(as_engines_have_it(inputs), is_causal=True)
        wider = torch.full((seqlen_q, heads + 3, 5, 520), torch.nan, dtype=dtype, device="cuda")
        between = wider.permute(2, 0, 1, 3)[:, :, 1:-2, :512].copy_(inputs.q_nope_abs)  # strides no multiples of others
        check(replace(inputs, q_nope_abs=between), is_causal=False)


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("heads", [16, 128])
def test_pieces_that_the_device_chooses(batch: int, heads: int) -> None:
    lengths = [4096 - 61 * b for b in range(batch)]
    check(paged((batch, 1, heads, 512, 64, 4096), 64, torch.bfloat16, lengths), is_causal=False)


@pytest.mark.parametrize("page_size", [1, 48])
@pytest.mark.parametrize("seqlen_q", [1, 2])
def test_gathered_tiles_of_a_large_batch(seqlen_q: int, page_size: int) -> None:
    """600 * 36 tiles of 32 keys: enough on any Hopper GPU, which has at most 144 multiprocessors of two programs."""
    lengths = [(37 * b) % 1153 for b in range(600)]
    inputs = paged((600, seqlen_q, 8, 512, 64, 1152), page_size, torch.bfloat16, lengths)
    check(inputs, is_causal=True)
    if torch.cuda.get_device_capability() == (9, 0):
        tile = decode_tiles.tile_for("Hopper", 2, 576, 16)
        assert decode_tiles.for_batch(tile, page_size, 600, 1152, 288).block_n == 64


@pytest.mark.parametrize(
    ("batch", "length", "heads"), [(64, 2048, 128), (128, 2048, 32), (256, 1024, 8), (64, 4352, 32), (64, 2000, 32)]
)
def test_equal_lengths(batch: int, length: int, heads: int) -> None:
    """With 132 multiprocessors parts of the first four become longer, so that a sequence is one part, or half of it."""
    check(paged((batch, 1, heads, 512, 64, length), 64, torch.bfloat16, [length] * batch), is_causal=False)


@pytest.mark.parametrize("more", [[], [77]])
@pytest.mark.parametrize("heads", [16, 128])
def test_a_captured_graph_follows_lengths_and_pages(heads: int, more: list[int]) -> None:
    """The host reads neither: a replay with others in the same memory gives what a fresh call gives.

    Of four sequences, and of five, for which a kernel plans.
    """
    shape = (4 + len(more), 1, heads, 512, 64, 4096)
    inputs = paged(shape, 64, torch.bfloat16, [4096, 3000, 64, 1, *more])
    run(inputs, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run(inputs, True)
    for lengths, seed in (([4096, 3000, 64, 1], 0), ([5, 0, 4095, 1000], 1), ([1, 1, 1, 1], 2)):
        other = paged(shape, 64, torch.bfloat16, [*lengths, *more], seed)
        inputs.q_nope_abs.copy_(other.q_nope_abs)
        inputs.q_rope.copy_(other.q_rope)
        inputs.c_kv.copy_(other.c_kv)
        inputs.k_rope.copy_(other.k_rope)
        inputs.page_table.copy_(other.page_table)
        inputs.seqlens_kv.copy_(other.seqlens_kv)
        graph.replay()
        assert_as_good_as_pytorch(out, lse, other, is_causal=True)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.large_memory(8)
def test_a_cache_of_more_than_2_31_elements(heads: int, page_size: int) -> None:
    """The sequence's pages lie at both ends of it."""
    inputs = paged((1, 1, heads, 512, 64, 1024), page_size, torch.bfloat16, [1024])
    pages = 2**31 // (page_size * 576) + 100
    cache = torch.full((pages, page_size, 576), torch.nan, dtype=torch.bfloat16, device="cuda")
    assert cache.numel() > 2**31
    used = 1024 // page_size
    scattered = torch.linspace(0, pages - 1, used, device="cuda").long()
    cache[scattered] = inputs.tokens[0].view(used, page_size, 576)
    page_table = scattered.int()[None]
    found = mla_decode_attention(
        inputs.q_nope_abs,
        inputs.q_rope,
        cache[..., :512],
        cache[..., 512:],
        softmax_scale=inputs.softmax_scale,
        page_table=page_table,
        seqlens_kv=inputs.seqlens_kv,
        return_lse=True,
    )
    assert_as_good_as_pytorch(*found, inputs, is_causal=False)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.large_memory(16)
def test_a_contiguous_cache_of_more_than_2_31_elements(heads: int) -> None:
    inputs = contiguous((2, 1, heads, 512, 64, 300), torch.bfloat16)
    rows = 2**31 // 576 + 100
    cache = torch.zeros((2, rows, 576), dtype=torch.bfloat16, device="cuda")[:, -300:]
    cache.copy_(inputs.tokens)
    found = mla_decode_attention(
        inputs.q_nope_abs,
        inputs.q_rope,
        cache[..., :512],
        cache[..., 512:],
        softmax_scale=inputs.softmax_scale,
        return_lse=True,
    )
    assert_as_good_as_pytorch(*found, inputs, is_causal=False)


def ragged(lengths: list[int], seqlen_q: int, heads: int, page_size: int, seed: int) -> Inputs:
    """What ``paged`` gives, drawn on the device: NaN after each length, entries that are not read are no pages."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device="cuda", dtype=torch.bfloat16)

    batch, pages_each = len(lengths), -(-max(*lengths, 1) // page_size)
    seqlens_kv = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    cache = draw(batch * pages_each, page_size, 576)
    order = torch.randperm(batch * pages_each, generator=generator, device="cuda").view(batch, pages_each)
    tokens = cache[order].view(batch, -1, 576)
    unseen = torch.arange(tokens.shape[1], device="cuda") >= seqlens_kv[:, None]
    cache[order] = tokens.masked_fill(unseen[..., None], torch.nan).view(batch, pages_each, page_size, 576)
    unused = torch.arange(pages_each, device="cuda") * page_size >= seqlens_kv[:, None]
    return Inputs(
        q_nope_abs=draw(batch, seqlen_q, heads, 512),
        q_rope=draw(batch, seqlen_q, heads, 64),
        c_kv=cache[..., :512],
        k_rope=cache[..., 512:],
        tokens=tokens,
        softmax_scale=576**-0.5,
        page_table=order.int().masked_fill(unused, 2**30),
        seqlens_kv=seqlens_kv,
    )


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("heads", "seqlen_q"), [(16, 1), (24, 2), (128, 1)])
def test_a_hundred_random_ragged_batches(heads: int, seqlen_q: int, page_size: int) -> None:
    """Of each kind, 900 in all: empty sequences, of a key, of whole tiles and pages, one much longer than all."""
    draw = random.Random(heads * 1000 + page_size)
    for seed in range(100):
        batch = draw.choice([1, 2, 3, 7, 16, 33, 70])
        top = draw.choice([5, 100, 1000] if batch <= 16 else [64, 300])
        lengths = [draw.choice([0, 1, 32, 64, 65, top, draw.randrange(top + 1)]) for _ in range(batch)]
        if batch <= 16 and draw.random() < 0.3:
            lengths[draw.randrange(batch)] = draw.choice([3000, 9000])
        check(ragged(lengths, seqlen_q, heads, page_size, seed), is_causal=draw.random() < 0.5)


def test_a_hundred_random_batches_of_many_sequences() -> None:
    """More sequences than parts."""
    draw = random.Random(100)
    for seed in range(100):
        lengths = [draw.choice([0, 1, 64, draw.randrange(300)]) for _ in range(draw.choice([140, 300]))]
        lengths[draw.randrange(len(lengths))] = 2000
        check(ragged(lengths, 1, draw.choice([4, 32]), 64, seed), is_causal=False)


@pytest.mark.parametrize("heads", [16, 128])
def test_twenty_runs_agree_bit_for_bit(heads: int) -> None:
    inputs = paged((8, 1, heads, 512, 64, 3000), 64, torch.bfloat16, [3000, 2999, 64, 65, 1, 0, 100, 2000])
    first = run(inputs, False)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(run(inputs, False), first, strict=True))


def test_addresses_that_are_no_multiple_of_16() -> None:
    """After an aligned call of the same layout, so that neither a kernel nor a descriptor of it may be taken."""
    for heads in (16, 128):
        aligned = contiguous((1, 1, heads, 512, 64, 4096), torch.bfloat16)
        check(aligned, is_causal=False)
        buffer = torch.empty(4096 * 576 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(1, 4096, 576)
        buffer.copy_(aligned.tokens)
        out, lse = mla_decode_attention(
            *aligned.tensors()[:2], buffer[..., :512], buffer[..., 512:], return_lse=True, **aligned.options()
        )
        assert_as_good_as_pytorch(out, lse, aligned, is_causal=False)


def test_long_pieces_of_many_heads_read_by_descriptors() -> None:
    device = decode_launch.device_of(torch.device("cuda", torch.cuda.current_device()))
    inputs = paged((2, 1, 128, 512, 64, 40000), 64, torch.bfloat16, [40000, 39999])
    check(inputs, is_causal=False)
    launches = list(decode_layout._known.values())[-1].kept["triton"]
    assert (launches.described is not None) == (device.gpu_class in ("Hopper", "227 KiB"))


@pytest.mark.parametrize(("heads", "batch", "kernels"), [(16, 2, 2), (128, 2, 3), (128, 5, 3)])
def test_the_kernels_are_compiled_together_once_for_all_lengths(
    heads: int, batch: int, kernels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 64 rows the plan is a separate kernel, on Hopper that of more than four sequences."""
    device = decode_launch.device_of(torch.device("cuda", torch.cuda.current_device()))
    if device.gpu_class == "99 KiB" or (device.has_gluon and batch <= FEW_SEQUENCES):
        kernels = 2
    compiled = []
    monkeypatch.setattr(decode_run, "_compiled", set())
    monkeypatch.setattr(decode_layout, "_known", {})
    monkeypatch.setattr(decode_run, "compile_together", lambda calls, device: compiled.append((len(calls), device)))
    for length in (3000, 3005, 3007):  # as many parts
        check(contiguous((batch, 1, heads, 512, 64, length), torch.bfloat16), is_causal=False)
    assert compiled == [(kernels, torch.device("cuda", torch.cuda.current_device()))]
    check(paged((2, 1, heads, 512, 64, 4096), 64, torch.bfloat16, [4096, 7]), is_causal=False)
    assert len(compiled) == 2


def test_what_was_compiled_together_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for the very arguments of the launch, so the launch compiles nothing."""
    shape = (2, 1, 16, 320, 32, 2048)  # of no other test
    met: list[str] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, src, **_: met.append(src.name))
    check(contiguous(shape, torch.bfloat16), is_causal=False)
    assert sorted(met) == ["combine_kernel", "decode_kernel"]


@pytest.mark.peer("a second GPU")
def test_another_device_than_the_current_one() -> None:
    inputs = contiguous((1, 1, 16, 512, 64, 300), torch.bfloat16)
    expected = run(inputs, False)[0].cpu()
    tensors = [x.to("cuda:1") for x in inputs.tensors()]
    assert torch.equal(mla_decode_attention(*tensors, softmax_scale=inputs.softmax_scale).cpu(), expected)


def test_tensors_of_the_cpu_are_refused() -> None:
    tensors = [x.cpu() for x in contiguous((1, 1, 2, 64, 16, 8), torch.bfloat16).tensors()]
    with pytest.raises(ValueError, match=r"on cpu.*CUDA device"):
        mla_decode_attention(*tensors, softmax_scale=0.1)
