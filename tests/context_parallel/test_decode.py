"""Decode over a cache whose tokens lie on 2, 3 and 4 ranks, against one process in float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mla_plugin
from mla_plugin import DecodeLengths, DecodeTensors, reference
from mla_plugin.context_parallel import ContextParallelError, held_positions, held_tokens, transport
from tests.context_parallel import pool as workers
from tests.context_parallel.test_failures import Fails, left_unread

H, R, DR, SCALE = 5, 16, 8, 0.3
LENGTHS = (29, 2, 13, 0, 1)


@dataclass(frozen=True)
class Decode:
    """One call.

    Attributes:
        size: ranks.
        interleave: tokens that lie together.
        queries: of each sequence.
        page: tokens of a page; None for a contiguous cache.
        pads: some keys are hidden by leftpad_kv.
        on_host: the lengths come as ``DecodeLengths``.
    """

    size: int
    interleave: int = 1
    queries: int = 1
    page: int | None = None
    causal: bool = True
    pads: bool = False
    on_host: bool = False
    dtype: torch.dtype = torch.float64


def paged(rows: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [B, S, D] as pages in a random order, and their table; no NaN rows: pages are whole."""
    batch, tokens, width = rows.shape
    count = -(-tokens // page)
    whole = rows.new_zeros(batch, count * page, width)
    whole[:, :tokens] = rows
    order = torch.randperm(batch * count)
    pages = torch.empty(batch * count, page, width, dtype=rows.dtype)
    pages[order] = whole.view(batch * count, page, width)
    return pages, order.view(batch, count).int()


def run(case: Decode, **more: Any) -> None:
    """In a process of the pool: this rank's call against the oracle over the whole cache."""
    group = workers.groups[case.size]
    if (rank := dist.get_rank(group)) < 0:
        return
    torch.manual_seed(3)
    batch, capacity = len(LENGTHS), max(LENGTHS) + 3
    q_nope_abs = torch.randn(batch, case.queries, 2 * H, R, dtype=case.dtype)[:, :, ::2]
    q_rope = torch.randn(batch, case.queries, H, DR, dtype=case.dtype)
    cache = torch.randn(batch, capacity, R + DR, dtype=case.dtype)
    seqlens_kv = torch.tensor(LENGTHS, dtype=torch.int32)
    leftpad_kv = torch.tensor([11, 0, 13, 0, 1], dtype=torch.int32) if case.pads else None
    whole = DecodeTensors(
        q_nope_abs,
        q_rope,
        *cache.split((R, DR), -1),
        SCALE,
        causal=case.causal,
        seqlens_kv=seqlens_kv,
        leftpad_kv=leftpad_kv,
    )
    exact = reference.decode(whole)
    own = cache[:, held_positions(capacity, case.size, rank, interleave=case.interleave)]
    arguments: dict[str, Any] = {"kv_cache": own}
    if case.page is not None:
        arguments["kv_cache"], arguments["page_table"] = paged(own, case.page)
    lengths = DecodeLengths(LENGTHS, seqlens_kv=seqlens_kv) if case.on_host else seqlens_kv
    arguments |= {"seqlens_kv": lengths, "leftpad_kv": leftpad_kv, "causal": case.causal, "softmax_scale": SCALE}
    arguments |= {"cp_group": group, "cp_interleave": case.interleave, **more}
    out, lse = mla_plugin.decode(q_nope_abs, q_rope, **arguments, return_lse=True)
    limit = 1e-13 if case.dtype == torch.float64 else 2e-6
    assert out.dtype == case.dtype
    torch.testing.assert_close(out.double(), exact.out, rtol=limit, atol=limit)
    torch.testing.assert_close(lse.double(), exact.lse, rtol=limit, atol=limit)
    assert torch.equal(mla_plugin.decode(q_nope_abs, q_rope, **arguments), out)
    others = [torch.empty_like(out) for _ in range(case.size)]
    dist.all_gather(others, out, group=group)
    assert all(torch.equal(other, out) for other in others)


CASES = [
    *(Decode(size, interleave, queries) for size, interleave, queries in itertools.product((2, 3, 4), (1, 4), (1, 3))),
    *(Decode(size, page, queries, page) for size, page, queries in ((2, 4, 1), (2, 4, 3), (4, 4, 2), (3, 1, 2))),
    Decode(2, 1, 3, page=4),
    *(Decode(4, 2, queries, pads=True) for queries in (1, 3)),
    Decode(3, 4, 3, page=4, pads=True),
    Decode(4, 1, 3, causal=False),
    *(Decode(2, 4, queries, page=4, on_host=True) for queries in (1, 2)),
    Decode(4, 1, 2, dtype=torch.float32),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode(pool, case):
    pool.run(run, case=case)


@pytest.mark.parametrize(("size", "interleave"), list(itertools.product((1, 2, 3, 4), (1, 2, 5))))
def test_held_tokens_and_positions(size, interleave):
    lengths = torch.arange(40, dtype=torch.int32)
    for rank in range(size):
        held = held_tokens(lengths, size, rank, interleave=interleave)
        assert held.dtype == torch.int32
        assert [held_tokens(n, size, rank, interleave=interleave) for n in range(40)] == held.tolist()
        positions = held_positions(40, size, rank, interleave=interleave)
        assert [int((positions < n).sum()) for n in range(40)] == held.tolist()
    with torch.device("meta"):  # the default device does not matter
        everything = torch.cat([held_positions(40, size, rank, interleave=interleave) for rank in range(size)])
    assert torch.equal(everything.sort().values, torch.arange(40))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"size": 2, "rank": 2}, ValueError, "rank=2 of size=2"),
        ({"size": 2, "rank": 0, "interleave": 0}, ValueError, "cp_interleave=0; expected at least 1"),
        (
            {"size": 2, "rank": 0, "interleave": 2**30},
            ValueError,
            f"cp_interleave={2**30}; expected at most {2**30 - 1}",
        ),
        ({"size": 2, "rank": 0, "interleave": 1.5}, TypeError, "cp_interleave=1.5; expected a positive int"),
        ({"size": 2, "rank": 0, "interleave": True}, TypeError, "cp_interleave=True; expected a positive int"),
    ],
)
def test_errors_of_the_helpers(arguments, error, words):
    for helper in (held_tokens, held_positions):
        with pytest.raises(error, match=words):
            helper(7, **arguments)


@pytest.mark.parametrize(
    ("tokens", "error", "words"),
    [
        (torch.tensor([1, -2]), ValueError, r"tokens=\[1, -2\]; expected numbers of at least 0"),
        (torch.tensor([1.5]), TypeError, r"tokens has dtype torch\.float32; expected int32 or int64"),
        (-1, ValueError, "tokens=-1; expected at least 0"),
    ],
)
def test_held_tokens_of_wrong_numbers(tokens, error, words):
    with pytest.raises(error, match=words):
        held_tokens(tokens, 2, 0)
    with pytest.raises(ValueError, match=f"tokens={2**70}; expected at most 2147483647"):
        held_positions(2**70, 2, 0)


def small(**changes: Any) -> dict[str, Any]:
    arguments = {
        "q_nope_abs": torch.randn(2, 2, H, R),
        "q_rope": torch.randn(2, 2, H, DR),
        "kv_cache": torch.randn(2, 6, R + DR),
        "softmax_scale": SCALE,
        "seqlens_kv": torch.tensor([12, 3], dtype=torch.int32),
        "cp_group": workers.groups[2],
    }
    return arguments | changes


def alone() -> None:
    """A group of one rank: the plain call, and nothing sent."""
    if dist.get_rank(workers.groups[1]) < 0:
        return
    arguments = small(cp_group=workers.groups[1], seqlens_kv=torch.tensor([6, 3], dtype=torch.int32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "gather", None)
        out = mla_plugin.decode(**arguments)
    del arguments["cp_group"]
    assert torch.equal(out, mla_plugin.decode(**arguments))


def test_a_group_of_one_is_the_plain_call(pool):
    pool.run(alone)


ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "lengths": ({"seqlens_kv": None}, ValueError, "decode with cp_group needs seqlens_kv"),
    "interleave": ({"cp_interleave": 0}, ValueError, "cp_interleave=0; expected at least 1"),
    "interleave_type": ({"cp_interleave": "page"}, TypeError, "cp_interleave='page'; expected a positive int"),
    "group": ({"cp_group": "cp"}, TypeError, "cp_group is str"),
    "queries": ({"q_rope": torch.zeros(2, 1, H, DR)}, ValueError, "differ in [B, S_q, H]"),
    "cache": ({"kv_cache": torch.zeros(3, 6, R + DR)}, ValueError, "3 sequences"),
    "gradient": ({"q_rope": torch.zeros(2, 2, H, DR, requires_grad=True)}, NotImplementedError, "requires grad"),
    "tensor": ({"q_rope": None}, TypeError, "q_rope is NoneType"),
}


def wrong(name: str) -> None:
    """In a process of the pool: a wrong call of all ranks, with a transport that sends nothing."""
    if dist.get_rank(workers.groups[2]) < 0:
        return
    changes, kind, text = ERRORS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "gather", None)
        patch.setattr(dist, "all_reduce", None)
        with pytest.raises(kind) as found:
            mla_plugin.decode(**small(**changes))
    assert text in str(found.value), found.value


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_before_any_message(pool, name):
    pool.run(wrong, name=name)


def fail(how: str) -> str | None:
    """In a process of the pool: rank 1 of 2 cannot, and the next call is right."""
    if (rank := dist.get_rank(workers.groups[2])) < 0:
        return None
    manager, changes = mla_plugin.hooks.manager.get_manager(), {}
    if how == "backend" and rank == 1:
        manager.register(Fails("forward", 0), "fails")
    if how == "room" and rank == 1:
        changes = {"kv_cache": torch.randn(2, 5, R + DR)}
    if how == "setting":  # of a kind that was not compared before
        changes = {"softmax_scale": (0.7, 0.1)[rank]}
    if how == "lengths":
        changes = {"seqlens_kv": torch.tensor([12, (3, 4)[rank]], dtype=torch.int32)}
    try:
        with pytest.raises((ContextParallelError, ValueError)) as found:
            mla_plugin.decode(**small(**changes))
    finally:
        if how == "backend" and rank == 1:
            manager.unregister("fails")
    run(Decode(2))
    return str(found.value)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("backend", "context parallel decode failed on rank 1 of 2: MemoryError: out of memory, played"),
        (
            "room",
            "seqlens_kv=[12, 3] with cp_interleave=1 are [6, 1] tokens on rank 1 of 2; its cache has room for 0 to 5",
        ),
        ("setting", "different softmax_scale: rank 0 has 0.7, rank 1 has 0.1"),
        ("lengths", "different seqlens_kv: rank 0 has [12, 3], rank 1 has [12, 4]"),
    ],
)
def test_all_ranks_raise(pool, how, words):
    found = [text for text in pool.run(fail, how=how) if text is not None]
    assert len(found) == 2
    assert all(words in text for text in found), found


def differ_later(how: str) -> str | None:
    """In a process of the pool, as on a CUDA device: such calls were compared, and now ranks differ."""
    if (rank := dist.get_rank(workers.groups[2])) < 0:
        return None
    lengths = DecodeLengths([12, 3], device="cpu")
    arguments = small(q_nope_abs=torch.randn(2, 1, H, R), q_rope=torch.randn(2, 1, H, DR), seqlens_kv=lengths)
    with pytest.MonkeyPatch.context() as patch:
        left_unread(patch)
        for scale in (0.25, 0.5):
            mla_plugin.decode(**arguments | {"softmax_scale": scale})
        if how == "lengths" and rank:
            lengths.update([5, 3])
        mla_plugin.decode(**arguments | {"softmax_scale": (0.25, 0.5)[rank] if how == "scale" else 0.25})
        with pytest.raises(ContextParallelError) as found:
            mla_plugin.decode(**arguments)
    run(Decode(2))
    return str(found.value)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("scale", "different softmax_scale: rank 0 has 0.25, rank 1 has 0.5"),
        ("lengths", "different seqlens_kv: rank 0 has [12, 3], rank 1 has [5, 3]"),
    ],
)
def test_ranks_that_differ_later(pool, how, words):
    found = {text for text in pool.run(differ_later, how=how) if text is not None}
    assert len(found) == 1
    assert words in found.pop()


def nothing() -> None:
    if dist.get_rank(workers.groups[2]) < 0:
        return
    empty = small(kv_cache=torch.zeros(2, 0, R + DR), seqlens_kv=torch.zeros(2, dtype=torch.int32))
    out, lse = mla_plugin.decode(**empty, return_lse=True)
    assert not out.any()
    assert (lse == -torch.inf).all()
    none = small(q_nope_abs=torch.zeros(2, 0, H, R), q_rope=torch.zeros(2, 0, H, DR))
    assert mla_plugin.decode(**none).shape == (2, 0, H, R)


def test_no_keys_on_any_rank_and_no_queries(pool):
    pool.run(nothing)


def layers() -> None:
    """All layers of a step share this rank's lengths, which follow those of the step."""
    if (rank := dist.get_rank(workers.groups[2])) < 0:
        return
    arguments = small(q_nope_abs=torch.randn(2, 1, H, R), q_rope=torch.randn(2, 1, H, DR))
    lengths = DecodeLengths([12, 3], device="cpu")
    for is_inference in (True, False):  # what is made under inference_mode can be updated outside of it
        with torch.inference_mode(is_inference):
            mla_plugin.decode(**arguments | {"seqlens_kv": lengths})
    schedules = dict(lengths._schedules)
    (schedule,) = (found for found in schedules.values() if hasattr(found, "lengths"))
    lengths.update([5, 8])
    assert lengths._schedules == schedules
    wanted = torch.tensor([3, 4] if rank == 0 else [2, 4], dtype=torch.int32)
    assert torch.equal(schedule.lengths.host, wanted)
    assert torch.equal(schedule.lengths.seqlens_kv, wanted)
    out = mla_plugin.decode(**arguments | {"seqlens_kv": lengths})
    plain = torch.tensor([5, 8], dtype=torch.int32)
    assert torch.equal(out, mla_plugin.decode(**arguments | {"seqlens_kv": plain}))


def test_lengths_of_a_step_are_shared(pool):
    pool.run(layers)


def compiled() -> None:
    if dist.get_rank(workers.groups[2]) < 0:
        return
    torch.manual_seed(dist.get_rank(workers.groups[2]))
    arguments = small(return_lse=True)
    q = arguments.pop("q_nope_abs")

    def step(q: torch.Tensor) -> torch.Tensor:
        out, lse = mla_plugin.decode(q * 2, **arguments)
        return out.sin().sum(-1).transpose(1, 2) + lse

    found = torch.compile(step, backend="aot_eager", fullgraph=True)(q)
    torch.testing.assert_close(found, step(q))


def test_compiled_equals_eager(pool):
    pool.run(compiled)
