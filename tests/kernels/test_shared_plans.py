"""Layers of a step with the same ``DecodeLengths`` share the plan; whatever changes the lengths makes a new one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from mla_plugin import DecodeLengths, DecodeTensors
from mla_plugin.arguments import decode as decode_arguments
from mla_plugin.arguments import decode_layout
from mla_plugin.arguments.cache_format import FP8, PLAIN
from mla_plugin.arguments.decode_layout import known_of
from mla_plugin.kernels.decode import launch as decode_launch
from mla_plugin.kernels.decode import run as decode_run
from mla_plugin.kernels.decode import workspace
from mla_plugin.kernels.decode.combine import combine_kernel
from mla_plugin.kernels.decode.hopper import launch as hopper_launch
from mla_plugin.kernels.decode.invariant import launch as invariant
from mla_plugin.kernels.decode.transposed import launch as transposed
from mla_plugin.kernels.decode.wide import launch as wide
from mla_plugin.kernels.launch import Launch
from tests.kernels.decode_cases import DEVICE, Inputs, assert_as_good_as_pytorch, contiguous, paged, with_leftpad
from tests.kernels.gathered_cases import call_of
from tests.kernels.gluon.hopper import hopper as hopper
from tests.kernels.recorded import plans, recorded

pytestmark = pytest.mark.usefixtures("few_programs_of_the_sum")
CHUNK = 128
SHAPE = (6, 2, 5, 32, 16, 300)  # more sequences than plan for themselves
LENGTHS, OTHERS = [300, 0, 129, 1, 64, 299], [1, 300, 300, 128, 0, 77]
Decode = Callable[[DecodeTensors, decode_layout.Known], tuple[torch.Tensor, torch.Tensor | None]]


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the kernels launched; new memory holds NaN, a plan in new memory is garbage."""
    names = recorded(monkeypatch)
    monkeypatch.setattr(decode_layout, "_known", {})
    monkeypatch.setattr(invariant, "workspace_bytes", lambda _: 1 << 20)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield names
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["by tiles", "by chunks", "by chunks in rounds"])
def decode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Decode:
    if request.param == "by tiles":
        return decode_launch.decode
    if request.param == "by chunks in rounds":
        monkeypatch.setattr(invariant, "workspace_bytes", lambda _: 7 * 2 * 5 * 32 * 2)
    return functools.partial(invariant.decode, chunk=CHUNK)


def tensors_of(inputs: Inputs, lengths: DecodeLengths, **changes: Any) -> DecodeTensors:
    return DecodeTensors(
        *inputs.tensors(),
        inputs.softmax_scale,
        causal=inputs.q_nope_abs.shape[1] > 1,
        return_lse=True,
        page_table=inputs.page_table,
        seqlens_kv=lengths.seqlens_kv,
        leftpad_kv=inputs.leftpad_kv,
        lengths=lengths,
    )._replace(**changes)


def check(decode: Decode, inputs: Inputs, tensors: DecodeTensors) -> None:
    out, lse = decode(tensors, known_of(tensors))
    assert lse is not None
    assert_as_good_as_pytorch(out, lse, inputs, is_causal=True)


def with_lengths(lengths: list[int], seed: int = 0) -> Inputs:
    return paged(SHAPE, 16, torch.float16, lengths, seed)


def device_lengths(values: list[int]) -> DecodeLengths:
    return DecodeLengths(seqlens_kv=torch.tensor(values, dtype=torch.int32, device=DEVICE))


@pytest.mark.parametrize("is_known", [True, False])
def test_layers_of_a_step_share_a_plan(decode: Decode, is_known: bool, launched: list[str]) -> None:
    lengths = DecodeLengths(LENGTHS, device=DEVICE) if is_known else device_lengths(LENGTHS)
    check(decode, with_lengths(LENGTHS), tensors_of(with_lengths(LENGTHS), lengths))
    of_first = plans(launched)
    assert of_first >= 1
    for seed in (1, 2):
        inputs = with_lengths(LENGTHS, seed)
        check(decode, inputs, tensors_of(inputs, lengths))
    assert plans(launched) == of_first


@pytest.mark.parametrize("is_known", [True, False])
def test_an_update_makes_a_new_plan(decode: Decode, is_known: bool, launched: list[str]) -> None:
    lengths = DecodeLengths(LENGTHS, device=DEVICE) if is_known else device_lengths(LENGTHS)
    check(decode, with_lengths(LENGTHS), tensors_of(with_lengths(LENGTHS), lengths))
    of_first = plans(launched)
    if is_known:
        lengths.update(OTHERS)
    else:
        lengths.seqlens_kv.data.copy_(torch.tensor(OTHERS))  # PyTorch does not count it
        lengths.update()
    check(decode, with_lengths(OTHERS), tensors_of(with_lengths(OTHERS), lengths))
    assert plans(launched) == 2 * of_first


def test_lengths_that_pytorch_writes_without_an_update(decode: Decode) -> None:
    """As a draft does that appends to every sequence; PyTorch counts what it writes."""
    lengths = device_lengths(LENGTHS)
    check(decode, with_lengths(LENGTHS), tensors_of(with_lengths(LENGTHS), lengths))
    lengths.seqlens_kv.copy_(torch.tensor(OTHERS))
    check(decode, with_lengths(OTHERS), tensors_of(with_lengths(OTHERS), lengths))


def test_other_lengths_than_those_of_the_object(decode: Decode, launched: list[str]) -> None:
    """Or a length for every query, as context parallelism makes them."""
    lengths, inputs = device_lengths(OTHERS), with_lengths(LENGTHS)
    for _ in range(2):
        check(decode, inputs, tensors_of(inputs, lengths, seqlens_kv=inputs.seqlens_kv))
    assert not lengths._kept


def test_left_padding_is_no_part_of_the_lengths(decode: Decode) -> None:
    lengths = device_lengths(LENGTHS)
    for pads in ([3, 0, 70, 0, 64, 9], [0, 0, 1, 1, 0, 290]):
        inputs = with_leftpad(contiguous(SHAPE, torch.float16, LENGTHS), pads)
        check(decode, inputs, tensors_of(inputs, lengths))
    check(decode, with_lengths(LENGTHS), tensors_of(with_lengths(LENGTHS), lengths))


def test_calls_of_other_sizes_plan_for_themselves(decode: Decode, launched: list[str]) -> None:
    """The plan says how many tiles, of which width, each of so many programs takes."""
    lengths = device_lengths(LENGTHS)
    for heads, rank, seqlen_kv in ((5, 32, 300), (40, 32, 300), (5, 256, 300), (5, 32, 2000), (5, 32, 300)):
        inputs = contiguous((6, 2, heads, rank, 16, seqlen_kv), torch.float16, LENGTHS)
        check(decode, inputs, tensors_of(inputs, lengths))


def test_another_dtype_shares_it_or_not(decode: Decode) -> None:
    lengths = device_lengths(LENGTHS)
    for dtype in (torch.float16, torch.float32, torch.float16):
        inputs = contiguous(SHAPE, dtype, LENGTHS)
        check(decode, inputs, tensors_of(inputs, lengths))


@pytest.mark.parametrize(
    ("places", "count"), [([(1, 0), (1, 0), (2, 0), (1, 7), (1, 7), (1, 8), (1, 0)], 4), ([None, None], 2)]
)
def test_every_stream_and_every_graph_has_its_own(
    places: list[tuple[int, int] | None], count: int, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that took the plan of an earlier call would keep it when it is replayed with other lengths."""
    lengths, inputs = device_lengths(LENGTHS), with_lengths(LENGTHS)
    for place in places:
        monkeypatch.setattr(decode_arguments, "stream_and_capture", lambda device, place=place: place)
        check(decode_launch.decode, inputs, tensors_of(inputs, lengths))
    assert plans(launched) == count


def test_an_update_while_another_thread_launches(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan that it then keeps is of the lengths before."""
    lengths, new_plans = DecodeLengths(LENGTHS, device=DEVICE), decode_run.new_plans

    def updating(*arguments: Any) -> workspace.Plans:
        monkeypatch.setattr(decode_run, "new_plans", new_plans)
        found = new_plans(*arguments)
        lengths.update(OTHERS)
        return found

    monkeypatch.setattr(decode_run, "new_plans", updating)
    tensors = tensors_of(with_lengths(OTHERS), lengths)
    decode_launch.decode(tensors, known_of(tensors))
    check(decode_launch.decode, with_lengths(OTHERS), tensors)
    assert plans(launched) == 2


def test_a_plan_is_kept_once_its_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or another thread would take a plan that nobody has written yet; a failed launch leaves none."""
    lengths, inputs = device_lengths(LENGTHS), with_lengths(LENGTHS)
    launch = Launch.__call__

    def failing(self: Launch, *arguments: object) -> None:
        assert not lengths._kept
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Launch, "__call__", failing)
    tensors = tensors_of(inputs, lengths)
    with pytest.raises(RuntimeError, match="out of memory"):
        decode_launch.decode(tensors, known_of(tensors))
    assert not lengths._kept
    monkeypatch.setattr(Launch, "__call__", launch)
    check(decode_launch.decode, inputs, tensors)


GUARD = 4096


def guarded(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The workspace of calls gets memory before and after it that nothing may write or read."""
    made: list[torch.Tensor] = []

    def between(scratch: Callable[..., workspace.Scratch]) -> Callable[..., workspace.Scratch]:
        def make(parts: torch.Tensor, plan: torch.Tensor | None) -> workspace.Scratch:
            whole = parts.new_full((parts.numel() + 2 * GUARD,), 7.0)
            whole[GUARD:-GUARD] = 0.0
            made.append(whole)
            return scratch(whole[GUARD:-GUARD], plan)

        return make

    monkeypatch.setattr(decode_run, "Scratch", between(workspace.Scratch))
    return made


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_of_other_lengths_stays_within_the_workspace(
    decode: Decode, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths that something else than PyTorch writes, without an update: the results are wrong, memory is not."""
    made = guarded(monkeypatch)
    lengths = device_lengths(OTHERS if seed % 2 else [1] * 6)
    monkeypatch.setattr(decode_launch, "choose_parts", lambda *_: (2, 13)[seed // 2])
    tensors = tensors_of(contiguous(SHAPE, torch.float16), lengths)
    decode(tensors, known_of(tensors))
    lengths.seqlens_kv.data.copy_(torch.tensor(LENGTHS))
    out, lse = decode(tensors, known_of(tensors))
    assert lse is not None
    for whole in made:
        assert (whole[:GUARD] == 7.0).all()
        assert (whole[-GUARD:] == 7.0).all()
    assert not (out == 7.0).any()
    assert len(made) > 1


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("is_longer", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_format", "kind"), [(40, PLAIN, hopper_launch), (16, FP8, transposed), (40, FP8, wide)]
)
def test_the_gluon_kernels_stay_within_the_workspace_too(
    heads: int, kv_format: str, kind: ModuleType, is_longer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = ([1, 0, 64, 2, 1], [200, 200, 1, 129, 130])[:: 1 if is_longer else -1]
    _, tensors = call_of((5, 1, heads, 200), None, kv_format, torch.bfloat16, before)
    lengths = device_lengths(before)
    tensors = tensors._replace(seqlens_kv=lengths.seqlens_kv, lengths=lengths, return_lse=False)
    assert isinstance(decode_launch.make_launches(tensors).described, kind.Descriptors)
    made = guarded(monkeypatch)
    decode_launch.decode(tensors, known_of(tensors))
    lengths.seqlens_kv.data.copy_(torch.tensor(after))
    decode_launch.decode(tensors, known_of(tensors))
    assert len(made) == 2
    for whole in made:
        assert (whole[:GUARD] == 7.0).all()
        assert (whole[-GUARD:] == 7.0).all()


@pytest.mark.parametrize(("first", "count"), [(0, 5), (4, 1000), (-1, 2), (2**31 - 1, 2), (3, 2**31 - 1)])
def test_a_list_that_leads_outside_of_the_workspace_is_not_followed(first: int, count: int) -> None:
    """Which the attention kernel writes by a plan of other lengths."""
    parts, rows, rank = 4, 1, 16
    slots = torch.zeros(2 * parts * rows * rank, dtype=torch.float32, device=DEVICE)
    lse = torch.zeros(2 * parts * rows, dtype=torch.float32, device=DEVICE)
    listed = torch.tensor([[first, count]], dtype=torch.int32, device=DEVICE)
    memory = torch.cat([slots, lse, listed.flatten().view(torch.float32)])
    out = torch.full((1, 1, 1, rank), 5.0, device=DEVICE)
    combine_kernel[(1, 1)](
        *(memory, out, None),
        *(1, 1, 1, parts),
        R=rank,
        BLOCK_ROWS=1,
        BLOCK_R=rank,
        BLOCK_PIECES=2,
        MIXED=False,
        DEPENDENT=False,
    )
    assert (out == 5.0).all()


def test_memory_of_plans() -> None:
    device = torch.device("cpu")
    assert workspace.new_plans(device, 3, 0) == (None, None, None)
    for rounds in (1, 3):
        found = workspace.new_plans(device, rounds, 5)
        assert len(found) == rounds
        assert all(plan is not None and plan.numel() >= 5 and plan.dtype == torch.int32 for plan in found)
        starts = [plan.data_ptr() for plan in found if plan is not None]
        assert not any((start - starts[0]) % 16 for start in starts)
        assert len(set(starts)) == rounds


def plan_key(shape: tuple[int, ...], dtype: torch.dtype = torch.float16, chunk: int = 0) -> object:
    """Of B, S_q, H, R, Dr and S_kv."""
    batch, seqlen_q, heads, rank, rope, seqlen_kv = shape
    inputs = contiguous((batch, seqlen_q, heads, rank, rope, seqlen_kv), dtype)
    tensors = tensors_of(inputs, device_lengths([1] * batch))
    if chunk:
        return invariant.make_launches(tensors, chunk, is_shared=True).plan_key
    return decode_launch.make_launches(tensors, is_shared=True).plan_key


def test_plans_that_differ_have_other_keys() -> None:
    """In the batch, the capacity, the number of parts, the tile, or the kernel; other queries need no other plan."""
    small = (6, 1, 5, 32, 16, 300)
    others = [(7, 1, 5, 32, 16, 300), (6, 1, 5, 32, 16, 2000), (6, 1, 130, 32, 16, 300), (6, 1, 5, 500, 16, 300)]
    keys = [plan_key(shape) for shape in (small, *others)]
    keys += [plan_key(small, chunk=128), plan_key(small, chunk=256), plan_key(others[1], chunk=128)]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert plan_key((6, 2, 4, 32, 16, 300)) == plan_key((6, 1, 5, 64, 16, 300)) == keys[0]
