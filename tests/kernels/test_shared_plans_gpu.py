"""One plan for all layers of a step on a GPU: CUDA graphs, streams, threads and inference mode."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import mla_plugin
from mla_plugin import DecodeLengths
from tests.kernels.decode_cases import Inputs, assert_as_good_as_pytorch, contiguous, paged
from tests.kernels.recorded import plans, recorded

pytestmark = pytest.mark.gpu

BATCH, CAPACITY = 9, 3000
LENGTHS = [3000, 0, 129, 1, 2048, 2999, 64, 700, 5]
OTHERS = [1, 3000, 3000, 128, 0, 77, 2500, 64, 3000]
HEADS = [8, 16, 128]
KINDS = [(heads, batch_invariant) for heads in HEADS for batch_invariant in (False, True)]


@pytest.fixture(autouse=True)
def _garbage_in_new_memory() -> Iterator[None]:
    """So that a plan that has not been written does not look like the one that was there before."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels launched."""
    return recorded(monkeypatch)


def whole(heads: int, seed: int = 0) -> Inputs:
    """A layer's queries, and a cache whose rows are all numbers."""
    return contiguous((BATCH, 1, heads, 512, 64, CAPACITY), torch.bfloat16, seed=seed)


def tensor(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def decode(
    inputs: Inputs, lengths: DecodeLengths | torch.Tensor, batch_invariant: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    options = inputs.options() | {"seqlens_kv": lengths, "backend": "triton", "return_lse": True}
    cache = (inputs.c_kv, inputs.k_rope)
    found = mla_plugin.decode(*inputs.tensors()[:2], cache, batch_invariant=batch_invariant, **options)
    assert isinstance(found, tuple)
    return found


def check(inputs: Inputs, values: list[int], found: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert_as_good_as_pytorch(*found, replace(inputs, seqlens_kv=tensor(values)), is_causal=False)


@pytest.mark.parametrize(("heads", "batch_invariant"), KINDS)
def test_the_same_bits_as_alone(heads: int, batch_invariant: bool, launched: list[str]) -> None:
    lengths = DecodeLengths(seqlens_kv=tensor(LENGTHS))
    for page_size in (0, 1, 64):
        for seed in range(3):
            inputs = whole(heads, seed)
            if page_size:
                shape = (BATCH, 1, heads, 512, 64, CAPACITY)
                inputs = paged(shape, page_size, torch.bfloat16, LENGTHS, seed)
            found, alone = (decode(inputs, given, batch_invariant) for given in (lengths, tensor(LENGTHS)))
            check(inputs, LENGTHS, found)
            assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))
        launched.clear()
        decode(inputs, lengths, batch_invariant)
        assert not plans(launched)


def captured(
    layers: list[Inputs], lengths: DecodeLengths, batch_invariant: bool, pool: object = None
) -> tuple[torch.cuda.CUDAGraph, list[tuple[torch.Tensor, torch.Tensor]]]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        found = [decode(layer, lengths, batch_invariant) for layer in layers]
    return graph, found


@pytest.mark.parametrize(("heads", "batch_invariant"), KINDS)
def test_a_graph_plans_once_and_follows_the_lengths(heads: int, batch_invariant: bool, launched: list[str]) -> None:
    layers = [whole(heads, seed) for seed in range(3)]
    lengths = DecodeLengths(seqlens_kv=tensor(LENGTHS))
    for layer in layers:
        decode(layer, lengths, batch_invariant)
    launched.clear()
    graph, found = captured(layers, lengths, batch_invariant)
    assert plans(launched) == 1
    for values in (OTHERS, LENGTHS, [0] * BATCH, [CAPACITY] * BATCH):
        lengths.seqlens_kv.copy_(torch.tensor(values))
        for out, lse in found:
            out.fill_(torch.nan)
            lse.fill_(torch.nan)
        graph.replay()
        for layer, each in zip(layers, found, strict=True):
            check(layer, values, each)
    lengths.update()
    check(layers[0], [CAPACITY] * BATCH, decode(layers[0], lengths, batch_invariant))


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_two_graphs_of_one_pool_and_calls_between_them(batch_invariant: bool) -> None:
    """What was captured first is replayed after the second has used the pool's memory."""
    layers = [whole(16, seed) for seed in range(2)]
    lengths = DecodeLengths(LENGTHS, device="cuda")
    for layer in layers:
        decode(layer, lengths, batch_invariant)
    first, of_first = captured(layers, lengths, batch_invariant)
    second, of_second = captured(layers, lengths, batch_invariant, first.pool())
    for values in (OTHERS, LENGTHS, OTHERS):
        lengths.update(values)
        between = decode(layers[1], lengths, batch_invariant)
        for graph, found in ((second, of_second), (first, of_first), (second, of_second)):
            graph.replay()
            for layer, each in zip(layers, found, strict=True):
                check(layer, values, each)
        check(layers[1], values, between)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_lengths_that_grow_within_a_graph(batch_invariant: bool) -> None:
    """As the steps of a draft do: PyTorch counts what it writes while it captures."""
    layer, lengths = whole(16), DecodeLengths(seqlens_kv=tensor([5] * BATCH))
    decode(layer, lengths, batch_invariant)
    graph, found = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for step in (1, 700):
            lengths.seqlens_kv.add_(step)
            found.append(decode(layer, lengths, batch_invariant))
    lengths.seqlens_kv.copy_(torch.tensor([9] * BATCH))
    graph.replay()
    check(layer, [10] * BATCH, found[0])
    check(layer, [710] * BATCH, found[1])


BUSY = 50_000_000
"""Clock cycles, tens of milliseconds."""


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_streams_do_not_wait_for_each_other(batch_invariant: bool, launched: list[str]) -> None:
    """A stream must not take a plan that another one may not have written yet."""
    layer, lengths = whole(16), DecodeLengths(seqlens_kv=tensor(LENGTHS))
    decode(layer, tensor(LENGTHS), batch_invariant)
    launched.clear()
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for _ in range(2):
        for stream in streams:
            with torch.cuda.stream(stream):
                if stream is streams[0]:
                    torch.cuda._sleep(BUSY)
                found.append(decode(layer, lengths, batch_invariant))
    torch.cuda.synchronize()
    assert plans(launched) == 3
    for each in found:
        check(layer, LENGTHS, each)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_stream_forked_within_a_capture(batch_invariant: bool, launched: list[str]) -> None:
    layers, lengths = [whole(16, seed) for seed in range(2)], DecodeLengths(seqlens_kv=tensor(LENGTHS))
    for layer in layers:
        decode(layer, lengths, batch_invariant)
    launched.clear()
    graph, other, found = torch.cuda.CUDAGraph(), torch.cuda.Stream(), []
    with torch.cuda.graph(graph):
        here = torch.cuda.current_stream()
        other.wait_stream(here)
        with torch.cuda.stream(other):
            torch.cuda._sleep(BUSY)
            found.append(decode(layers[0], lengths, batch_invariant))
        found.append(decode(layers[1], lengths, batch_invariant))
        here.wait_stream(other)
    assert plans(launched) == 2
    lengths.seqlens_kv.copy_(torch.tensor(OTHERS))
    graph.replay()
    for layer, each in zip(layers, found, strict=True):
        check(layer, OTHERS, each)


def test_threads_that_share_lengths() -> None:
    """Each calls many times, on the default stream all of them or each on its own."""
    layer, lengths = whole(16), DecodeLengths(seqlens_kv=tensor(LENGTHS))
    decode(layer, tensor(LENGTHS), False)
    torch.cuda.synchronize()
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def work(stream: torch.cuda.Stream | None) -> None:
        with torch.cuda.stream(stream):
            for _ in range(20):
                found.append(decode(layer, lengths, False))
                lengths.update()

    threads = [threading.Thread(target=work, args=(stream,)) for stream in (None, None, torch.cuda.Stream(), None)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(found) == 80
    assert all(torch.equal(out, found[0][0]) for out, _ in found)
    check(layer, LENGTHS, found[0])


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_inference_mode(batch_invariant: bool, launched: list[str]) -> None:
    """What was planned in it serves calls outside of it, and the other way round."""
    layer = whole(16)
    decode(layer, tensor(LENGTHS), batch_invariant)
    launched.clear()
    with torch.inference_mode():
        lengths = DecodeLengths(seqlens_kv=tensor(LENGTHS))
        found = [decode(layer, lengths, batch_invariant)]
    found.append(decode(layer, lengths, batch_invariant))
    outside = DecodeLengths(seqlens_kv=tensor(LENGTHS))
    found.append(decode(layer, outside, batch_invariant))
    with torch.inference_mode():
        found.append(decode(layer, outside, batch_invariant))
    assert plans(launched) == 2  # one for each object
    for each in found:
        check(layer, LENGTHS, (each[0].clone(), each[1].clone()))


@pytest.mark.peer("FlashMLA")
def test_flashmla_shares_its_schedule_too() -> None:
    layers = [paged((BATCH, 1, 128, 512, 64, CAPACITY), 64, torch.bfloat16, OTHERS, seed) for seed in range(2)]
    run = functools.partial(mla_plugin.decode, backend="flashmla", return_lse=True)
    lengths = DecodeLengths(seqlens_kv=tensor([1] * BATCH))
    graph, found = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for inputs in layers:
            options = inputs.options() | {"seqlens_kv": lengths}
            found.append(run(*inputs.tensors()[:2], (inputs.c_kv, inputs.k_rope), **options))
    assert len(lengths._kept) == 1
    lengths.seqlens_kv.copy_(torch.tensor(OTHERS))
    graph.replay()
    for inputs, each in zip(layers, found, strict=True):
        check(inputs, OTHERS, each)
