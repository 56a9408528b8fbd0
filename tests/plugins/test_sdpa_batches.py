"""The CPU route takes sequences of equal lengths together, in parts: how often it calls, what it holds and gives."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import mla_plugin
from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.mask import OPEN, Band
from mla_plugin.hooks.attention import Plan, Residuals
from mla_plugin.hooks.types import Platform
from mla_plugin.plugins import sdpa
from mla_plugin.plugins.sdpa import batches, tiles
from tests.plugins.calls import both_passes, request, tensors

FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
BACKWARD = f"{FORWARD}_backward"
ONE_BY_ONE = batches.Sizes(1, 1, 1)


class Calls(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def offsets(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def packed_call(lengths: Sequence[int], starts: Sequence[int] | None = None, **changes: Any) -> tuple[Any, Any]:
    """A packed causal call; ``starts`` of B + 1 places with room between them."""
    longest = max(lengths)
    call = request(batch_size=1, max_seqlen_q=sum(lengths) if starts is None else starts[-1], **changes)
    call = call.replace(max_seqlen_kv=call.max_seqlen_q)
    given = tensors(call)
    cu = offsets(lengths)
    padded = None if starts is None else torch.tensor(starts, dtype=torch.int32)
    given = AttentionTensors(given.q[0], given.k[0], given.v[0], given.softmax_scale, cu, cu, padded, padded)
    mask = "padding_causal_bottom_right" if "bottom_right" in call.attn_mask_type else "padding_causal"
    call = call.replace(
        qkv_format="thd",
        attn_mask_type=mask,
        batch_size=len(lengths),
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        pad_between_seqs=starts is not None,
    )
    return call, given


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ratio", [1, 2])
def test_a_dense_batch_of_short_sequences_is_one_call_of_the_kernel(dtype: torch.dtype, ratio: int) -> None:
    call = request(batch_size=64, max_seqlen_q=16, max_seqlen_kv=16, dtype=dtype, num_kv_heads=2 // ratio)
    with Calls() as calls:
        both_passes(call, tensors(call))
    assert (calls.count[FORWARD], calls.count[BACKWARD]) == (1, 1)


def test_a_large_batch_takes_its_parts_and_no_more() -> None:
    call = request(batch_size=256, max_seqlen_q=16, max_seqlen_kv=16, num_heads=4, num_kv_heads=4, head_dim_qk=192)
    with Calls() as calls:
        both_passes(call, tensors(call))
    most = batches.COPIED.count + 1
    assert 1 < calls.count[FORWARD] <= most
    assert 1 < calls.count[BACKWARD] <= most


def test_packed_sequences_take_a_call_for_each_length() -> None:
    for lengths, expected in (((7,) * 64, 1), ((5, 7) * 32, 2), ((9, 5, 7, 5) * 16, 3), ((0, 6, 0, 6), 1)):
        call, given = packed_call(lengths)
        with Calls() as calls:
            both_passes(call, given)
        assert (calls.count[FORWARD], calls.count[BACKWARD]) == (expected, expected), lengths


def test_equal_lengths_without_gaps_are_not_copied() -> None:
    call, given = packed_call((16,) * 8, num_kv_heads=2, head_dim_v=24)
    with Calls() as calls:
        sdpa.forward(Plan(call, Platform(), "sdpa", "sdpa"), given)
    copies = {"index_select", "index_copy_", "clone", "copy_", "zero_"} & set(calls.count)
    assert copies <= {"clone"}  # of lse, whose heads come first
    assert calls.count["clone"] <= 1


@pytest.mark.parametrize("mask", ["causal", "causal_bottom_right"])
@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 2}, {"num_heads": 6, "num_kv_heads": 2}, {"head_dim_v": 40}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_room", [False, True])
def test_parts_and_neighbours_change_nothing(
    mask: str, changes: dict[str, Any], dtype: torch.dtype, *, has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = (5, 9, 5, 0, 9, 17, 5)
    starts = (2, 8, 17, 24, 24, 36, 53, 60) if has_room else None
    call, given = packed_call(lengths, starts, attn_mask_type=mask, dtype=dtype, **changes)
    results = []
    monkeypatch.setattr(tiles, "FORWARD_SIDE", 4)
    monkeypatch.setattr(tiles, "BACKWARD_SIDE", 3)
    monkeypatch.setattr(tiles, "ROWS_PER_THREAD", 1)
    for sizes in (None, batches.Sizes(1, 600, 600), ONE_BY_ONE):
        if sizes:
            monkeypatch.setattr(batches, "COPIED", sizes)
            monkeypatch.setattr(batches, "AS_GIVEN", sizes)
        torch.manual_seed(1)
        output, gradients = both_passes(call, given, dlse=torch.ones(call.num_heads, given.q.shape[0]))
        results.append((output.out, output.lse, gradients.dq, gradients.dk, gradients.dv))
    for other in results[1:]:
        for found, expected in zip(other, results[0], strict=True):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("band", [OPEN, Band(-1, 0, bottom_right=False), Band(-1, 0, bottom_right=True)])
def test_tiles_have_every_visible_score_once(band: Band) -> None:
    for len_q, len_kv, side in ((7, 7, 3), (8, 3, 3), (3, 8, 2), (12, 5, 4), (5, 12, 5), (4, 4, 9), (1, 6, 2)):
        seen = torch.zeros(len_q, len_kv, dtype=torch.int64)
        for tile in tiles.tiles(len_q, len_kv, band, side):
            shape = seen[tile.queries, tile.keys].shape
            assert max(shape) <= side
            assert not tile.is_causal or shape[0] == shape[1]
            seen[tile.queries, tile.keys] += torch.ones(shape, dtype=torch.int64).tril(0 if tile.is_causal else side)
        hidden = band.hides(torch.arange(len_q)[:, None], torch.arange(len_kv), band.offset(len_q, len_kv))
        assert torch.equal(seen, torch.ones_like(seen) if hidden is None else (~hidden).long())


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_the_same_in_tiles(poison: float, monkeypatch: pytest.MonkeyPatch) -> None:
    call = request(batch_size=1, max_seqlen_q=19, max_seqlen_kv=19, num_heads=2, num_kv_heads=1)
    given = tensors(call)
    given.k[0, 11, 0, 3] = poison
    torch.manual_seed(1)  # of dout
    results = [both_passes(call, given, dlse=torch.ones(1, 2, 19))]
    monkeypatch.setattr(batches, "AS_GIVEN", ONE_BY_ONE)
    monkeypatch.setattr(batches, "COPIED", ONE_BY_ONE)
    for name in ("FORWARD_SIDE", "BACKWARD_SIDE"):
        monkeypatch.setattr(tiles, name, 4)
    monkeypatch.setattr(tiles, "ROWS_PER_THREAD", 1)
    monkeypatch.setattr(batches, "_terms_of_tiny", lambda *_: None)
    torch.manual_seed(1)
    results.append(both_passes(call, given, dlse=torch.ones(1, 2, 19)))
    for name in ("out", "lse"):
        at_once, in_tiles = (getattr(output, name) for output, _ in results)
        torch.testing.assert_close(in_tiles, at_once, equal_nan=True)
    for name in ("dq", "dk", "dv"):  # the kernel multiplies what is hidden by 0: tiles spread NaN less
        at_once, in_tiles = (getattr(gradients, name) for _, gradients in results)
        is_finite = at_once.isfinite()
        torch.testing.assert_close(in_tiles[is_finite], at_once[is_finite])


def test_dropout_is_the_same_in_both_passes_whatever_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """With V = I, out is the dropped weights; dv of dout = I is their transpose."""
    monkeypatch.setattr(batches, "COPIED", batches.Sizes(1, 2000, 2000))
    call = request(batch_size=7, max_seqlen_q=16, max_seqlen_kv=16, head_dim_v=16, num_heads=1, dropout_p=0.3)
    given = tensors(call, dropout_seed=torch.tensor([3]))
    eye = torch.eye(16).view(1, 16, 1, 16).expand(7, -1, -1, -1).contiguous()
    given = dataclasses.replace(given, v=eye)
    plan = Plan(call, Platform(), "sdpa", "sdpa")
    output = sdpa.forward(plan, given)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    gradients = sdpa.backward(plan, Residuals(given, output.out, output.lse), eye, None)
    torch.testing.assert_close(gradients.dv[:, :, 0], output.out[:, :, 0].transpose(1, 2))


def test_nan_of_one_sequence_leaves_the_others_bits() -> None:
    call = request(batch_size=5, max_seqlen_q=7, max_seqlen_kv=7)
    given = tensors(call)
    plan = Plan(call, Platform(), "sdpa", "sdpa")
    before = sdpa.forward(plan, given)
    given.q[2] = torch.nan
    after = sdpa.forward(plan, given)
    others = [0, 1, 3, 4]
    assert after.lse[2].isnan().all()
    assert after.out[2].isnan().all()
    assert torch.equal(after.out[others], before.out[others])
    assert torch.equal(after.lse[others], before.lse[others])


def peak(call: Callable[[], Any]) -> int:
    """Bytes that PyTorch's allocator held at most at once during a call, what it returns included."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = call()
    held = highest = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            highest = max(highest, held)
    del result
    return highest


@pytest.mark.parametrize(
    ("count", "length", "heads", "head_dim"),
    [(128, 32, 16, 32), (16, 256, 16, 32), (2, 1024, 16, 32), (1, 4096, 2, 64), (1, 2048, 4, 128)],
)
def test_packed_bfloat16_takes_little_more_memory_than_pytorch(
    count: int, length: int, heads: int, head_dim: int
) -> None:
    """At most 1.5 times the peak of F.scaled_dot_product_attention on the same tokens, inputs left out."""
    q, k, v, dout = (torch.randn(count * length, heads, head_dim, dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dense = [x.detach().view(count, length, heads, head_dim).transpose(1, 2).contiguous() for x in (q, k, v, dout)]
    dense_leaves = [x.requires_grad_() for x in dense[:3]]
    cu = offsets((length,) * count)
    options = {"qkv_format": "thd", "cu_seqlens_q": cu, "max_seqlen_q": length, "max_seqlen_kv": length}

    def ours(backward: bool) -> Any:
        with torch.set_grad_enabled(backward):
            out = mla_plugin.attention(*leaves, backend="sdpa", **options)
        return (out, torch.autograd.grad(out, leaves, dout)) if backward else out

    def theirs(backward: bool) -> Any:
        with torch.set_grad_enabled(backward):
            out = F.scaled_dot_product_attention(*dense_leaves, is_causal=True)
        return (out, torch.autograd.grad(out, dense_leaves, dense[3])) if backward else out

    for backward in (False, True):
        found, expected = peak(lambda b=backward: ours(b)), peak(lambda b=backward: theirs(b))
        assert found <= 1.5 * expected, (backward, found / expected)
