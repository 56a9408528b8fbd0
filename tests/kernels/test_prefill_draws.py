"""Random calls of the prefill kernels against attention by its definition: every layout, mask, length and storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from mla_plugin.kernels import tiles
from mla_plugin.kernels.prefill import launch_backward as prefill_backward
from mla_plugin.kernels.prefill import launch_forward as prefill
from tests.kernels.prefill_draws import Draw, draw
from tests.kernels.prefill_oracle import attend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter's tiles are as large as whole sequences here."""
    caches = (prefill._forward_launch, prefill_backward._kv_launch, prefill_backward._q_launch)
    monkeypatch.setattr(tiles, "_INTERPRETED_TILE", tiles.Tile(16, 32, 4, 1))
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def poisoned(x: torch.Tensor, outside: torch.Tensor, value: float = torch.nan) -> torch.Tensor:
    """x with NaN there, in its own storage; an expanded x stays as it is."""
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
        return x
    x[outside] = value
    return x


@pytest.fixture
def _fresh_memory_holds_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    def filling(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def fill(*arguments: object, **options: object) -> torch.Tensor:
            x = make(*arguments, **options)
            return x.fill_(torch.nan) if x.is_floating_point() else x

        return fill

    for owner, name in ((torch.Tensor, "new_empty"), (torch, "empty_like")):
        monkeypatch.setattr(owner, name, filling(getattr(owner, name)))


def results(given: Draw) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv; what must not influence them is NaN or infinite, and nothing saved is contiguous."""
    q = poisoned(given.q, given.without_keys(given.q.shape))
    k, v = (poisoned(x, given.outside(x.shape, "kv")) for x in (given.k, given.v))
    dout, dlse = poisoned(given.dout, given.without_keys(given.dout.shape), torch.inf), given.dlse
    if dlse is not None:
        dlse = poisoned(dlse, given.lse_without_keys(dlse.shape), -torch.inf).to(DEVICE)
    q, k, v, dout = (x.to(DEVICE) for x in (q, k, v, dout))
    out, lse = prefill.forward(q, k, v, given.call.scale, given.packing)
    saved = [
        poisoned(out.clone(), given.outside(out.shape, "q").to(DEVICE)),
        poisoned(lse.clone(), given.outside_lse(lse.shape).to(DEVICE)),
    ]
    saved = [x.mT.contiguous().mT for x in saved]
    gradients = prefill_backward.backward(q, k, v, *saved, dout, dlse, given.call.scale, given.packing)
    return [out, lse, *gradients]


@pytest.mark.usefixtures("_fresh_memory_holds_nan")
@pytest.mark.parametrize("seed", range(48))
def test_as_by_definition(seed: int) -> None:
    given = draw(seed)
    found = results(given)
    exact = attend(given.call, given.q, given.k, given.v, given.dout, given.dlse)
    for name, x, wanted in zip(("out", "lse", "dq", "dk", "dv"), found, exact, strict=True):
        assert x.shape == wanted.shape, name
        torch.testing.assert_close(
            x.cpu().double(), wanted, rtol=1e-4, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}"
        )
