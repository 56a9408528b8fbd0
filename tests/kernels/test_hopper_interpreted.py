"""The Hopper kernels in the interpreter of ``gluon``, against attention in float64; on a GPU they are compiled."""

from __future__ import annotations

import pytest

from mla_plugin.kernels.hopper.rule import LATENT
from mla_plugin.kernels.prefill import shared_heads
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
