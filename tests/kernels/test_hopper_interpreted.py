"""The Hopper kernels in the interpreter of ``gluon``, against attention in float64; on a GPU they are compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_plugin.arguments.mask import Band
from mla_plugin.kernels.hopper import launch_backward, launch_forward
from mla_plugin.kernels.hopper.rule import LATENT
from mla_plugin.kernels.launch import Launch
from mla_plugin.kernels.prefill import shared_heads
from mla_plugin.kernels.prefill.launch_backward import backward
from mla_plugin.kernels.prefill.launch_forward import forward
from mla_plugin.kernels.prefill.packing import Packing
from tests.kernels import test_hopper_backward_gpu, test_hopper_gpu
from tests.kernels.gluon.hopper import hopper as hopper
from tests.kernels.hopper_draws import draw
from tests.kernels.versions import needs_hopper_kernels

pytestmark = [pytest.mark.usefixtures("hopper"), needs_hopper_kernels]


@pytest.mark.parametrize("seed", range(500, 516))
def test_forward(seed: int) -> None:
    test_hopper_gpu.check(draw(seed))


@pytest.mark.parametrize("seed", range(550, 566))
def test_forward_over_latents(seed: int) -> None:
    test_hopper_gpu.check(draw(seed, head_dims=LATENT))


@pytest.mark.parametrize("seed", range(600, 616))
def test_backward(seed: int) -> None:
    test_hopper_backward_gpu.check(draw(seed))


@pytest.mark.parametrize("seed", range(700, 704))
def test_copies_of_heads_of_keys(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are heads of q; dk and dv are summed in float32."""
    monkeypatch.setattr(shared_heads, "copies", lambda kind: kind.num_heads // kind.num_kv_heads)
    test_hopper_backward_gpu.check(draw(seed))


def _launched(
    monkeypatch: pytest.MonkeyPatch, packing: Packing, leading: tuple[int, ...]
) -> tuple[list[str], list[torch.Tensor]]:
    """The kernels of a forward and a backward, in order; and what they computed."""
    interpreted, names = Launch.__call__, []

    def call(self: Launch, *arguments: Any) -> None:
        names.append(self.kernel.__name__)
        interpreted(self, *arguments)

    monkeypatch.setattr(Launch, "__call__", call)
    q, k, v, dout = (torch.randn(*leading, 1, 64, dtype=torch.float16) for _ in range(4))
    out, lse = forward(q, k, v, 0.1, packing)
    gradients = backward(q, k, v, out, lse, dout, None, 0.1, packing)
    return names, [out, lse, *gradients]


def test_nothing_is_launched_between_the_kernels_that_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """dQ begins while dK and dV are computed: whatever it needs is launched before those."""
    offsets = torch.tensor([0, 30, 70], dtype=torch.int32)
    lengths = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"), offsets)
    monkeypatch.setattr("mla_plugin.kernels.hopper.rule.plain_dq_because", lambda *head_dims: None)
    names, _ = _launched(monkeypatch, Packing("thd", 40, 40, mask=Band(-1, 0, True), **lengths), (70,))
    assert names[-2:] == ["attention_backward_kv_kernel", "attention_backward_q_kernel"]
    assert names[:-2] == ["plan_kernel", "attention_forward_kernel", "delta_kernel", "plan_kernel", "plan_kernel"]


@pytest.mark.parametrize(("seqlen", "has_more"), [(300, False), (400, True)])
def test_a_program_of_its_own_for_every_tile(seqlen: int, has_more: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three programs need no counter for three tiles; if there are more, they add to it."""
    poisoned = torch.tensor([1 << 20], dtype=torch.int32)  # a ticket beyond the last one
    counters = {}
    for module in (launch_forward, launch_backward):
        monkeypatch.setattr(module, "counter", lambda device, kernel: counters.setdefault(kernel, poisoned.clone()))
    monkeypatch.setattr("mla_plugin.kernels.hopper.rule.plain_dq_because", lambda *head_dims: None)
    _, found = _launched(monkeypatch, Packing("bshd", seqlen, seqlen, mask=Band(-1, 0, True)), (1, seqlen))
    assert has_more or all(x.isfinite().all() for x in found)
    assert set(counters) == {"forward", "dkv", "dq"}
    for counter in counters.values():
        assert (counter.item() != poisoned.item()) == has_more
