"""What the Hopper forward is launched with, without a GPU: descriptors, memory for tickets, heads side by side."""

from __future__ import annotations

import pytest
import torch

from mla_plugin.arguments.mask import Band
from mla_plugin.kernels.hopper import launch_forward, plan, tickets
from mla_plugin.kernels.hopper.launch_forward import Forward
from mla_plugin.kernels.hopper.rule import TILES
from mla_plugin.kernels.hopper.tickets import heads_together
from mla_plugin.kernels.prefill.packing import Kind, Packing

CAUSAL, OPEN = Band(-1, 0, True), Band(-1, -1, True)
SHAPES = {"bshd": (2, 300, 4), "sbhd": (300, 2, 4), "bhsd": (2, 4, 300), "thd": (300, 4)}


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_forward, "multiprocessors", lambda device: 132)


def launched(
    layout: str,
    band: Band,
    monkeypatch: pytest.MonkeyPatch,
    is_padded: bool = False,
    head_dims: tuple[int, int] = (192, 128),
    has_lengths: bool = False,
) -> tuple[list[torch.Tensor], list[tuple], list[tuple]]:
    """The tensors of two equal calls, and what the plan and the kernel were given."""
    widths = head_dims[0], head_dims[0], head_dims[1]
    q, k, v = (torch.zeros(*SHAPES[layout], width + 8, dtype=torch.float16)[..., :width] for width in widths)
    given = {}
    if layout == "thd":
        given = {f"cu_seqlens_{side}": torch.tensor([0, 40, 290], dtype=torch.int32) for side in ("q", "kv")}
        if is_padded:
            given |= {f"cu_seqlens_{s}_padded": torch.tensor([4, 48, 300], dtype=torch.int32) for s in ("q", "kv")}
    elif has_lengths:
        given = {f"cu_seqlens_{side}": torch.tensor([0, 40, 290], dtype=torch.int32) for side in ("q", "kv")}
    packing = Packing(layout, 250 if layout == "thd" else 300, 250 if layout == "thd" else 300, mask=band, **given)
    forward = Forward(Kind.of(q, k, v, 0.1, packing))
    plans: list[tuple] = []
    kernels: list[tuple] = []
    monkeypatch.setattr(launch_forward, "counter", lambda device, kernel: torch.zeros(1, dtype=torch.int32))
    monkeypatch.setattr(forward, "_launch", lambda *arguments: kernels.append(arguments))
    if layout == "thd":
        monkeypatch.setattr(forward, "_plan", lambda *arguments: plans.append(arguments))
    out = q.new_empty((*q.shape[:-1], head_dims[1]))
    lse = q.new_empty(packing.layout.lse_shape(q.shape), dtype=torch.float32)
    for _ in range(2):
        forward(q, k, v, out, lse, *packing.offsets())
    return [q, k, v, out, lse, *packing.offsets()], plans, kernels


BLOCKS = {
    (192, 128): ([1, 1, 64, 64], [1, 1, 128, 64], [1, 1, 128, 128]),
    (256, 256): ([1, 1, 64, 64], [1, 1, 64, 64], [1, 1, 64, 256]),
    (96, 64): ([1, 1, 64, 64], [1, 1, 128, 64], [1, 1, 128, 64]),
    (576, 512): ([1, 1, 64, 64], [1, 1, 64, 64]),
}


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("head_dims", BLOCKS)
def test_descriptors_say_where_the_tensors_lie(
    head_dims: tuple[int, int], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, _, (first, second) = launched(layout, CAUSAL, monkeypatch, head_dims=head_dims)
    axes = {"bshd": (0, 2, 1), "sbhd": (1, 2, 0), "bhsd": (0, 1, 2), "thd": (None, 1, 0)}[layout]
    assert not hasattr(first[len(BLOCKS[head_dims])], "block_shape")
    for x, source, block in zip(tensors, first, BLOCKS[head_dims], strict=False):
        assert source.base.data_ptr() == x.data_ptr()
        assert source.block_shape == block
        assert source.shape == [*(1 if axis is None else x.shape[axis] for axis in axes), x.shape[-1]]
        assert source.strides[1:] == [*(x.stride(axis) for axis in axes[1:]), 1]
        if axes[0] is not None:
            assert source.strides[0] == x.stride(axes[0])
    described = len(BLOCKS[head_dims])
    assert all(a is b for a, b in zip(first[:described], second[:described], strict=True))


@pytest.mark.parametrize("is_padded", [False, True])
def test_packed_sequences_have_a_plan_in_memory_of_the_call(is_padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, plans, kernels = launched("thd", OPEN, monkeypatch, is_padded)
    _, _, _, out, lse, lengths_q, lengths_kv, starts_q, starts_kv = tensors
    for planned, kernel in zip(plans, kernels, strict=True):
        work = planned[0]
        assert work.dtype == torch.int32
        assert work.numel() == plan.HEADER + 2 * (300 // 128 + 2)
        for found, wanted in zip(planned[1:], (out, None, lse, lengths_q, lengths_kv, starts_q), strict=True):
            assert found is wanted
        for found, wanted in zip(kernel[3:], (out, lse, work, lengths_q, lengths_kv, starts_q, starts_kv), strict=True):
            assert found is wanted


def test_equally_long_tiles_need_no_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    for band, has_lengths, has_counter in (
        *(
            (OPEN, False, False),
            (CAUSAL, False, True),
            (Band(100, 0, True), False, True),
            (Band(-1, 7, True), False, True),
        ),
        (OPEN, True, True),
    ):
        _, _, ((*_, counter, _, _, _, _), _) = launched("bshd", band, monkeypatch, has_lengths=has_lengths)
        assert (counter is not None) == has_counter


@pytest.mark.parametrize("head_dims", TILES)
def test_the_order_of_loads_is_that_of_the_table(head_dims: tuple[int, int]) -> None:
    q, k, v = (torch.zeros(1, 8, 2, width, dtype=torch.float16) for width in (head_dims[0], *head_dims))
    launch = Forward(Kind.of(q, k, v, 0.1, Packing("bshd", 8, 8)))._launch
    found = dict(zip(launch.kernel.arg_names[-len(launch.arguments) :], launch.arguments, strict=True))
    tile = TILES[head_dims]
    assert (found["BLOCK_N"], found["STAGES"], found["AHEAD"]) == tile


def test_calls_on_the_default_stream_share_a_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = 0
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream, raising=False)
    device = torch.device("cpu")
    shared = tickets.counter(device, "forward")
    assert shared.tolist() == [0]
    assert tickets.counter(device, "forward") is shared
    assert tickets.counter(device, "dq") is not tickets.counter(device, "dkv")  # they run at the same time
    stream = 77
    assert tickets.counter(device, "forward").tolist() == [0]
    assert tickets.counter(device, "forward") is not shared
    assert tickets.counter(device, "forward") is not tickets.counter(device, "forward")


@pytest.mark.parametrize(
    ("heads", "group", "kv_megabytes", "expected"),
    [(16, 1, 1, 16), (16, 1, 2.6, 8), (16, 1, 10, 2), (16, 1, 40, 1), (64, 16, 10, 16), (12, 1, 2, 4), (5, 1, 1, 1)],
)
def test_heads_side_by_side_fit_half_the_cache(heads: int, group: int, kv_megabytes: float, expected: int) -> None:
    assert heads_together(heads, group, int(kv_megabytes * 2**20), 50 << 20) == expected
