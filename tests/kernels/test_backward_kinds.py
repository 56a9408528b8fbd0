"""What the launches of a prefill are kept on and tell their kernels, and what is compiled once for all lengths."""

from __future__ import annotations

import pytest
import torch

from mla_plugin.arguments.mask import Band
from mla_plugin.kernels.launch import Launch
from mla_plugin.kernels.prefill import launch_backward as prefill_backward
from mla_plugin.kernels.prefill import launch_forward as prefill
from mla_plugin.kernels.prefill.packing import WIDE_STRIDE, Packing
from mla_plugin.kernels.tiles import Tile


def kind(tokens: int = 70, heads: int = 4, dlse: bool = False, **packing: object) -> prefill_backward._Kind:
    cu_seqlens = torch.tensor([0, 30, tokens], dtype=torch.int32)
    q, v = torch.empty(tokens, heads, 24), torch.empty(tokens, 2, 16)
    out = torch.empty(tokens, heads, 16)
    how = Packing("thd", tokens, tokens, cu_seqlens, cu_seqlens, **packing)  # type: ignore[arg-type]
    given = torch.empty(heads, tokens) if dlse else None
    return prefill_backward._kind_of((q, torch.empty(tokens, 2, 24), v, out), out, given, 0.2, how)


def test_another_length_is_another_kind_of_the_same_code() -> None:
    assert kind(70) != kind(90)
    assert kind(70).code == kind(90).code


@pytest.mark.parametrize(
    "changes",
    [
        {"heads": 8},
        {"dlse": True},
        {"mask": Band(-1, 0, False)},
        {"mask": Band(5, -1, False)},
        {"mask": Band(-1, -1, True)},
    ],
)
def test_another_code_is_compiled_on_its_own(changes: dict[str, object]) -> None:
    assert kind(**changes).code != kind().code  # type: ignore[arg-type]


def told(launch: Launch) -> dict[str, object]:
    """What a launch tells its kernel in every call, by the names of the signature."""
    return dict(zip(launch.kernel.arg_names[len(launch.given) :], launch.arguments, strict=True))


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_kv", "packing", "even"),
    [
        (32, 128, {}, (True, True)),
        (32, 127, {}, (True, False)),
        (33, 128, {}, (False, True)),
        (128, 64, {"mask": Band(-1, 0, False)}, (True, True)),
        (128, 64, {"mask": Band(-1, 0, True)}, (False, True)),  # queries without a key
        (32, 128, {"cu_seqlens_q": torch.tensor([0, 32]), "cu_seqlens_kv": torch.tensor([0, 128])}, (False, False)),
    ],
)
def test_only_whole_tiles_are_read_without_a_mask(
    seqlen_q: int, seqlen_kv: int, packing: dict[str, object], even: tuple[bool, bool]
) -> None:
    """A read past the last row changes no result; on a GPU it may be an illegal address."""
    q, k = torch.empty(1, seqlen_q, 2, 24), torch.empty(1, seqlen_kv, 2, 24)
    how = Packing("bshd", seqlen_q, seqlen_kv, **packing)  # type: ignore[arg-type]
    of_call = prefill_backward._kind_of((q, k, k, q), q, None, 0.2, how)
    found = told(prefill_backward._kv_launch(of_call, Tile(16, 64, 4, 1)))
    assert (found["EVEN_M"], found["EVEN_N"]) == even


@pytest.mark.parametrize("wide", ["q", "k", "v", "out", "dout"])
def test_offsets_are_64_bits_where_a_tile_of_some_tensor_needs_them(wide: str) -> None:
    def tensor(name: str) -> torch.Tensor:
        stride = WIDE_STRIDE if name == wide else 48
        return torch.empty_strided((1, 5, 2, 24), (5 * stride, stride, 24, 1), device="meta")

    q, k, v, out, dout = map(tensor, ("q", "k", "v", "out", "dout"))
    of_call = prefill_backward._kind_of((q, k, v, dout), out, None, 0.2, Packing("bshd", 5, 5))
    tile = Tile(16, 64, 4, 1)
    assert told(prefill._forward_launch(of_call.call, tile))["WIDE"] == (wide in "qkv")
    assert told(prefill_backward._delta_launch(of_call))["WIDE"] == (wide in ("out", "dout"))
    for launch in (prefill_backward._kv_launch(of_call, tile), prefill_backward._q_launch(of_call, tile)):
        assert told(launch)["WIDE"] == (wide != "out")
