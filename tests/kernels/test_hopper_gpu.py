"""The Hopper forward on a Hopper GPU, against attention in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mla_plugin.kernels.hopper.rule import plain_kernel_for
from mla_plugin.kernels.prefill.launch_forward import forward
from mla_plugin.kernels.prefill.packing import Kind
from tests.kernels.hopper_draws import Draw, draw
from tests.kernels.prefill_oracle import attend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

MASKS = {
    "full": (-1, -1, False),
    "causal": (-1, 0, True),
    "causal_top_left": (-1, 0, False),
    "window": (100, 0, True),
    "band": (70, 30, False),
}


@pytest.fixture(autouse=True)
def _nan_in_new_memory() -> Iterator[None]:
    """What is not written stays NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def check(given: Draw) -> None:
    q, k, v, scale, packing = given.on("cuda")
    assert plain_kernel_for(Kind.of(q, k, v, scale, packing)) is None
    out, lse = (x.cpu().double() for x in forward(q, k, v, scale, packing))
    clean = [x.nan_to_num(0.0) for x in (given.q, given.k, given.v)]
    wanted, wanted_lse, *_ = attend(given.call, *clean, torch.zeros(out.shape), None)
    assert torch.equal(torch.isinf(lse), torch.isinf(wanted_lse))
    seen = ~torch.isinf(wanted_lse)
    assert not seen.any() or (lse - wanted_lse)[seen].abs().max() < 1e-4
    assert torch.isfinite(out).all()
    difference, norm = (out - wanted).norm(dim=-1), wanted.norm(dim=-1)
    assert (difference <= (1e-2 if given.q.dtype == torch.bfloat16 else 2e-3) * norm).all()


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd", "thd"])
@pytest.mark.parametrize("mask", MASKS)
def test_deepseek(layout: str, mask: str) -> None:
    left, right, bottom_right = MASKS[mask]
    for seed in range(6):
        options = {"left": left, "right": right, "bottom_right": bottom_right, "head_dims": (192, 128)}
        check(draw(seed, layout, dtype=torch.bfloat16, **options))


@pytest.mark.parametrize("seed", range(100, 160))
def test_factors_in_combination(seed: int) -> None:
    check(draw(seed))
