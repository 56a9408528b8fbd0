"""The backward's loads by tensor descriptors, in the interpreter: it needs a tensor where the launch has an address."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from mla_plugin.arguments.mask import Band
from mla_plugin.kernels import tiles
from mla_plugin.kernels.prefill import launch_backward as prefill_backward
from mla_plugin.kernels.prefill import launch_forward as prefill
from mla_plugin.kernels.prefill.packing import Packing, columns_of
from tests.kernels.prefill_oracle import Call, attend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {"bshd": "bsh", "sbhd": "sbh", "bhsd": "bhs"}
CACHES = (prefill_backward._kv_launch, prefill_backward._q_launch)


class Memory:
    """Makes descriptors of known tensors by their addresses, and notes their blocks."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = {x.data_ptr(): x for x in tensors}
        self.blocks: list[tuple[int, ...]] = []

    def descriptor(
        self,
        address: int,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        block: tuple[int, ...],
    ) -> TensorDescriptor:
        assert self.tensors[address].dtype == dtype
        self.blocks.append(block)
        return TensorDescriptor(self.tensors[address], list(shape), [*strides, 1], list(block))


@pytest.fixture(autouse=True)
def _tiles_for_descriptors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tiles, "_INTERPRETED_TILE", tiles.Tile(16, 64, 4, 1))
    monkeypatch.setattr(prefill_backward, "_has_tensor_memory_access", lambda device: True)
    for cache in CACHES:
        cache.cache_clear()
    yield
    for cache in CACHES:
        cache.cache_clear()


def tensor(layout: str, tokens: int, heads: int, width: int) -> torch.Tensor:
    """[.., width] with gaps between its rows, so that no stride is another's multiple by chance."""
    sizes = {"b": 2, "s": tokens, "h": heads}
    x = torch.randn(*(sizes[axis] for axis in SHAPES[layout]), width + 4, device=DEVICE)[..., :width]
    assert x.data_ptr() % 16 == 0
    return x


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU the kernels take descriptors themselves: test_prefill_gpu.py")
@pytest.mark.parametrize(
    ("layout", "head_dims", "seqlen_q", "seqlen_kv", "left", "right"),
    [
        ("bshd", (48, 96), 19, 83, -1, 0),
        ("sbhd", (48, 96), 32, 64, -1, -1),
        ("bhsd", (48, 96), 37, 70, 9, 3),
        ("bshd", (24, 16), 19, 66, -1, 0),
        ("bhsd", (96, 24), 17, 66, -1, 0),
        ("sbhd", (16, 48), 19, 66, -1, 0),
    ],
)
def test_gradients_by_descriptors(
    seqlen_q: int,
    seqlen_kv: int,
    left: int,
    right: int,
    head_dims: tuple[int, int],
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks of columns: two of both, one of both, two of either; whole tiles and parts."""
    torch.manual_seed(0)
    head_dim_qk, head_dim_v = head_dims
    q, k = tensor(layout, seqlen_q, 2, head_dim_qk), tensor(layout, seqlen_kv, 1, head_dim_qk)
    v, dout = tensor(layout, seqlen_kv, 1, head_dim_v), tensor(layout, seqlen_q, 2, head_dim_v)
    memory = Memory(q, k, v, dout)
    monkeypatch.setattr(prefill_backward, "descriptor", memory.descriptor)
    packing = Packing(layout, seqlen_q, seqlen_kv, mask=Band(left, right, True))
    out, lse = prefill.forward(q, k, v, 0.2, packing)
    found = prefill_backward.backward(q, k, v, out, lse, dout, None, 0.2, packing)
    call = Call(layout, (0, 0), (0, 0), (seqlen_q,) * 2, (seqlen_kv,) * 2, left, right, True, 0.2)
    _, _, *exact = attend(call, q, k, v, dout, None)
    for name, x, wanted in zip(("dq", "dk", "dv"), found, exact, strict=True):
        torch.testing.assert_close(x.double(), wanted, rtol=1e-4, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")
    columns = columns_of(*head_dims)
    of_q, of_v = columns[:2], columns[2:]
    each_kernel = [
        *((1, 1, 16, width) for width in of_q if width),
        *((1, 1, 64, width) for width in of_q if width),
        *((1, 1, 64, width) for width in of_v if width),
        *((1, 1, 16, width) for width in of_v if width),
    ]
    assert memory.blocks == each_kernel * 2


@pytest.mark.parametrize(
    ("changes", "described"),
    [
        ({}, True),
        ({"seqlen_q": 90, "right": -1}, True),
        ({"seqlen_q": 90}, False),  # queries without a key
        ({"seqlen_q": 90, "right": -1, "left": 3, "bottom_right": False}, False),
        ({"lengths": True}, False),
        ({"gap": 3}, False),
        ({"offset": 1}, False),
        ({"expanded": True}, False),
    ],
)
def test_what_descriptors_cannot_read_is_read_by_pointers(changes: dict[str, object], described: bool) -> None:
    call = {"seqlen_q": 40, "left": -1, "right": 0, "bottom_right": True, "lengths": False, "gap": 4, "offset": 0}
    call |= {"expanded": False} | changes
    q, k = torch.randn(1, call["seqlen_q"], 2, 24), torch.randn(1, 80, 2, 24)
    row = 24 + call["gap"]
    v = torch.randn(80 * 2 * row + call["offset"])[call["offset"] :].view(1, 80, 2, row)[..., :24]
    v = v[:, :, :1].expand(1, 80, 2, 24) if call["expanded"] else v
    offsets = torch.tensor([0, 30], dtype=torch.int32) if call["lengths"] else None
    mask = Band(call["left"], call["right"], call["bottom_right"])
    packing = Packing("bshd", call["seqlen_q"], 80, offsets, offsets, mask=mask)
    kind = prefill_backward._kind_of((q, k, v, torch.empty_like(q)), q, None, 0.2, packing)
    assert kind.by_descriptors == described
