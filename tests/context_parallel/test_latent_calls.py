"""Latent attention over a group, besides its values: errors, failures, operators, what is kept and what is sent."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import BaseTorchFunctionMode
from torch.utils.checkpoint import checkpoint

import mla_plugin
from mla_plugin.arguments.attention import LENGTHS
from mla_plugin.context_parallel import ContextParallelError, order, transport
from mla_plugin.context_parallel.latent import latents, operator
from mla_plugin.hooks.manager import get_manager
from mla_plugin.operations.latent import operator as plain
from tests.context_parallel import pool as workers
from tests.context_parallel.latent_case import LatentCase, run
from tests.context_parallel.test_failures import Fails
from tests.latent_calls import LatentCall, draw

WAYS = ("all_gather", "a2a")


def rank_of(size: int) -> int:
    return dist.get_rank(workers.groups[size])


def alone(layout: str) -> None:
    """In a process of the pool: a group of one rank."""
    if rank_of(1) < 0:
        return
    more = {"cu_seqlens_q": torch.tensor([0, 4, 9], dtype=torch.int32)} if layout == "thd" else {}
    call = draw(layout, dtype=torch.float32, **more)
    results = []
    for group in ({}, {"cp_group": workers.groups[1]}, {"cp_group": DeviceMesh("cpu", [dist.get_rank()])}):
        with pytest.MonkeyPatch.context() as patch:
            for sender in ("hop", "exchange", "gather"):
                patch.setattr(transport, sender, None)
            out = mla_plugin.latent_attention(**call.inputs(), **call.arguments, **group)
            results.append((out, *torch.autograd.grad(out, list(call.tensors.values()), torch.ones_like(out))))
    for others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], others, strict=True))


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_a_group_of_one_is_the_plain_call(pool, layout):
    pool.run(alone, layout=layout)


ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "ring": ({"cp_comm_type": "p2p"}, ValueError, "cp_comm_type='p2p'; latent_attention accepts: all_gather, a2a"),
    "way": ({"cp_comm_type": "ulysses"}, ValueError, "cp_comm_type='ulysses'; latent_attention accepts"),
    "no_way": ({"cp_comm_type": ["a2a"]}, ValueError, "cp_comm_type=['a2a']; latent_attention accepts"),
    "heads": ({"cp_comm_type": "a2a", "heads": 6}, ValueError, "6 heads over 4 ranks, expected a multiple of 4"),
    "odd": ({"lengths": (5, 5)}, ValueError, "5 tokens of q on a rank; sequences are cut into 8 chunks"),
    "window": ({"window_size": (3, 3), "attn_mask_type": "no_mask"}, ValueError, "cp_comm_type='a2a' takes it"),
    "lengths": ({"lengths": (4, 8)}, ValueError, "4 queries and 8 keys on a rank; cp_comm_type='a2a' takes it"),
    "longest": ({"max_seqlen_q": 7}, ValueError, "max_seqlen_q=7 with 8 tokens on each of 4 ranks; expected 32"),
    "weights": ({"w_uk": torch.zeros(8, 20, 16, dtype=torch.float64)}, ValueError, "it looks transposed"),
    "mask": ({"attn_mask_type": "arbitrary"}, ValueError, "latent_attention takes no attention_mask"),
    "packed": ({"layout": "thd", "cu_seqlens_q": [0, 12, 32]}, ValueError, "padded to a multiple of 8"),
    "group": ({"cp_group": 3}, TypeError, "cp_group is int; expected a torch.distributed ProcessGroup"),
}


def wrong(name: str) -> None:
    """In a process of the pool: a wrong call of all ranks, with a transport that sends nothing."""
    given, kind, text = ERRORS[name]
    given = {k: torch.tensor(x, dtype=torch.int32) if k in LENGTHS else x for k, x in given.items()}
    drawn = {k: given.pop(k) for k in ("layout", "heads", "lengths") if k in given}
    call = draw(**{"heads": 8, "lengths": (8, 8), "batch": 1} | drawn)
    arguments = call.inputs() | call.arguments | {"cp_group": workers.groups[4]} | given
    with pytest.MonkeyPatch.context() as patch:
        for sender in ("exchange", "gather"):
            patch.setattr(latents, sender, None)
        patch.setattr(dist, "all_reduce", None)
        with pytest.raises(kind) as found:
            mla_plugin.latent_attention(**arguments)
    assert text in str(found.value), found.value


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_before_any_message(pool, name):
    pool.run(wrong, name=name)


def fail(way: str, size: int, hook: str, number: int, guilty: int) -> str | None:
    """In a process of the pool: a call that fails on one rank, and the next one, which must be right."""
    if (rank := rank_of(size)) < 0:
        return None
    call = draw(heads=12, lengths=(6, 6), batch=1)
    manager, said = get_manager(), ""
    if rank == guilty:
        manager.register(Fails(hook, number), "fails")
    try:
        out = mla_plugin.latent_attention(**call.inputs(), cp_group=workers.groups[size], cp_comm_type=way)
        out.sum().backward()
    except ContextParallelError as error:
        said = str(error)
    finally:
        if rank == guilty:
            manager.unregister("fails")
    run(LatentCase(way, size))
    return said


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("hook", "size", "guilty", "number"), [("forward", 3, 1, 0), ("backward", 4, 2, 0)])
def test_all_ranks_raise_the_same_error(pool, way, hook, size, guilty, number):
    found = {
        text for text in pool.run(fail, way=way, size=size, hook=hook, number=number, guilty=guilty) if text is not None
    }
    assert len(found) == 1
    assert f"{hook} failed on rank {guilty} of {size}: MemoryError: out of memory, played" in found.pop()


def disagree(name: str, rank_width: int) -> str | None:
    """In a process of the pool: rank 1 of 4 calls with something else."""
    own = rank_of(4) == 1
    dims = (16, 8, 12, rank_width + (name == "kv_lora_rank" and own))
    call = draw(heads=12, lengths=(6, 6), batch=1, dims=dims)
    changes = {"cp_comm_type": "a2a"} if name == "cp_comm_type" and own else {}
    with pytest.raises(ContextParallelError) as found:
        mla_plugin.latent_attention(**call.inputs(), cp_group=workers.groups[4], **changes)
    run(LatentCase(size=4))
    return str(found.value)


@pytest.mark.parametrize(("name", "width"), [("kv_lora_rank", 31), ("cp_comm_type", 41)])
def test_ranks_that_disagree(pool, name, width):
    found = set(pool.run(disagree, name=name, rank_width=width))
    assert len(found) == 1
    assert f"different {name}: rank 0 has " in found.pop()


def compiled(way: str, layout: str) -> None:
    """In a process of the pool: fullgraph, with gradients, against eager."""
    size = 2
    if (rank := rank_of(size)) < 0:
        return
    torch.manual_seed(rank)
    more = {"cu_seqlens_q": torch.tensor([0, 8, 20], dtype=torch.int32)} if layout == "thd" else {}
    call = draw(layout, heads=4, lengths=(10, 10), dtype=torch.float32, **more)

    def layer(*tensors: torch.Tensor) -> torch.Tensor:
        inputs = call.inputs(**dict(zip(call.tensors, tensors, strict=True)))
        given = {"cp_group": workers.groups[size], "cp_comm_type": way, **call.arguments}
        out, lse = mla_plugin.latent_attention(**inputs, **given, return_lse=True)
        return out.sin().sum() + lse.cos().sum()

    results = []
    for function in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        loss = function(*call.tensors.values())
        results.append((loss, *torch.autograd.grad(loss, list(call.tensors.values()))))
    for eager, found in zip(*results, strict=True):
        torch.testing.assert_close(found, eager, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("way", "layout"), [("all_gather", "bshd"), ("a2a", "thd")])
def test_compiled_equals_eager(pool, way, layout):
    pool.run(compiled, way=way, layout=layout)


def kept(way: str) -> None:
    """In a process of the pool: bytes that stay for the backward, eager and through the operator."""
    if rank_of(2) < 0:
        return
    call = draw(heads=4, lengths=(64, 64), dtype=torch.bfloat16, dims=(128, 64, 128, 512))
    inputs = call.inputs()
    weight = call.tensors["weight"].untyped_storage().data_ptr()
    for is_observed in (False, True):
        sizes: list[int] = []

        def pack(x: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(0 if x.untyped_storage().data_ptr() == weight else x.numel() * x.element_size())
            return x

        with pytest.MonkeyPatch.context() as patch, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            patch.setattr(plain, "is_observed", lambda *_, value=is_observed: value)
            given = {"cp_group": workers.groups[2], "cp_comm_type": way, "return_lse": True}
            out, lse = mla_plugin.latent_attention(**inputs, **given)
        counted = (inputs["q"], inputs["c_kv"], inputs["k_rope"], out, lse)
        least = sum(x.numel() * x.element_size() for x in counted)
        assert least <= sum(sizes) <= 1.1 * least
        out.sum().backward()


@pytest.mark.parametrize("way", WAYS)
def test_what_is_kept_for_the_backward(pool, way):
    pool.run(kept, way=way)


def sent(way: str) -> None:
    """In a process of the pool: numbers that are gathered, and given back as gradients."""
    size = 4
    tokens, rank, rope = 6, 20, 8
    messages: list[tuple[str, int, torch.dtype]] = []
    call = draw(heads=8, lengths=(tokens, tokens), batch=1, dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("gather", "exchange"):
            function = getattr(transport, name)

            def counted(group: Any, x: torch.Tensor, name: str = name, function: Any = function) -> torch.Tensor:
                messages.append((name, x.numel(), x.dtype))
                return function(group, x)

            patch.setattr(latents, name, counted)
        out = mla_plugin.latent_attention(**call.inputs(), cp_group=workers.groups[size], cp_comm_type=way)
        out.sum().backward()
    latent = ("gather", tokens * (rank + rope), torch.bfloat16)
    assert messages == [latent, latent, ("exchange", size * tokens * (rank + rope), torch.float32)]


@pytest.mark.parametrize("way", WAYS)
def test_what_is_sent_does_not_grow_with_heads(pool, way):
    pool.run(sent, way=way)


def in_flight(way: str, reentrant: bool | None) -> None:
    """In a process of the pool: two calls before the backward of the first, and checkpointing."""
    size = 3
    if rank_of(size) < 0:
        return
    calls = [draw(heads=3, lengths=(6, 6)) for _ in range(2)]
    given = {"cp_group": workers.groups[size], "cp_comm_type": way}

    def attend(call: LatentCall, *tensors: torch.Tensor) -> torch.Tensor:
        return mla_plugin.latent_attention(**call.inputs(**dict(zip(call.tensors, tensors, strict=True))), **given)

    def gradients(out: torch.Tensor, call: LatentCall) -> tuple[torch.Tensor, ...]:
        for x in call.tensors.values():
            x.grad = None
        out.square().sum().backward()
        return tuple(x.grad for x in call.tensors.values())

    one_by_one = [gradients(attend(call, *call.tensors.values()), call) for call in calls]
    if reentrant is None:
        outs = [attend(call, *call.tensors.values()) for call in calls]
    else:
        outs = [checkpoint(attend, call, *call.tensors.values(), use_reentrant=reentrant) for call in calls]
    together = [gradients(out, call) for out, call in zip(outs, calls, strict=True)]
    for wanted, found in zip(one_by_one, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_two_calls_in_flight_and_checkpointing(pool, way, reentrant):
    pool.run(in_flight, way=way, reentrant=reentrant)


def decided_again(way: str) -> None:
    """In a process of the pool: with the operator, offsets come back as copies and the decision is lost."""
    if rank_of(2) < 0:
        return
    cu = torch.tensor([0, 5, 11], dtype=torch.int32)
    call = draw(heads=2, lengths=(6, 6), attn_mask_type="padding", cu_seqlens_q=cu)
    given = {**call.arguments, "cp_group": workers.groups[2], "cp_comm_type": way}
    results = []
    for mode in (contextlib.nullcontext(), BaseTorchFunctionMode()):
        with pytest.MonkeyPatch.context() as patch, torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
            patch.setattr(operator.latent_attention.decisions, "find", lambda *_: None)
            with mode:
                out = mla_plugin.latent_attention(**call.inputs(), **given)
            results.append(torch.autograd.grad(out.square().sum(), list(call.tensors.values())))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("way", WAYS)
def test_a_decision_that_is_lost(pool, way):
    pool.run(decided_again, way=way)


def empty(way: str, lengths: tuple[int, int]) -> None:
    if rank_of(2) < 0:
        return
    call = draw(heads=2, lengths=lengths, attn_mask_type="no_mask")
    given = {"cp_group": workers.groups[2], "cp_comm_type": way, "return_lse": True}
    out, lse = mla_plugin.latent_attention(**call.inputs(), **call.arguments, **given)
    assert not out.any()
    assert (lse == -torch.inf).all()
    out.sum().backward()
    assert all(x.grad.shape == x.shape and not x.grad.any() for x in call.tensors.values())


@pytest.mark.parametrize("way", WAYS)
def test_no_queries_or_no_keys(pool, way):
    for lengths in ((0, 4), (4, 0)):
        pool.run(empty, way=way, lengths=lengths)


def test_the_order_of_tokens_is_a_permutation():
    """What gathers and scatters latents of packed sequences, for sizes that the calls above do not have."""
    starts = torch.tensor([0, 16, 16, 48, 80], dtype=torch.int32)
    for size, tokens in ((2, 44), (8, 11)):
        found = order.packed_order(starts, size, tokens)
        assert torch.equal(found.sort().values, torch.arange(size * tokens))


def second(way: str) -> None:
    """In a process of the pool: a second derivative in each tensor, of each gradient."""
    if rank_of(2) < 0:
        return
    call = draw(heads=4, lengths=(6, 6))
    leaves = list(call.tensors.values())
    out = mla_plugin.latent_attention(**call.inputs(), cp_group=workers.groups[2], cp_comm_type=way)
    for gradient in torch.autograd.grad(out.sum(), leaves, create_graph=True):
        for x in leaves:
            with pytest.raises(NotImplementedError, match="latent_attention has no second derivative"):
                torch.autograd.grad(gradient.sum(), x, retain_graph=True)


@pytest.mark.parametrize("way", WAYS)
def test_no_second_derivative(pool, way):
    pool.run(second, way=way)
