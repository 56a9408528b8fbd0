"""The lengths of a decode step that the host knows: what they take, and how schedules follow them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mla_plugin
from mla_plugin import DecodeLengths
from mla_plugin.arguments import decode
from mla_plugin.arguments.decode import Profile
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.operations.decode.api import described_call


class Scheduled:
    def __init__(self, lengths: DecodeLengths) -> None:
        self.seen = [lengths.host.tolist()]
        self.is_needed = True

    def renew(self, lengths: DecodeLengths) -> bool:
        self.seen.append(lengths.seqlens_kv.tolist())
        return self.is_needed


def test_lengths_keep_one_schedule_for_each_key_and_make_a_new_one_when_they_change() -> None:
    lengths = DecodeLengths([3, 4], device="cpu")
    schedule, same, another = (lengths.schedule(key, Scheduled) for key in ("a", "a", "b"))
    assert schedule is same
    assert schedule is not another
    memory = lengths.seqlens_kv
    lengths.update(torch.tensor([5, 6]))
    assert lengths.seqlens_kv is memory
    assert schedule.seen == another.seen == [[3, 4], [5, 6]]
    assert lengths.host.tolist() == [5, 6]
    assert len(lengths) == 2
    schedule.is_needed = False
    lengths.update([7, 8])
    assert lengths.schedule("a", Scheduled) is not schedule
    assert lengths.schedule("b", Scheduled) is another


def test_lengths_do_not_follow_the_list_that_they_were_made_of() -> None:
    host = torch.tensor([3, 4], dtype=torch.int32)
    lengths = DecodeLengths(host, device="cpu")
    host += 1
    assert lengths.host.tolist() == lengths.seqlens_kv.tolist() == [3, 4]


NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("host", "seqlens_kv", "error", "message"),
    [
        ([1, -2], None, ValueError, "one non-negative length per sequence"),
        ([[1], [2]], None, ValueError, "one non-negative length per sequence"),
        (torch.tensor([1.0]), None, TypeError, "expected int32 or int64"),
        ([1, 2.5], None, TypeError, "host lengths have dtype torch.float32; expected int32 or int64"),
        (torch.empty(1, dtype=torch.int32, device="meta"), None, ValueError, "host lengths are on meta"),
        ([1, 2], torch.tensor([1, 2]), ValueError, r"seqlens_kv is torch\.int64 \[2\].*expected int32 \[2\]"),
        ([1, 2], torch.tensor([1], dtype=torch.int32), ValueError, "host has 2 lengths"),
        (
            [1, 2],
            torch.tensor([1, 3], dtype=torch.int32),
            ValueError,
            r"\[1, 2\] and seqlens_kv is \[1, 3\]",
        ),
        ([1, 2], [1, 2], TypeError, r"seqlens_kv is list; expected a torch.Tensor int32 \[2\]"),
        ([1, 2], NESTED, TypeError, "seqlens_kv is a nested tensor; expected a dense one"),
        (None, NESTED, TypeError, "seqlens_kv is a nested tensor; expected a dense one"),
        ([1, 2**31], None, ValueError, r"\[1, 2147483648\]; expected at most 2147483647"),
        (torch.tensor([2**32 + 5]), None, ValueError, r"\[4294967301\]; expected at most 2147483647"),
        (torch.tensor([-(2**32)]), None, ValueError, "one non-negative length per sequence"),
        ([2**63], None, TypeError, "host lengths are list, which PyTorch cannot convert to a tensor"),
        (["3"], None, TypeError, "a list of ints or a CPU tensor"),
        (None, None, TypeError, "neither host nor seqlens_kv has lengths"),
        (None, [1, 2], TypeError, r"neither.*\(seqlens_kv is list\); pass ints, a CPU tensor, or seqlens_kv="),
        (None, torch.tensor([1, 2]), ValueError, r"seqlens_kv is torch\.int64 \[2\]; expected int32 \[B\]"),
        (None, torch.ones(2, 1, dtype=torch.int32), ValueError, r"\[2, 1\]; expected int32 \[B\]"),
        (None, torch.ones(2, dtype=torch.int32).to_sparse(), TypeError, r"torch\.sparse_coo; expected torch\.strided"),
        ([True], None, TypeError, r"dtype torch\.bool; expected int32 or int64"),
        ([True, 2], None, TypeError, r"\[True, 2\]; expected ints, not bools"),
    ],
)
def test_lengths_that_are_wrong(host: Any, seqlens_kv: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DecodeLengths(host, seqlens_kv=seqlens_kv, device="cpu")


def test_a_meta_tensor_has_no_values_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_PLUGIN_CHECK", "1")
    meta = torch.empty(2, dtype=torch.int32, device="meta")
    assert DecodeLengths([1, 2], seqlens_kv=meta).seqlens_kv is meta
    assert mla_plugin.cache.slot_mapping(meta[:, None], meta, 16).shape == (2, 1)


def test_no_lengths() -> None:
    assert DecodeLengths([], device="cpu").seqlens_kv.tolist() == []


def test_the_longest_length() -> None:
    lengths = DecodeLengths([2**31 - 1], device="cpu")
    assert lengths.host.tolist() == lengths.seqlens_kv.tolist() == [2**31 - 1]


@pytest.mark.parametrize("host", [[1, 2**31], torch.tensor([2**32, 1]), [1, -1], [1.0, 2.0]])
def test_an_update_that_is_wrong_changes_nothing(host: Any) -> None:
    lengths = DecodeLengths([1, 2], device="cpu")
    schedule = lengths.schedule("a", Scheduled)
    with pytest.raises((ValueError, TypeError), match="host lengths"):
        lengths.update(host)
    assert lengths.host.tolist() == lengths.seqlens_kv.tolist() == [1, 2]
    assert schedule.seen == [[1, 2]]


class Limited(Scheduled):
    """A backend whose kernel takes up to 10 keys."""

    def renew(self, lengths: DecodeLengths) -> bool:
        if int(lengths.host.max()) > 10:
            raise ValueError("more than 10 keys")
        return super().renew(lengths)


def test_lengths_that_a_backend_cannot_follow_are_not_taken() -> None:
    """Or the next call would run by the schedule of other lengths."""
    lengths = DecodeLengths([1, 2], device="cpu")
    first, limited = lengths.schedule("a", Scheduled), lengths.schedule("b", Limited)
    with pytest.raises(ValueError, match="more than 10 keys"):
        lengths.update([3, 11])
    assert lengths.host.tolist() == lengths.seqlens_kv.tolist() == [1, 2]
    assert first.seen[-1] == limited.seen[-1] == [1, 2]
    lengths.update([3, 10])
    assert first.seen[-1] == limited.seen[-1] == [3, 10]


def test_as_many_lengths_as_before() -> None:
    with pytest.raises(ValueError, match="3 lengths given, 2 expected"):
        DecodeLengths([1, 2], device="cpu").update([1, 2, 3])


@pytest.mark.parametrize(
    ("lengths", "profile"),
    [
        ([], (0, 1)),
        ([0, 0], (0, 1)),
        ([1], (1, 1)),
        ([4096] * 3, (4096, 1)),
        ([5000] * 3, (4096, 1)),
        ([6144] * 3, (8192, 1)),
        ([1024] * 31 + [32768], (2048, 16)),
        ([0, 0, 0, 4096], (1024, 4)),
        ([1] * 99 + [2**31 - 1], (1 << 24, 16)),
    ],
)
def test_what_a_choice_may_know(lengths: list[int], profile: tuple[int, int]) -> None:
    assert DecodeLengths(lengths, device="cpu").profile == Profile(*profile)


def test_the_profile_follows_the_lengths() -> None:
    lengths = DecodeLengths([100, 100], device="cpu")
    assert lengths.profile is lengths.profile == Profile(128, 1)
    lengths.update([5, 1000])
    assert lengths.profile == Profile(512, 2)


@pytest.mark.parametrize("is_callers", [False, True])
@pytest.mark.parametrize("modes", [(True, False), (False, True), (True, True)])
def test_lengths_made_in_inference_mode_can_be_updated_outside_it(modes: tuple[bool, bool], is_callers: bool) -> None:
    made_in, updated_in = modes
    with torch.inference_mode(made_in):
        given = torch.tensor([5, 9], dtype=torch.int32) if is_callers else None
        lengths = DecodeLengths([5, 9], seqlens_kv=given, device=None if is_callers else "cpu")
    with torch.inference_mode(updated_in):
        lengths.update([6, 10])
    assert lengths.host.tolist() == lengths.seqlens_kv.tolist() == [6, 10]


def on_device(*lengths: int) -> DecodeLengths:
    return DecodeLengths(seqlens_kv=torch.tensor(lengths, dtype=torch.int32))


def test_lengths_that_only_the_device_knows() -> None:
    tensor = torch.tensor([3, 4], dtype=torch.int32)
    lengths = DecodeLengths(seqlens_kv=tensor)
    assert lengths.seqlens_kv is tensor
    assert lengths.host is None
    assert lengths.profile is None
    assert len(lengths) == 2
    with pytest.raises(TypeError, match="only the device knows; write seqlens_kv, then update"):
        lengths.update([5, 6])
    assert tensor.tolist() == [3, 4]
    lengths.update()


def test_an_update_of_lengths_on_the_host_needs_them() -> None:
    with pytest.raises(TypeError, match="the host knows them; pass the new ones"):
        DecodeLengths([1, 2], device="cpu").update()


def shared_value(lengths: DecodeLengths, key: str = "a") -> Any:
    shared = lengths.shared(key)
    assert shared is not None
    return shared.value


def share(lengths: DecodeLengths, value: object, key: str = "a") -> None:
    shared = lengths.shared(key)
    assert shared is not None
    shared.keep(value)


@pytest.mark.parametrize("is_known", [True, False])
def test_what_is_shared_for_lengths_ends_with_them(is_known: bool) -> None:
    lengths = DecodeLengths([3, 4], device="cpu") if is_known else on_device(3, 4)
    share(lengths, "of 3 and 4")
    share(lengths, "another", "b")
    assert (shared_value(lengths), shared_value(lengths, "b"), shared_value(lengths, "c")) == (
        *("of 3 and 4", "another"),
        None,
    )
    if is_known:
        lengths.update([3, 4])
    else:
        lengths.update()
    assert shared_value(lengths) is shared_value(lengths, "b") is None


def test_what_is_shared_ends_when_pytorch_writes_the_lengths() -> None:
    lengths = on_device(3, 4)
    share(lengths, "of 3 and 4")
    with torch.inference_mode():
        lengths.seqlens_kv[1:] += 1
    assert shared_value(lengths) is None


def test_what_was_made_of_earlier_lengths_is_not_shared() -> None:
    lengths = on_device(3, 4)
    shared = lengths.shared("a")
    assert shared is not None
    lengths.update()
    shared.keep("of earlier ones")
    assert shared_value(lengths) is None


def test_lengths_made_in_inference_mode_have_no_counter() -> None:
    with torch.inference_mode():
        lengths = on_device(3, 4)
        share(lengths, 1)
    assert shared_value(lengths) == 1
    lengths.update()
    assert shared_value(lengths) is None


def test_captures_that_have_ended_and_earlier_lengths_hold_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = on_device(3, 4)
    places = [(5, 0), (6, 0), (5, 1), (6, 1), (5, 2)]
    for place in places:
        monkeypatch.setattr(decode, "stream_and_capture", lambda device, place=place: place)
        share(lengths, place)
    assert sorted(at for _, at in lengths._kept) == [(5, 0), (5, 2), (6, 0)]
    lengths.seqlens_kv.add_(1)
    share(lengths, "new")
    assert list(lengths._kept) == [("a", (5, 2))]


def test_a_copy_shares_nothing_with_the_original() -> None:
    """Its tensor counts anew, so that an old plan could look like one of later lengths."""
    lengths = on_device(3, 4)
    lengths.seqlens_kv.add_(0)
    shared = lengths.shared("a")
    assert shared is not None
    shared.keep(lambda: "what no pickle takes")
    lengths.schedule("b", Unpicklable)
    for other in (copy.deepcopy(lengths), copy.copy(lengths), pickle.loads(pickle.dumps(lengths))):
        assert shared_value(other) is None
        assert other.schedule("b", Unpicklable) is not lengths.schedule("b", Unpicklable)
        assert other.seqlens_kv.tolist() == [3, 4]
        share(other, "its own")
    assert shared_value(lengths) is not None


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_an_update_of_a_copy_leaves_the_original_alone(copied: Callable[[DecodeLengths], DecodeLengths]) -> None:
    """Whose schedules are of its own lengths."""
    lengths = DecodeLengths([3, 4], device="cpu")
    with torch.inference_mode(copied is copy.copy):  # in which PyTorch itself makes the tensors of the others
        other = copied(lengths)
    other.update([1, 2])
    assert lengths.host.tolist() == lengths.seqlens_kv.tolist() == [3, 4]
    assert other.host.tolist() == other.seqlens_kv.tolist() == [1, 2]


class Unpicklable:
    def __init__(self, lengths: DecodeLengths) -> None:
        self.held = lambda: None

    def renew(self, lengths: DecodeLengths) -> bool:
        return False


def test_the_tensor_cannot_be_replaced_but_its_memory_may() -> None:
    lengths = on_device(3, 4)
    share(lengths, "of 3 and 4")
    with pytest.raises(AttributeError, match="seqlens_kv"):
        lengths.seqlens_kv = torch.ones(2, dtype=torch.int32)  # type: ignore[misc]
    assert shared_value(lengths) == "of 3 and 4"
    lengths.seqlens_kv.data = torch.ones(2, dtype=torch.int32)
    assert shared_value(lengths) is None


@pytest.mark.parametrize("is_counted", [True, False])
def test_an_update_ends_what_is_shared_before_it_writes(is_counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may call in between, and must neither find the old plan nor leave one of the old lengths."""
    with torch.inference_mode(not is_counted):
        lengths = DecodeLengths([3, 4], seqlens_kv=torch.tensor([3, 4], dtype=torch.int32))
    share(lengths, "of 3 and 4")
    seen: list[object] = []
    write = torch.Tensor.copy_

    def writing(x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        if x is lengths.seqlens_kv:
            seen.append(shared_value(lengths))
            share(lengths, "of 3 and 4, again")
        return write(x, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", writing)
    lengths.update([5, 6])
    assert seen == [None]
    assert shared_value(lengths) is None


def test_lengths_are_freed_without_the_garbage_collector() -> None:
    """With the memory on the device that they hold."""
    lengths = on_device(3, 4)
    share(lengths, "of 3 and 4")
    shared_value(lengths)
    freed = weakref.ref(lengths)
    gc.disable()
    try:
        del lengths
        assert freed() is None
    finally:
        gc.enable()


def test_nothing_is_shared_in_a_capture_that_cannot_be_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "stream_and_capture", lambda device: None)
    assert on_device(3, 4).shared("a") is None


def test_a_request_says_whether_the_host_knows_the_lengths() -> None:
    q, cache = torch.zeros(2, 1, 4, 512), torch.zeros(2, 64, 576)
    pages = torch.arange(2, dtype=torch.int32)[:, None]
    given = (q, q[..., :64], cache)
    known, unknown = DecodeLengths([3, 4], device="cpu"), on_device(3, 4)
    options: dict[str, Any] = {"softmax_scale": 0.1, "page_table": pages}
    found = {}
    for name, lengths in (("known", known), ("unknown", unknown), ("tensor", unknown.seqlens_kv)):
        call = described_call(*given, seqlens_kv=lengths, **options)
        found[name] = DecodeRequest.of(call.tensors)
    assert found["known"].has_host_lengths
    assert not found["unknown"].has_host_lengths
    assert found["unknown"] == found["tensor"]


def test_torch_compile_follows_lengths_that_are_made_and_updated_in_a_step() -> None:
    q, cache = torch.randn(2, 1, 4, 576), torch.randn(3, 64, 576)
    page_table = torch.tensor([[0], [1]], dtype=torch.int32)

    def step(q: torch.Tensor, cache: torch.Tensor, seqlens_kv: torch.Tensor) -> list[torch.Tensor]:
        lengths, found = DecodeLengths(seqlens_kv=seqlens_kv), []
        for _ in range(2):
            options: dict[str, Any] = {"softmax_scale": 0.1, "page_table": page_table, "seqlens_kv": lengths}
            found.append(mla_plugin.decode(q[..., :512], q[..., 512:], cache, **options))
            seqlens_kv.add_(3)
            lengths.update()
        return found  # type: ignore[return-value]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    wanted = step(q, cache, torch.tensor([5, 40], dtype=torch.int32))
    found = compiled(q, cache, torch.tensor([5, 40], dtype=torch.int32))
    torch.testing.assert_close(found, wanted)
    assert not torch.equal(*wanted)


def test_torch_compile_follows_lengths_that_the_host_knows() -> None:
    q, cache = torch.randn(2, 1, 4, 576), torch.randn(2, 64, 576)

    def step(seqlens_kv: torch.Tensor) -> torch.Tensor:
        lengths = DecodeLengths([5, 40], seqlens_kv=seqlens_kv)
        return mla_plugin.decode(q[..., :512], q[..., 512:], cache, softmax_scale=0.1, seqlens_kv=lengths)  # type: ignore[return-value]

    given = torch.tensor([5, 40], dtype=torch.int32)
    torch.testing.assert_close(torch.compile(step, fullgraph=True, backend="aot_eager")(given), step(given))


def test_the_default_device_changes_nothing() -> None:
    with torch.device("meta"):
        lengths = DecodeLengths([3, 4], device="cpu")
        lengths.update([5, 2])
    assert lengths.host is not None
    assert lengths.host.device.type == lengths.seqlens_kv.device.type == "cpu"
    assert lengths.host.tolist() == lengths.seqlens_kv.tolist() == [5, 2]
