"""A rank that fails, and ranks that disagree: all raise the same error in time, and the next call works."""

from __future__ import annotations

import datetime
import itertools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mla_plugin
from mla_plugin.context_parallel import ContextParallelError, all_gather, failure
from mla_plugin.hooks.manager import get_manager
from tests.context_parallel import pool as workers
from tests.context_parallel.case import Case, run

WAYS = ("p2p", "all_gather", "a2a")


class Fails:
    """A wrapper around every backend that raises in one of the calls of one hook."""

    def __init__(self, hook: str, number: int) -> None:
        self.hook, self.left = hook, number

    def _call(self, hook: str) -> None:
        if hook == self.hook:
            self.left -= 1
            if self.left < 0:
                raise MemoryError("out of memory, played")

    @mla_plugin.hookimpl(wrapper=True)
    def forward(self):
        self._call("forward")
        return (yield)

    @mla_plugin.hookimpl(wrapper=True)
    def backward(self):
        self._call("backward")
        return (yield)


def small(size: int, **changes: object) -> dict[str, torch.Tensor]:
    sizes = {"tokens": 6, "heads": 12, "dtype": torch.float64} | changes
    shape = (1, sizes["tokens"], sizes["heads"])
    widths = {"q": 8, "k": 8, "v": 4}
    return {n: torch.randn(*shape, w, dtype=sizes["dtype"]).requires_grad_() for n, w in widths.items()}


def fail(way: str, size: int, hook: str, number: int, guilty: int) -> tuple[str, str, float] | None:
    """In a process of the pool: a call that fails on one rank, and the next one, which must be right."""
    group = workers.groups[size]
    rank = dist.get_rank(group)
    if rank < 0:
        return None
    inputs = small(size)
    begin, said = time.time(), ("", "")
    manager, plugin = get_manager(), Fails(hook, number)
    if rank == guilty:
        manager.register(plugin, "fails")
    try:
        out = mla_plugin.attention(**inputs, cp_group=group, cp_comm_type=way)
        out.sum().backward()
    except ContextParallelError as error:
        said = (str(error), type(error.__cause__).__name__)
    finally:
        if rank == guilty:
            manager.unregister("fails")
    seconds = time.time() - begin
    run(Case(way, size, heads=12, kv_heads=12))
    return *said, seconds


@pytest.mark.parametrize(("way", "hook"), list(itertools.product(WAYS, ("forward", "backward"))))
@pytest.mark.parametrize(("size", "guilty", "number"), [(2, 0, 0), (3, 1, 1), (4, 3, 0), (4, 2, 2)])
def test_all_ranks_raise_the_same_error(pool, way, hook, size, guilty, number):
    number = min(number, {"p2p": size - 1, "all_gather": 1, "a2a": 0}[way])
    found = [answer for answer in pool.run(fail, way=way, size=size, hook=hook, number=number, guilty=guilty) if answer]
    assert len(found) == size
    texts = {text for text, _, _ in found}
    assert len(texts) == 1
    text = texts.pop()
    assert f"{hook} failed on rank {guilty} of {size}: MemoryError: out of memory, played" in text
    assert [cause for _, cause, _ in found] == ["MemoryError" if rank == guilty else "NoneType" for rank in range(size)]
    assert max(seconds for *_, seconds in found) < 10


def fail_between_messages(name: str, guilty: int) -> str | None:
    """In a process of the pool: a step of ``all_gather``'s backward fails, and the next call, which must be right."""
    group = workers.groups[3]
    if (rank := dist.get_rank(group)) < 0:
        return None

    def fails(*_: object) -> None:
        raise MemoryError("out of memory, played")

    said = ""
    with pytest.MonkeyPatch.context() as patch:
        if rank == guilty:
            patch.setattr(all_gather, name, fails)
        out = mla_plugin.attention(**small(3), cp_group=group, cp_comm_type="all_gather")
        try:
            out.sum().backward()
        except ContextParallelError as error:
            said = str(error)
    run(Case("all_gather", 3, heads=12, kv_heads=12))
    return said


@pytest.mark.parametrize("name", ["_differentiate", "_fill", "_owned"])
def test_a_failure_between_the_messages_of_all_gather(pool, name):
    found = [answer for answer in pool.run(fail_between_messages, name=name, guilty=1) if answer is not None]
    assert len(found) == 3
    assert all("backward failed on rank 1 of 3: MemoryError: out of memory, played" in text for text in found)


def memory_of_messages() -> tuple[list[int], list[int]] | None:
    """In a process of the pool: where K and V are gathered, and where ``all_gather`` sends gradients from."""
    group = workers.groups[3]
    if dist.get_rank(group) < 0:
        return None
    gathered, sent = [], []
    whole, exchange = all_gather._whole, all_gather.exchange

    def noted_whole(*arguments: Any) -> torch.Tensor:
        found = whole(*arguments)
        gathered.append(found.data_ptr())
        return found

    def noted_exchange(group: Any, send: torch.Tensor) -> torch.Tensor:
        sent.append(send.data_ptr())
        return exchange(group, send)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(all_gather, "_whole", noted_whole)
        patch.setattr(all_gather, "exchange", noted_exchange)
        out = mla_plugin.attention(**small(3), cp_group=group, cp_comm_type="all_gather")
        gathered.clear()
        out.sum().backward()
    return gathered, sent


def test_all_gather_sends_from_the_memory_of_the_gathered_keys(pool):
    """So a rank without memory can still send."""
    found = [answer for answer in pool.run(memory_of_messages) if answer is not None]
    assert len(found) == 3
    assert all(gathered == sent and len(sent) == 2 for gathered, sent in found)


class _Event:
    """Stands for a CUDA event."""

    def synchronize(self) -> None:
        pass


def left_unread(patch: pytest.MonkeyPatch) -> None:
    """As on a CUDA device: numbers are looked at when the next call begins."""
    patch.setattr(failure, "is_left_unread", lambda device: True)
    patch.setattr(failure, "_on_its_way", lambda numbers: (numbers, _Event()))


def fail_unread(way: str, hook: str) -> list[str] | None:
    """In a process of the pool: a rank fails where its status is looked at late."""
    group = workers.groups[3]
    if (rank := dist.get_rank(group)) < 0:
        return None
    said, plugin = [], Fails(hook, 0)
    with pytest.MonkeyPatch.context() as patch:
        left_unread(patch)
        # the first call of a kind waits for the other ranks' statuses
        mla_plugin.attention(**small(3), cp_group=group, cp_comm_type=way).sum().backward()
        if rank == 1:
            get_manager().register(plugin, "fails")
        for _ in range(2):  # steps of a program that goes on after an error
            try:
                out = mla_plugin.attention(**small(3), cp_group=group, cp_comm_type=way)
                said.append("forward")
                out.sum().backward()
                said.append("backward")
                mla_plugin.attention(**small(3), cp_group=group, cp_comm_type=way)
                said.append("next")
            except ContextParallelError as error:
                said.append(str(error)[:56])
            if rank == 1 and plugin.left < 0:
                get_manager().unregister("fails")
                plugin.left = 0
        run(Case(way, 3, heads=12, kv_heads=12))
    return said


@pytest.mark.parametrize(("way", "hook"), list(itertools.product(WAYS, ("forward", "backward"))))
def test_where_the_status_is_read_late(pool, way, hook):
    found = [answer for answer in pool.run(fail_unread, way=way, hook=hook) if answer]
    text = f"context parallel {hook} failed on rank 1 of 3: MemoryError"[:56]
    guilty = [text] if hook == "forward" else ["forward", text]
    others = ["forward", text] if hook == "forward" else ["forward", "backward", text]
    again = ["forward", "backward", "next"]
    assert found == [others + again, guilty + again, others + again]


def refuse(size: int, guilty: int) -> str | None:
    """In a process of the pool: a backend is missing on one rank."""
    group = workers.groups[size]
    if (rank := dist.get_rank(group)) < 0:
        return None
    with pytest.MonkeyPatch.context() as patch:
        if rank == guilty:
            patch.setenv("MLA_PLUGIN_BLOCK", "sdpa")
        with pytest.raises(RuntimeError) as found:
            mla_plugin.attention(**small(size, tokens=10), cp_group=group)
    mla_plugin.attention(**small(size, tokens=10), cp_group=group)
    with pytest.MonkeyPatch.context() as patch:  # such calls were compared: this one is drained
        left_unread(patch)
        if rank == guilty:
            patch.setenv("MLA_PLUGIN_BLOCK", "sdpa")
        with pytest.raises(RuntimeError) as drained:  # noqa: PT012 the others raise when they call again
            mla_plugin.attention(**small(size, tokens=10), cp_group=group)
            mla_plugin.attention(**small(size, tokens=10), cp_group=group)
    mla_plugin.attention(**small(size, tokens=10), cp_group=group)
    return f"{type(found.value).__name__}: {found.value} {type(drained.value).__name__}"


def test_a_backend_that_is_missing_on_one_rank(pool):
    found = [answer for answer in pool.run(refuse, size=3, guilty=2) if answer]
    assert found[2].startswith("NoBackendError: ")
    for text in found[:2]:
        assert text.startswith("ContextParallelError: context parallel forward failed on rank 2 of 3: NoBackendError: ")
    assert all(text.endswith("ContextParallelError") for text in found)


def lose_the_text() -> str | None:
    """In a process of the pool: a rank fails and the store does not have its text."""
    group = workers.groups[2]
    if (rank := dist.get_rank(group)) < 0:
        return None
    plugin = Fails("forward", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failure, "_PATIENCE", datetime.timedelta(milliseconds=100))
        patch.setattr(failure, "_store_of", lambda group: dist.HashStore())
        if rank == 0:
            get_manager().register(plugin, "fails")
        with pytest.raises(ContextParallelError) as found:
            mla_plugin.attention(**small(2), cp_group=group)
        if rank == 0:
            get_manager().unregister("fails")
    mla_plugin.attention(**small(2), cp_group=group)
    return str(found.value)


def test_a_text_that_is_lost(pool):
    found = [text for text in pool.run(lose_the_text) if text]
    assert len(found) == 2
    assert all(text.startswith("a context parallel call failed on rank 0, whose error is not in") for text in found)


DISAGREEMENTS = {
    "dtype": ({}, {"dtype": torch.float32}),
    "num_heads": ({}, {"heads": 6}),
    "max_seqlen_q": ({}, {"tokens": 8}),
    "cp_comm_type": ({}, {"cp_comm_type": "a2a"}),
    "backend": ({}, {"backend": "sdpa"}),
    "softmax_scale": ({}, {"softmax_scale": 0.5}),
    "attn_mask_type": ({}, {"attn_mask_type": "no_mask"}),
    "is_training": ({}, {"is_training": False}),
}


def disagree(size: int, guilty: int, changes: dict[str, object], tokens: int) -> str | None:
    """In a process of the pool: one rank calls with something else."""
    group = workers.groups[size]
    if (rank := dist.get_rank(group)) < 0:
        return None
    changes = dict(changes) if rank == guilty else {}
    of_tensors = {name: changes.pop(name) for name in ("dtype", "heads", "tokens") if name in changes}
    of_tensors["tokens"] = of_tensors.get("tokens", 6) + tokens
    training = changes.pop("is_training", True)
    with torch.set_grad_enabled(bool(training)), pytest.raises(ContextParallelError) as found:
        mla_plugin.attention(**small(size, **of_tensors), cp_group=group, **changes)
    mla_plugin.attention(**small(size), cp_group=group)
    return str(found.value)


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_disagree(pool, name):
    changes = DISAGREEMENTS[name][1]
    tokens = 100 + 10 * list(DISAGREEMENTS).index(name)  # a kind of call that was not compared before
    found = [text for text in pool.run(disagree, size=4, guilty=1, changes=changes, tokens=tokens) if text]
    assert len(found) == 4
    assert len(set(found)) == 1
    assert f"different {name}: rank 0 has " in found[0]


def other_than_before(how: str, *, is_late: bool) -> str | None:
    """In a process of the pool: calls that were all compared before, but rank 2 of 3 makes another one of them now."""
    group = workers.groups[3]
    if (rank := dist.get_rank(group)) < 0:
        return None
    torch.manual_seed(rank)
    is_other, offsets = rank == 2, {"cu_seqlens_q": torch.tensor([0, 6, 18], dtype=torch.int32)}
    thd = {"attn_mask_type": "padding_causal", "qkv_format": "thd"}
    calls: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "tokens": ({}, {"tokens": 4}),
        "dtype": ({}, {"dtype": torch.float32}),
        "way": ({}, {"cp_comm_type": "a2a"}),
        "scale": ({}, {"softmax_scale": 0.5}),
        "lengths": (offsets | thd, {"cu_seqlens_q": torch.tensor([0, 12, 18], dtype=torch.int32)} | thd),
        "nothing": ({}, {"tokens": 0}),
    }

    def call(changes: dict[str, Any]) -> torch.Tensor:
        changes = dict(changes)
        inputs = small(3, **{name: changes.pop(name) for name in ("tokens", "dtype") if name in changes})
        if "qkv_format" in changes:
            inputs = {name: x[0] for name, x in inputs.items()}
        return mla_plugin.attention(**inputs, cp_group=group, **changes)

    usual, other = calls.get(how, ({}, {"softmax_scale": 0.5}))
    with pytest.MonkeyPatch.context() as patch:
        if is_late:
            left_unread(patch)
        for changes in (usual, other, usual):
            out = call(changes)
            out.sum().backward()
        with pytest.raises(ContextParallelError) as found:  # noqa: PT012 it raises in one of the calls
            if how == "backward":
                out, later = call(usual), call(other)
                (later if is_other else out).sum().backward()
            else:
                call(other if is_other else usual)
            call(usual)
        call(usual)
    run(Case(size=3))
    return str(found.value)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("tokens", "max_seqlen_q: rank 0 has 18, rank 1 has 18, rank 2 has 12"),
        ("dtype", "dtype: rank 0 has torch.float64, rank 1 has torch.float64, rank 2 has torch.float32"),
        ("way", "cp_comm_type: rank 0 has 'p2p', rank 1 has 'p2p', rank 2 has 'a2a'"),
        ("lengths", "cu_seqlens_q: rank 0 has [0, 6, 18], rank 1 has [0, 6, 18], rank 2 has [0, 12, 18]"),
        ("nothing", "max_seqlen_q: rank 0 has 18, rank 1 has 18, rank 2 has 0"),
        ("backward", "softmax_scale: rank 0 has 0.3535533905932738, rank 1 has 0.3535533905932738, rank 2 has 0.5"),
    ],
)
def test_a_rank_that_calls_with_something_else_later(pool, how, words):
    found = {text for text in pool.run(other_than_before, how=how, is_late=False) if text}
    assert len(found) == 1
    assert words in found.pop()


@pytest.mark.parametrize("how", ["scale", "backward"])
def test_where_messages_fit_each_other_it_is_seen_late(pool, how):
    found = {text for text in pool.run(other_than_before, how=how, is_late=True) if text}
    assert len(found) == 1
    assert "different softmax_scale: rank 0 has 0.35" in found.pop()


def out_of_step() -> str | None:
    """In a process of the pool: one rank is in its backward while the other makes its next call."""
    group = workers.groups[2]
    if (rank := dist.get_rank(group)) < 0:
        return None
    out = mla_plugin.attention(**small(2), cp_group=group)
    with pytest.raises(ContextParallelError) as found:
        out.sum().backward() if rank else mla_plugin.attention(**small(2), cp_group=group)
    run(Case())
    return str(found.value)


def test_a_backward_on_one_rank_alone(pool):
    found = {text for text in pool.run(out_of_step) if text}
    assert len(found) == 1
    assert "different the call: rank 0 has 'forward', rank 1 has 'backward'" in found.pop()


def alone() -> str | None:
    """In a process of the pool: a rank makes a call that the other one never makes."""
    members = [0, 1]
    group = dist.new_group(members, timeout=datetime.timedelta(milliseconds=300))
    if dist.get_rank() != 0:
        return None
    with pytest.raises(ContextParallelError) as found:
        mla_plugin.attention(**small(2), cp_group=group)
    return str(found.value)


def test_a_rank_that_waits_says_for_what(pool):
    (text,) = (text for text in pool.run(alone) if text)
    assert text.startswith("rank 0 of 2 waited for the other ranks before a context parallel forward")
