"""The Hopper backward on a Hopper GPU, against the gradients of attention in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mla_plugin.arguments.mask import Band
from mla_plugin.kernels.hopper.rule import plain_dkv_for
from mla_plugin.kernels.prefill import shared_heads
from mla_plugin.kernels.prefill.launch_backward import backward
from mla_plugin.kernels.prefill.launch_forward import forward
from mla_plugin.kernels.prefill.packing import Kind, Packing
from tests.kernels.hopper_draws import Draw, draw
from tests.kernels.prefill_oracle import attend
from tests.kernels.test_hopper_gpu import DEVICE, MASKS, OTHERS, dense_call, packed_call

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor, float, Packing]


@pytest.fixture(autouse=True)
def _nan_in_new_memory() -> Iterator[None]:
    """What is not written stays NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def gradients(
    given: Given, dout: torch.Tensor | None = None, dlse: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v, scale, packing = given
    out, lse = forward(*given)
    if dout is None:
        dout = torch.randn(out.shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)).to(q.dtype)
    assert plain_dkv_for(Kind.of(q, k, v, scale, packing), dout.stride()) is None
    return backward(q, k, v, out, lse, dout, dlse, scale, packing)


def check(given: Draw) -> None:
    found = [x.cpu().double() for x in gradients(given.on(DEVICE), *given.gradients_on(DEVICE))]
    q, k, v, dout = (x.nan_to_num(0.0) for x in (given.q, given.k, given.v, given.dout))
    out, _, *wanted = attend(given.call, q, k, v, dout, given.dlse)
    allowed = of_rounded_out(given, out)
    bound = 1e-2 if q.dtype == torch.bfloat16 else 2e-3
    for name, x, exact in zip(("dq", "dk", "dv"), found, wanted, strict=True):
        assert torch.isfinite(x).all(), name
        difference, norm = (x - exact).norm(dim=-1), exact.norm(dim=-1)
        typical = norm.square().mean().sqrt()  # a row whose terms cancel is as exact as the others, not more so
        assert (difference <= bound * (norm + typical) + allowed[name]).all(), name
    unseen = wanted[2].norm(dim=-1) == 0  # keys that no query sees, and rows of no sequence
    assert (found[1][unseen] == 0).all()
    assert (found[2][unseen] == 0).all()
    assert (found[0][out.norm(dim=-1) == 0] == 0).all()


def of_rounded_out(given: Draw, out: torch.Tensor) -> dict[str, torch.Tensor | float]:
    """What dq and dk differ by where delta is taken from an out of two bytes: an error of delta goes to both.

    A query that sees one key has gradients of exactly 0, but delta is rounded and dP is not.
    """
    q, k, v, dout = (x.nan_to_num(0.0).double() for x in (given.q, given.k, given.v, given.dout))
    unit = 2.0**-8 if given.q.dtype == torch.bfloat16 else 2.0**-11
    error = unit * (out * dout).norm(dim=-1)
    weighted_keys = attend(given.call, q, k, k, torch.zeros_like(q), None)[0]
    for_keys = attend(given.call, q, k, v[..., :1], (error * q.norm(dim=-1))[..., None], None)[4][..., 0]
    scale = given.call.scale
    return {"dq": scale * error * weighted_keys.norm(dim=-1), "dk": scale * for_keys, "dv": 0.0}


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


@pytest.mark.parametrize("head_dims", OTHERS, ids=lambda pair: "{}/{}".format(*pair))
@pytest.mark.parametrize("seed", range(200, 210))
def test_other_head_dimensions(seed: int, head_dims: tuple[int, int]) -> None:
    check(draw(seed, head_dims=head_dims))


@pytest.mark.parametrize("seed", range(300, 332))
def test_copies_of_heads_of_keys(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are heads of q, whatever their number is good for; dk and dv are summed in float32."""
    monkeypatch.setattr(shared_heads, "copies", lambda kind: kind.num_heads // kind.num_kv_heads)
    check(draw(seed))


@pytest.mark.parametrize(("heads", "kv_heads", "tokens"), [(64, 4, 2048), (32, 1, 3000), (32, 2, 1200), (48, 4, 5000)])
def test_few_heads_of_keys_over_short_sequences(heads: int, kv_heads: int, tokens: int) -> None:
    """Against the gradients of one call a group, whose programs need no copies."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, tokens, n, width, dtype=torch.bfloat16, device="cuda", generator=generator)
        for n, width in ((heads, 192), (kv_heads, 192), (kv_heads, 128), (heads, 128))
    )
    packing = Packing("bshd", tokens, tokens, mask=Band(-1, 0, True))
    assert shared_heads.copies(Kind.of(q, k, v, 0.1, packing)) > 1
    dq, dk, dv = gradients((q, k, v, 0.1, packing), dout)
    every = [shared_heads.repeated(x, 2, heads // kv_heads) for x in (k, v)]
    wanted_q, *wanted = gradients((q, *every, 0.1, packing), dout)
    assert torch.equal(dq, wanted_q)
    for x, parts in zip((dk, dv), wanted, strict=True):
        exact = parts.double().unflatten(2, (kv_heads, -1)).sum(3)
        assert (x.double() - exact).norm() <= 4e-3 * exact.norm()


def test_200_runs_agree_bit_for_bit() -> None:
    lengths = [700, 1, 0, 130, 1500, 64]
    for call in (dense_call(1111, 16), packed_call(lengths), packed_call(lengths, head_dims=(256, 256))):
        first = gradients(call)
        for _ in range(200):
            assert all(torch.equal(a, b) for a, b in zip(gradients(call), first, strict=True))


def test_packed_equals_dense_bit_for_bit() -> None:
    """A sequence's results do not depend on the memory around it."""
    q, k, v, scale, packing = packed_call([300, 1024, 129])
    dout = torch.randn_like(q[..., :128])
    found = gradients((q, k, v, scale, packing), dout)
    rows = slice(300, 1324)
    dense = Packing("bshd", 1024, 1024, mask=Band(-1, 0, True))
    alone = gradients((q[None, rows], k[None, rows], v[None, rows], scale, dense), dout[None, rows])
    assert all(torch.equal(x[rows], y[0]) for x, y in zip(found, alone, strict=True))


def test_a_graph_is_replayed_with_other_lengths() -> None:
    q, k, v, scale, packing = packed_call([300, 1024, 129])
    dense = dense_call(900)
    gradients((q, k, v, scale, packing))
    gradients(dense)
    douts = torch.randn_like(q[..., :128]), torch.randn_like(dense[0][..., :128])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = *gradients((q, k, v, scale, packing), douts[0]), *gradients(dense, douts[1])
    for lengths in ([1, 0, 1000], [513, 512, 300], [0, 0, 0]):
        packing.cu_seqlens_q.copy_(torch.tensor([0, *lengths]).cumsum(0))
        wanted = *gradients((q, k, v, scale, packing), douts[0]), *gradients(dense, douts[1])
        for x in results:
            x.fill_(torch.nan)
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))


def test_two_streams_at_a_time() -> None:
    calls = [dense_call(2000, 16), dense_call(1500, 32)]
    wanted = [gradients(call) for call in calls]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for stream, call in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                found.append(gradients(call))
    torch.cuda.synchronize()
    for n, results in enumerate(found):
        assert all(torch.equal(a, b) for a, b in zip(results, wanted[n % 2], strict=True))


def test_what_a_query_without_a_key_holds_does_not_matter() -> None:
    """300 queries over 100 keys, right-aligned: the first 200 see none."""
    q, k, v, scale, _ = dense_call(300)
    given = q, k[:, :100], v[:, :100], scale, Packing("bshd", 300, 100, mask=Band(-1, 0, True))
    dout = torch.randn_like(q[..., :128])
    wanted = gradients(given, dout)
    dout[:, :200] = torch.nan
    assert all(torch.equal(a, b) for a, b in zip(gradients(given, dout), wanted, strict=True))
    assert (wanted[0][:, :200] == 0).all()


def test_many_small_sequences() -> None:
    """More sequences than the plan takes at a time."""
    lengths = [3, 0, 1, 70] * 40
    q, k, v, scale, packing = packed_call(lengths, heads=2)
    dout = torch.randn_like(q[..., :128])
    dq, dk, dv = (x.double() for x in gradients((q, k, v, scale, packing), dout))
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        qs, ks, vs = (x[rows].double().requires_grad_() for x in (q, k, v))
        s = torch.einsum("qhd,khd->hqk", qs, ks) * scale
        s = s.masked_fill(torch.ones(length, length, device="cuda").triu(1).bool(), -torch.inf)
        torch.einsum("hqk,khd->qhd", s.softmax(-1), vs).backward(dout[rows].double())
        for x, exact in ((dq, qs.grad), (dk, ks.grad), (dv, vs.grad)):
            assert torch.allclose(x[rows], exact, rtol=2e-2, atol=2e-2)
        start += length
