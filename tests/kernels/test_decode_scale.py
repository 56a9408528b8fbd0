"""With a ``kv_scale`` of 0 all numbers of the cache are 0: so are results, and all scores are equal."""

from __future__ import annotations

import pytest
import torch

from mla_plugin.arguments.cache_format import FP8
from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.arguments.decode_layout import known_of
from mla_plugin.kernels.decode import launch
from mla_plugin.kernels.decode.invariant import launch as invariant
from tests.kernels.gathered_cases import call_of
from tests.kernels.gluon.hopper import hopper as hopper

pytestmark = pytest.mark.usefixtures("few_programs_of_the_sum")
LENGTHS = [300, 65, 0]
CHUNK = 128


def unscaled(heads: int, page_size: int | None) -> DecodeTensors:
    """A call whose last tiles are masked in part."""
    _, tensors = call_of((3, 1, heads, 300), page_size, FP8, torch.float16, LENGTHS)
    return tensors._replace(kv_scale=torch.tensor(0.0))


def check(out: torch.Tensor, lse: torch.Tensor | None) -> None:
    assert lse is not None
    assert torch.equal(out, torch.zeros_like(out))
    wanted = torch.tensor(LENGTHS).float().log()[:, None, None].expand_as(lse)
    torch.testing.assert_close(lse, wanted)


@pytest.mark.parametrize("heads", [16, 40])
def test_by_the_plain_kernels(heads: int) -> None:
    tensors = unscaled(heads, 16)
    check(*launch.decode(tensors, known_of(tensors)))
    check(*invariant.decode(tensors, known_of(tensors), CHUNK))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("page_size", [64, 16])
@pytest.mark.parametrize("heads", [16, 40])
def test_by_the_kernels_in_gluon(heads: int, page_size: int) -> None:
    """16 heads by the transposed kernel, 40 by the Hopper kernel, and both by its chunks."""
    tensors = unscaled(heads, page_size)
    check(*launch.decode(tensors, known_of(tensors)))
    check(*invariant.decode(tensors, known_of(tensors), CHUNK))
