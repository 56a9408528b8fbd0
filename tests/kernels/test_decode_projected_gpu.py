"""Absorbed decode with W_UK and W_UV in its kernels, compiled, on a GPU: random calls, graphs, streams, addresses."""

from __future__ import annotations

import pytest
import torch

from mla_plugin.operations.decode.projected import decode_projected
from tests.kernels.projected_draws import Call, draw

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(60))
def test_random_calls(seed: int, dtype: torch.dtype) -> None:
    call = draw(seed, dtype, small=False)
    if call.tensors().capacity * len(call.query) > 6000 and call.query.shape[1] > 64:
        pytest.skip("read by descriptors")
    step = call.step()
    first, second = call.run(step), call.run(step)  # by tensors, by addresses
    call.assert_right(first)
    assert first.equal(second)


def with_lengths(seed: int = 0) -> Call:
    seeds = (x for x in range(seed, 200))
    calls = (draw(x, torch.bfloat16, small=False) for x in seeds)
    return next(x for x in calls if x.leftpad_kv is not None and x.query.shape[1] == 16 and x.c_kv.shape[2] > 200)


def operate(call: Call) -> torch.Tensor | None:
    given = call.query, call.c_kv, call.k_rope, call.weight, call.dim_nope, call.dim_v
    return decode_projected(*given, softmax_scale=call.softmax_scale, ranges=call.ranges)


def test_a_graph_is_replayed_with_other_lengths_on_another_stream() -> None:
    call = with_lengths()
    call.c_kv.nan_to_num_(0)
    call.k_rope.nan_to_num_(0)
    assert operate(call) is not None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = operate(call)
    assert found is not None
    for end, start in ((200, 3), (1, 0), (130, 129), (0, 0)):
        call.seqlens_kv.fill_(end)
        call.leftpad_kv.fill_(start)
        call.query.normal_()
        found.fill_(torch.nan)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            graph.replay()
        torch.cuda.synchronize()
        call.assert_right(found)


def test_addresses_that_are_no_multiple_of_16() -> None:
    call = with_lengths()
    assert operate(call) is not None
    for name in ("query", "weight", "ranges"):
        x = getattr(call, name)
        moved = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x)
        changed = Call(**{**vars(call), name: moved})
        found = operate(changed)
        assert found is not None, name
        changed.assert_right(found)


def test_nothing_waits_for_the_device() -> None:
    call = with_lengths()
    assert operate(call) is not None
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert operate(call) is not None
    finally:
        torch.cuda.set_sync_debug_mode("default")
