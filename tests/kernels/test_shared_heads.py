"""Query heads that share a head of keys, divided among programs of dK and dV by copies of that head."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from mla_plugin.arguments.mask import Band
from mla_plugin.kernels.hopper import launch_backward as hopper_backward
from mla_plugin.kernels.prefill import launch_backward, launch_forward, shared_heads
from mla_plugin.kernels.prefill.packing import Kind, Packing
from tests.kernels.prefill_draws import draw
from tests.kernels.prefill_oracle import attend
from tests.kernels.test_prefill_draws import _fresh_memory_holds_nan as _fresh_memory_holds_nan
from tests.kernels.test_prefill_draws import _small_tiles as _small_tiles
from tests.kernels.test_prefill_draws import results

CAUSAL, TOP_LEFT, OPEN, WINDOW = Band(-1, 0, True), Band(-1, 0, False), Band(-1, -1, True), Band(511, 0, True)


@pytest.fixture(autouse=True)
def _h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(shared_heads, "multiprocessors", lambda device: 132)
    cached = shared_heads.copies
    cached.cache_clear()
    yield
    cached.cache_clear()


def kind(
    heads: int, kv_heads: int, len_q: int, len_kv: int = 0, batch: int = 1, band: Band = CAUSAL, packed: int = 0
) -> Kind:
    """``packed``: the longest of ``batch`` sequences of len_q tokens together."""
    len_kv = len_kv or len_q
    rows_q, rows_kv = ((len_q,), (len_kv,)) if packed else ((batch, len_q), (batch, len_kv))
    q, k, v = (
        torch.empty(*rows, n, width, dtype=torch.bfloat16, device="meta")
        for rows, n, width in ((rows_q, heads, 192), (rows_kv, kv_heads, 192), (rows_kv, kv_heads, 128))
    )
    if not packed:
        return Kind.of(q, k, v, 0.1, Packing("bshd", len_q, len_kv, mask=band))
    offsets = torch.empty(batch + 1, dtype=torch.int32, device="meta")
    packing = Packing("thd", packed, packed, cu_seqlens_q=offsets, cu_seqlens_kv=offsets, mask=band)
    return Kind.of(q, k, v, 0.1, packing)


@pytest.mark.parametrize(
    ("call", "copies"),
    [
        (kind(16, 16, 1024), 1),  # no head is shared
        (kind(64, 4, 8192), 1),  # the fastest of all as it is
        (kind(32, 8, 3000), 1),
        (kind(64, 4, 2048), 4),  # 0.53 of the fastest
        (kind(32, 1, 3000), 16),  # 0.22
        (kind(32, 2, 1200), 16),  # 0.28
        (kind(48, 4, 5000), 2),  # 0.82
        (kind(7, 1, 3000), 7),  # a group that only itself divides
        (kind(16, 1, 100), 1),  # copies would take longer than they save
        (kind(64, 4, 2048, band=OPEN), 2),
        (kind(64, 4, 2048, band=WINDOW), 2),
        (kind(64, 4, 2048, band=TOP_LEFT), 4),
        (kind(64, 4, 2048, batch=4), 1),
        (kind(64, 4, 1024, 65536), 1),  # keys before the queries give programs enough
        (kind(32, 1, 4096, band=TOP_LEFT, len_kv=64), 32),
        (kind(64, 4, 16384, batch=8, packed=4096), 1),
        (kind(64, 1, 4096, batch=8, packed=4096), 64),  # one long sequence, seven short ones
        (kind(64, 4, 64, 2048, band=Band(0, 0, False)), 1),  # hardly a key is seen
        (kind(32, 1, 1024, 1024, band=Band(-1, 0, True))._replace(seqlen_q=0), 1),
    ],
)
def test_copies_where_programs_are_few_or_unequal(call: Kind, copies: int) -> None:
    assert shared_heads.copies(call) == copies


def test_copies_divide_the_group() -> None:
    for heads in range(1, 65):
        for kv_heads in (n for n in range(1, heads + 1) if heads % n == 0):
            for tokens in (130, 1000, 4000):
                found = shared_heads.copies(kind(heads, kv_heads, tokens))
                assert heads // kv_heads % found == 0


def test_a_device_of_one_program_needs_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert shared_heads.copies(kind(64, 4, 2048)._replace(device=torch.device("cpu"))) == 1


@pytest.mark.parametrize("axis", [1, 2])
def test_added_is_the_gradient_of_repeated(axis: int) -> None:
    x = torch.randn(3, 4, 5, 6, dtype=torch.float64).transpose(0, 1).requires_grad_()
    y = shared_heads.repeated(x, axis, 3)
    assert y.is_contiguous()
    assert torch.equal(y, x.repeat_interleave(3, axis))
    gradient = torch.randn(y.shape, dtype=torch.float64)
    found = shared_heads.added(gradient, axis, 3, torch.float64)
    torch.testing.assert_close(found, torch.autograd.grad(y, x, gradient)[0])
    assert found.is_contiguous()


def is_grouped(seed: int) -> bool:
    given = draw(seed)
    axis = given.packing.layout.heads
    return given.q.shape[axis] > given.k.shape[axis]


def group_of(call: Kind) -> int:
    """The most copies there can be."""
    return call.num_heads // call.num_kv_heads


@pytest.mark.usefixtures("_small_tiles", "_fresh_memory_holds_nan")
@pytest.mark.parametrize("seed", [seed for seed in range(48, 120) if is_grouped(seed)])
def test_as_by_definition(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_heads, "copies", group_of)
    given = draw(seed)
    found = results(given)
    exact = attend(given.call, given.q, given.k, given.v, given.dout, given.dlse)
    for name, x, wanted in zip(("out", "lse", "dq", "dk", "dv"), found, exact, strict=True):
        torch.testing.assert_close(
            x.cpu().double(), wanted, rtol=1e-4, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


class Memory:
    """Which dtypes of dk and dv the launches of each kind of call were given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plain: dict[object, set[torch.dtype]] = {}
        self.hopper: dict[object, set[torch.dtype]] = {}
        monkeypatch.setattr(launch_backward, "_kv_launch", self.kv_launch)
        monkeypatch.setattr(launch_backward, "_q_launch", lambda *_: lambda *_: None)
        monkeypatch.setattr(launch_backward, "_hopper", lambda: self.backward_of)

    def kv_launch(self, kind: Kind, tile: object) -> Callable[..., None]:
        return lambda *given: self.plain.setdefault(kind, set()).update(x.dtype for x in given[10:12])

    def backward_of(self, *kind: object) -> Memory:
        self.asked = kind
        return self

    def calls_kv(self, inputs: object, rows: object, gradients: tuple[torch.Tensor, ...], offsets: object) -> list:
        for x in gradients:
            x.zero_()
        self.hopper.setdefault(self.asked, set()).update(x.dtype for x in gradients)
        return [(lambda: None, ())]

    def calls_q(self, *_: object) -> list:
        return [(lambda: None, ())]


@pytest.mark.parametrize("runs_hopper", [False, True])
def test_sums_in_float32_have_launches_of_their_own(runs_hopper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of 4 heads over 2, and one of 4 over 1 whose head is copied: equal shapes, other memory for dk and dv."""
    memory = Memory(monkeypatch)
    reason = None if runs_hopper else "this test says so"
    for name in ("plain_dkv_for", "plain_dq_for"):
        monkeypatch.setattr(launch_backward, name, lambda *_: reason)
    monkeypatch.setattr(shared_heads, "copies", lambda call: 2 if call.num_kv_heads == 1 else 1)
    for kv_heads in (2, 1):
        q, k, v = (torch.zeros(1, 8, n, 64, dtype=torch.bfloat16) for n in (4, kv_heads, kv_heads))
        out, lse = torch.zeros_like(q), torch.zeros(1, 4, 8)
        found = launch_backward.backward(q, k, v, out, lse, out, None, 0.1, Packing("bshd", 8, 8))
        assert [x.dtype for x in found] == [torch.bfloat16] * 3
        assert [x.shape for x in found] == [x.shape for x in (q, k, v)]
    launches = memory.hopper if runs_hopper else memory.plain
    assert sorted(map(str, launches.values())) == ["{torch.bfloat16}", "{torch.float32}"]
    assert len(launches) == 2
    if runs_hopper:
        assert hopper_backward.backward_of.__wrapped__.__code__.co_argcount == len(memory.asked)


def test_sums_of_copies_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 heads whose gradients of k cancel but for one part in 500: parts rounded to float16 would be far off."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 8, 32, 16, generator=generator).half()
    q[:, :, 1::2] = q[:, :, ::2]
    k, v = (torch.randn(1, 16, 1, 16, generator=generator).half() for _ in range(2))
    dout = torch.randn(1, 8, 32, 16, generator=generator).half()
    dout[:, :, 1::2] = -dout[:, :, ::2]
    dout[:, :, 0] *= 1 + 2**-9
    packing = Packing("bshd", 8, 16)
    found = {}
    for copies in (1, 32):
        monkeypatch.setattr(shared_heads, "copies", lambda call, copies=copies: copies)
        out, lse = launch_forward.forward(q, k, v, 0.25, packing)
        found[copies] = [x.double() for x in launch_backward.backward(q, k, v, out, lse, dout, None, 0.25, packing)]
    for name, one, many in zip(("dq", "dk", "dv"), found[1], found[32], strict=True):
        assert (many - one).norm() <= 2**-11 * one.norm(), name
