"""What the Hopper backward is launched with, without a GPU: descriptors, memory for tickets, heads side by side."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_plugin.arguments.mask import Band
from mla_plugin.kernels.hopper import launch_backward, plan
from mla_plugin.kernels.hopper.launch_backward import Backward
from mla_plugin.kernels.prefill.packing import Kind, Packing

CAUSAL, TOP_LEFT, OPEN, WINDOW = Band(-1, 0, True), Band(-1, 0, False), Band(-1, -1, True), Band(30, 0, True)
SHAPES = {"bshd": (2, 300, 4), "sbhd": (300, 2, 4), "bhsd": (2, 4, 300), "thd": (300, 4)}
KV_SHAPES = {"bshd": (2, 200, 2), "sbhd": (200, 2, 2), "bhsd": (2, 2, 200), "thd": (200, 2)}


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_backward, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch_backward, "counter", lambda device, kernel: torch.zeros(1, dtype=torch.int32))


class Given:
    """A call's tensors and its launches."""

    def __init__(
        self, layout: str, band: Band, same_lengths: bool = False, head_dims: tuple[int, int] = (192, 128)
    ) -> None:
        head_dim_qk, head_dim_v = head_dims
        shapes, kv_shapes = SHAPES[layout], KV_SHAPES[layout]
        self.inputs = tuple(
            torch.zeros(*shape, width + 8, dtype=torch.float16)[..., :width]
            for shape, width in (
                *((shapes, head_dim_qk), (kv_shapes, head_dim_qk)),
                *((kv_shapes, head_dim_v), (shapes, head_dim_v)),
            )
        )
        q, k, v, dout = self.inputs
        lengths = {}
        if layout == "thd":
            lengths = {
                "cu_seqlens_q": torch.tensor([0, 40, 290], dtype=torch.int32),
                "cu_seqlens_kv": torch.tensor([0, 90, 190], dtype=torch.int32),
                "cu_seqlens_q_padded": torch.tensor([4, 48, 300], dtype=torch.int32),
                "cu_seqlens_kv_padded": torch.tensor([2, 96, 200], dtype=torch.int32),
            }
        packing = Packing(layout, 250 if lengths else 300, 100 if lengths else 200, mask=band, **lengths)
        kind = Kind.of(q, k, v, 0.1, packing)._replace(same_lengths=same_lengths)
        self.offsets = packing.offsets()
        self.rows = tuple(torch.zeros(packing.layout.lse_shape(q.shape)) for _ in range(2))
        self.gradients = tuple(torch.zeros(x.shape, dtype=x.dtype) for x in (q, k, v))
        self.backward = Backward(kind, dout.stride())

    def kv(self) -> list[tuple[Any, tuple[Any, ...]]]:
        return self.backward.calls_kv(self.inputs, self.rows, self.gradients[1:], self.offsets)

    def q(self) -> list[tuple[Any, tuple[Any, ...]]]:
        return self.backward.calls_q(self.inputs, self.rows, self.gradients[0], self.offsets)


def by_name(launch: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """A launch's arguments by the kernel's names."""
    return dict(zip(launch.kernel.arg_names, (*arguments, *launch.arguments), strict=True))


@pytest.mark.parametrize("layout", SHAPES)
def test_descriptors_say_where_the_tensors_lie(layout: str) -> None:
    given = Given(layout, CAUSAL)
    axes = {"bshd": (0, 2, 1), "sbhd": (1, 2, 0), "bhsd": (0, 1, 2), "thd": (None, 1, 0)}[layout]
    calls = [by_name(*given.kv()[-1]), by_name(*given.q()[-1])]
    for found in calls:
        for name, x in zip(("Q", "K", "V", "DOut"), given.inputs, strict=True):
            source = found[name]
            assert source.base.data_ptr() == x.data_ptr()
            assert source.block_shape == [1, 1, 64, 64]
            assert source.shape == [*(1 if axis is None else x.shape[axis] for axis in axes), x.shape[-1]]
            assert source.strides[1:] == [*(x.stride(axis) for axis in axes[1:]), 1]
            if axes[0] is not None:
                assert source.strides[0] == x.stride(axes[0])
            assert source is calls[0][name]


@pytest.mark.parametrize("layout", SHAPES)
def test_every_tensor_has_its_place(layout: str) -> None:
    given = Given(layout, CAUSAL)
    kv, q = by_name(*given.kv()[-1]), by_name(*given.q()[-1])
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    lengths = dict(zip(names, given.offsets, strict=True))
    for found in (kv, q):
        assert found["Lse"] is given.rows[0]
        assert found["Delta"] is given.rows[1]
        assert all(found[name] is x for name, x in lengths.items())
        assert (found["QK0"], found["QK1"], found["V_PANELS"], found["group"]) == (128, 64, 2, 2)
    assert (q["DQ"], kv["DK"], kv["DV"]) == given.gradients
    for found, names in ((q, ("dqb", "dqh", "dqm")), (kv, ("dkb", "dkh", "dkn")), (kv, ("dvb", "dvh", "dvn"))):
        x = found[names[0][:2].upper()]
        axes = {"bshd": (0, 2, 1), "sbhd": (1, 2, 0), "bhsd": (0, 1, 2), "thd": (None, 1, 0)}[layout]
        for name, axis in zip(names, axes, strict=True):
            assert axis is None or found[f"stride_{name}"] == x.stride(axis)
    assert (q["num_heads"], kv["num_heads"]) == (4, 2)
    if layout != "thd":
        assert (q["num_tiles"], q["num_tickets"]) == (3, 3 * 8)
        assert (kv["num_tiles"], kv["num_tickets"]) == (2, 2 * 4)


@pytest.mark.parametrize(
    ("head_dims", "parts"),
    [((192, 128), (128, 64, 2)), ((64, 64), (64, 0, 1)), ((96, 64), (64, 32, 1)), ((256, 256), (256, 0, 4))],
)
def test_sums_have_powers_of_2_columns(head_dims: tuple[int, int], parts: tuple[int, int, int]) -> None:
    given = Given("bshd", CAUSAL, head_dims=head_dims)
    for call in (*given.kv(), *given.q()):
        found = by_name(*call)
        assert (found["QK0"], found["QK1"], found["V_PANELS"]) == parts


def test_at_256_a_key_tile_has_64_keys() -> None:
    given = Given("bshd", CAUSAL, head_dims=(256, 256))
    kv, q = by_name(*given.kv()[-1]), by_name(*given.q()[-1])
    assert (q["num_tiles"], q["num_tickets"]) == (3, 3 * 8)
    assert (kv["num_tiles"], kv["num_tickets"]) == (4, 4 * 4)
    planned = by_name(*Given("thd", CAUSAL, head_dims=(256, 256)).kv()[0])
    assert planned["QUERIES"] == 64
    assert planned["Work"].numel() == plan.HEADER + 2 * (200 // 64 + 2)


def test_packed_sequences_have_plans_in_memory_of_the_call() -> None:
    """For key tiles queries and keys are exchanged."""
    given = Given("thd", OPEN)
    lengths_q, lengths_kv, starts_q, starts_kv = given.offsets
    dq, dk, dv = given.gradients
    (first, own), (_, kernel) = given.kv()
    planned = by_name(first, own)
    assert planned["Work"].dtype == torch.int32
    assert planned["Work"].numel() == plan.HEADER + 2 * (200 // 128 + 2)
    assert kernel[8] is planned["Work"]
    assert own[1:] == (dk, dv, None, lengths_kv, lengths_q, starts_kv)
    sizes = [planned[name] for name in ("num_sequences", "num_rows", "num_heads", "first_size", "second_size")]
    assert sizes == [2, 200, 2, 2 * 192, 2 * 128]
    (first, own), (_, kernel) = given.q()
    planned = by_name(first, own)
    assert planned["Work"].numel() == plan.HEADER + 2 * (300 // 128 + 2)
    assert kernel[7] is planned["Work"]
    assert own[1:] == (dq, None, None, lengths_q, lengths_kv, starts_q)
    assert [planned[name] for name in ("num_sequences", "num_rows", "first_size")] == [2, 300, 4 * 192]


@pytest.mark.parametrize(
    ("band", "same_lengths", "of_queries", "of_keys"),
    [
        (OPEN, False, "length", "length"),
        (WINDOW, False, "length", "length"),
        (CAUSAL, True, "top_left", "top_left"),
        (CAUSAL, False, "bottom_right", "top_left"),
        (TOP_LEFT, False, "top_left", "bottom_right"),
        (TOP_LEFT, True, "top_left", "top_left"),
    ],
)
def test_the_longest_tiles_are_first(band: Band, same_lengths: bool, of_queries: str, of_keys: str) -> None:
    given = Given("thd", band, same_lengths)
    assert by_name(*given.q()[0])["RANK"] == of_queries
    assert by_name(*given.kv()[0])["RANK"] == of_keys


def test_equally_long_tiles_need_no_counter() -> None:
    for band, has_counter in ((OPEN, False), (WINDOW, True), (CAUSAL, True)):
        given = Given("bshd", band)
        for calls in (given.kv(), given.q()):
            (call,) = calls
            found = by_name(*call)
            assert (found["Work"] is not None) == has_counter
            assert found["DYNAMIC"] == has_counter


def test_dq_alone_overlaps_the_kernel_before_it() -> None:
    """What it reads must be complete before dK and dV begin."""
    given = Given("thd", CAUSAL)
    *plans, (dkv, _) = given.kv()
    *more, (dq, _) = given.q()
    assert dq.options["launch_pdl"]
    assert not any(launch.options.get("launch_pdl") for launch in (dkv, *(plan for plan, _ in (*plans, *more))))
