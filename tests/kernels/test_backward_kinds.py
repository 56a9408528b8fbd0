"""What the backward's launches are kept on, and what is compiled once for all lengths."""

from __future__ import annotations

import pytest
import torch

from mla_plugin.kernels.prefill import launch_backward as prefill_backward
from mla_plugin.kernels.prefill.packing import Packing


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
    "changes", [{"heads": 8}, {"dlse": True}, {"window_right": 0}, {"window_left": 5}, {"bottom_right": True}]
)
def test_another_code_is_compiled_on_its_own(changes: dict[str, object]) -> None:
    assert kind(**changes).code != kind().code  # type: ignore[arg-type]
