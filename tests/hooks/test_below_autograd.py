"""The hooks run below autograd, as their specification warns: a gradient inside them has to be written out."""

from collections.abc import Generator

import torch

import mla_plugin
from mla_plugin.hooks.manager import get_manager


class Prober:
    """Tries to record a graph within each hook."""

    def __init__(self) -> None:
        self.recorded: list[bool] = []

    def _probe(self, x: torch.Tensor) -> None:
        with torch.enable_grad():
            self.recorded.append((x.detach().requires_grad_() * 2).grad_fn is not None)

    @mla_plugin.hookimpl(wrapper=True)
    def forward(self, tensors: mla_plugin.AttentionTensors) -> Generator[None, object, object]:
        self._probe(tensors.q)
        return (yield)

    @mla_plugin.hookimpl(wrapper=True)
    def backward(self, dout: torch.Tensor) -> Generator[None, object, object]:
        self._probe(dout)
        return (yield)


def test_autograd_records_nothing_inside_the_hooks() -> None:
    prober = Prober()
    get_manager().register(prober, "prober")
    try:
        q = torch.randn(1, 5, 2, 8, requires_grad=True)
        mla_plugin.attention(q, q, q).sum().backward()
    finally:
        get_manager().unregister("prober")
    assert prober.recorded == [False, False]
