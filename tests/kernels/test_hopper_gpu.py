"""The Hopper forward on a Hopper GPU, against attention in float64."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import mla_plugin
from mla_plugin.arguments.mask import Band
from mla_plugin.kernels.hopper.rule import LATENT, TILES, plain_kernel_for
from mla_plugin.kernels.prefill.launch_forward import forward
from mla_plugin.kernels.prefill.packing import Kind, Packing
from tests.kernels.hopper_draws import Draw, draw
from tests.kernels.prefill_oracle import attend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where test_hopper_interpreted.py checks the same
MASKS = {
    "full": (-1, -1, False),
    "causal": (-1, 0, True),
    "causal_top_left": (-1, 0, False),
    "window": (100, 0, True),
    "band": (70, 30, False),
}
OTHERS = [pair for pair in TILES if pair != (192, 128)]


@pytest.fixture(autouse=True)
def _nan_in_new_memory() -> Iterator[None]:
    """What is not written stays NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def check(given: Draw) -> None:
    q, k, v, scale, packing = given.on(DEVICE)
    assert plain_kernel_for(Kind.of(q, k, v, scale, packing)) is None
    out, lse = (x.cpu().double() for x in forward(q, k, v, scale, packing))
    clean = [x.nan_to_num(0.0) for x in (given.q, given.k, given.v)]
    wanted, wanted_lse, *_ = attend(given.call, *clean, torch.zeros(out.shape), None)
    assert torch.equal(torch.isinf(lse), torch.isinf(wanted_lse))
    seen = ~torch.isinf(wanted_lse)
    assert not seen.any() or (lse - wanted_lse)[seen].abs().max() < 1e-4
    assert torch.isfinite(out).all()
    difference, norm = (out - wanted).norm(dim=-1), wanted.norm(dim=-1)
    assert (difference <= (1e-2 if given.q.dtype == torch.bfloat16 else 2e-3) * norm).all()


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd", "thd"])
@pytest.mark.parametrize("mask", MASKS)
def test_deepseek(layout: str, mask: str) -> None:
    left, right, bottom_right = MASKS[mask]
    for seed in range(4):
        options = {"left": left, "right": right, "bottom_right": bottom_right, "head_dims": (192, 128)}
        check(draw(seed, layout, dtype=torch.bfloat16, **options))


@pytest.mark.parametrize("seed", range(100, 144))
def test_factors_in_combination(seed: int) -> None:
    check(draw(seed))


@pytest.mark.parametrize("head_dims", [*OTHERS, LATENT], ids=lambda pair: "{}/{}".format(*pair))
@pytest.mark.parametrize("seed", range(200, 210))
def test_other_head_dimensions(seed: int, head_dims: tuple[int, int]) -> None:
    check(draw(seed, head_dims=head_dims))


def packed_call(
    lengths: list[int], heads: int = 4, head_dims: tuple[int, int] = (192, 128)
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float, Packing]:
    head_dim_qk, head_dim_v = head_dims
    generator = torch.Generator("cuda").manual_seed(sum(lengths))
    q, k, v = (
        torch.randn(sum(lengths), heads, width, device="cuda", dtype=torch.bfloat16, generator=generator)
        for width in (head_dim_qk, head_dim_qk, head_dim_v)
    )
    v = k[..., :head_dim_v] if head_dims == LATENT else v
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    longest = max(lengths)
    packing = Packing("thd", longest, longest, cu_seqlens, cu_seqlens, mask=Band(-1, 0, True), same_lengths=True)
    return q, k, v, head_dim_qk**-0.5, packing


def dense_call(
    seqlen: int, heads: int = 4, head_dims: tuple[int, int] = (192, 128)
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float, Packing]:
    q, k, v, scale, _ = packed_call([seqlen], heads, head_dims)
    return q[None], k[None], v[None], scale, Packing("bshd", seqlen, seqlen, mask=Band(-1, 0, True))


def test_200_runs_agree_bit_for_bit() -> None:
    lengths = [700, 1, 0, 130, 1500, 64]
    packed = [packed_call(lengths, head_dims=pair) for pair in ((192, 128), (256, 256), LATENT)]
    for call in (dense_call(1111, 16), dense_call(1111, 16, LATENT), *packed):
        first = forward(*call)
        for _ in range(200):
            assert all(torch.equal(a, b) for a, b in zip(forward(*call), first, strict=True))


@pytest.mark.parametrize("head_dims", [(192, 128), LATENT], ids=lambda pair: "{}/{}".format(*pair))
def test_packed_equals_dense_bit_for_bit(head_dims: tuple[int, int]) -> None:
    """A sequence's results do not depend on the memory around it."""
    q, k, v, scale, packing = packed_call([300, 1024, 129], head_dims=head_dims)
    out, lse = forward(q, k, v, scale, packing)
    dense = Packing("bshd", 1024, 1024, mask=Band(-1, 0, True))
    alone, alone_lse = forward(*(x[None, 300:1324] for x in (q, k, v)), scale, dense)
    assert torch.equal(out[300:1324], alone[0])
    assert torch.equal(lse[:, 300:1324], alone_lse[0])


@pytest.mark.parametrize("head_dims", [(192, 128), LATENT], ids=lambda pair: "{}/{}".format(*pair))
def test_a_graph_is_replayed_with_other_lengths(head_dims: tuple[int, int]) -> None:
    q, k, v, scale, packing = packed_call([300, 1024, 129], head_dims=head_dims)
    dense = dense_call(900, head_dims=head_dims)
    forward(q, k, v, scale, packing)
    forward(*dense)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = *forward(q, k, v, scale, packing), *forward(*dense)
    for lengths in ([1, 0, 1000], [513, 512, 300], [0, 0, 0]):
        packing.cu_seqlens_q.copy_(torch.tensor([0, *lengths]).cumsum(0))
        wanted = *forward(q, k, v, scale, packing), *forward(*dense)
        for x in results:
            x.fill_(torch.nan)
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))


def test_two_streams_at_a_time() -> None:
    calls = [dense_call(2000, 16), dense_call(1500, 32)]
    wanted = [forward(*call) for call in calls]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for stream, call in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                found.append(forward(*call))
    torch.cuda.synchronize()
    for n, results in enumerate(found):
        assert all(torch.equal(a, b) for a, b in zip(results, wanted[n % 2], strict=True))


def test_a_new_thread() -> None:
    """It has no CUDA context until it calls CUDA's runtime, and memory of PyTorch's cache needs no call."""
    q, k, v, scale, packing = dense_call(300)
    wanted, _ = forward(q, k, v, scale, packing), forward(q, k, v, scale, packing)
    elsewhere = [x.clone() for x in (q, k, v)]
    del _
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(forward, *elsewhere, scale, packing).result()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("head_dims", [(192, 128), LATENT], ids=lambda pair: "{}/{}".format(*pair))
def test_nan_in_a_query_stays_in_its_row(head_dims: tuple[int, int]) -> None:
    q, k, v, scale, packing = dense_call(500, head_dims=head_dims)
    clean, _ = forward(q, k, v, scale, packing)
    q[0, 77, 2, 5] = torch.nan
    out, lse = forward(q, k, v, scale, packing)
    assert torch.isnan(out[0, 77, 2]).all()
    assert torch.isnan(lse[0, 2, 77])
    out[0, 77, 2] = clean[0, 77, 2]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("head_dims", [(192, 128), LATENT], ids=lambda pair: "{}/{}".format(*pair))
def test_many_small_sequences(head_dims: tuple[int, int]) -> None:
    """More sequences than the plan takes at a time, and fewer tickets than multiprocessors for one head."""
    q, k, v, scale, packing = packed_call([3, 0, 1, 70] * 40, heads=2, head_dims=head_dims)
    out, lse = forward(q, k, v, scale, packing)
    start = 0
    for length in [3, 0, 1, 70] * 40:
        rows = slice(start, start + length)
        s = torch.einsum("qhd,khd->hqk", q[rows].double(), k[rows].double()) * scale
        s = s.masked_fill(torch.ones(length, length, device="cuda").triu(1).bool(), -torch.inf)
        wanted = torch.einsum("hqk,khd->qhd", s.softmax(-1), v[rows].double())
        assert torch.allclose(out[rows].double(), wanted, rtol=2e-2, atol=2e-2)
        assert torch.allclose(lse[:, rows].double(), s.logsumexp(-1), atol=1e-4)
        start += length


@pytest.mark.parametrize("is_compiled", [False, True])
def test_v_in_k_and_v_elsewhere_by_turns(is_compiled: bool) -> None:
    """The calls differ in an address alone, and each has its kernel; gradients of v in k are those of k and v."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k = (
        torch.randn(2, 200, heads, 576, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
        for heads in (4, 1)
    )
    other = torch.randn(2, 200, 1, 576, device="cuda", dtype=torch.bfloat16, generator=generator)[..., :512]
    dout = torch.randn(2, 200, 4, 512, device="cuda", dtype=torch.bfloat16, generator=generator)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return mla_plugin.attention(q, k, v, attn_mask_type="causal", backend="triton")

    function = torch.compile(attend, fullgraph=True) if is_compiled else attend
    for n in range(6):
        own = k[..., :512] if n % 2 == 0 else other
        out = function(q, k, own)
        exact = [x.detach().double().requires_grad_() for x in (q, k)]
        keys = exact[1].expand(-1, -1, 4, -1)
        values = (keys[..., :512] if n % 2 == 0 else other.double().expand(-1, -1, 4, -1)).transpose(1, 2)
        scores = exact[0].transpose(1, 2) @ keys.permute(0, 2, 3, 1) * 576**-0.5
        hidden = torch.ones(200, 200, device="cuda", dtype=torch.bool).triu(1)
        wanted = (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(1, 2)
        assert (out - wanted).norm() < 1e-2 * wanted.norm()
        gradients = torch.autograd.grad(out, (q, k), dout)
        for found, right in zip(gradients, torch.autograd.grad(wanted, exact, dout.double()), strict=True):
            assert (found - right).norm() < 1e-2 * right.norm()
