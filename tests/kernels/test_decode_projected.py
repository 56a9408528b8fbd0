"""Absorbed decode with W_UK and W_UV in its kernels, in the interpreter: random calls, and the rules around them."""

from __future__ import annotations

import functools

import pytest
import torch

from mla_plugin.arguments import checks
from mla_plugin.hooks import hookimpl
from mla_plugin.hooks.manager import get_manager
from mla_plugin.kernels.decode import launch
from mla_plugin.kernels.decode.projected import launch as projected
from mla_plugin.kernels.launch import Launch
from mla_plugin.operations.decode import projected as operation
from mla_plugin.resolver.decode import resolve_decode
from tests.kernels.projected_draws import DEVICE, Call, draw

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter; see test_decode_projected_gpu.py")


def told(launch: Launch) -> dict[str, object]:
    """What a launch tells its kernel in every call, by the names of the signature."""
    return dict(zip(launch.kernel.arg_names[len(launch.given) :], launch.arguments, strict=True))


@pytest.fixture(autouse=True)
def nan_in_new_memory():
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("seed", range(24))
def test_random_calls(seed: int) -> None:
    call = draw(seed, torch.float16, small=True)
    step = call.step()
    call.assert_right(call.run(step))


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("most_steps", [0, 100])
def test_who_plans_and_who_combines(planned: bool, most_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tile_of = launch.tile_of
    monkeypatch.setattr(launch, "tile_of", lambda *given: tile_of(*given)._replace(planned=planned))
    monkeypatch.setattr(projected, "_MOST_STEPS", most_steps)
    monkeypatch.setattr(projected, "PIECES", 2)
    for seed in (3, 7, 11, 16):
        call = draw(seed, torch.float16, small=True)
        step = call.step()
        values, absorb = told(step.values), told(step.absorb)
        assert (values["COMBINES"], absorb["PLANNED"]) == (bool(most_steps), planned)
        call.assert_right(call.run(step))


def operate(call: Call, **options: object) -> torch.Tensor | None:
    given = call.query, call.c_kv, call.k_rope, call.weight, call.dim_nope, call.dim_v
    return operation.decode_projected(*given, **{"softmax_scale": call.softmax_scale, "ranges": call.ranges, **options})


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Call:
    """One that the triton backend is chosen for, which off CUDA takes a call only by name."""
    monkeypatch.setattr(operation, "resolve_decode", functools.partial(resolve_decode, backend="triton"))
    monkeypatch.setattr(operation, "_steps", {})
    monkeypatch.setattr(checks, "may_read", lambda x: False)
    calls = (draw(seed, torch.float16, small=True) for seed in range(200))
    return next(x for x in calls if x.leftpad_kv is not None and min(x.query.shape[1:3]) > 1)


def test_as_an_operation(call: Call) -> None:
    for _ in range(2):
        found = operate(call)
        assert found is not None
        call.assert_right(found)
    assert len(operation._steps) == 1


def test_a_layout_of_its_own_has_launches_of_its_own(call: Call) -> None:
    assert operate(call) is not None
    of_tokens = call.query.transpose(1, 2).contiguous().transpose(1, 2)
    of_heads = call.query.contiguous()
    for name, value in (
        ("query", of_tokens if of_tokens.stride() != call.query.stride() else of_heads),
        ("c_kv", torch.cat([call.c_kv, call.c_kv], -1)[..., : call.c_kv.shape[-1]]),
        ("k_rope", torch.cat([call.k_rope, call.k_rope], -1)[..., : call.k_rope.shape[-1]]),
        ("weight", torch.cat([call.weight, call.weight], 1)[:, : call.weight.shape[1]]),
        ("ranges", torch.cat([call.ranges] * 4, 3)[..., : len(call.query)]),
        ("ranges", None),
    ):
        changed = Call(**{**vars(call), name: value})
        before = len(operation._steps)
        found = operate(changed)
        assert len(operation._steps) == before + 1, name
        assert found is not None, name
        if changed.ranges is not None:  # else NaN is seen
            changed.assert_right(found)


def test_it_leaves_calls_of_others(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another dtype, another backend, batch invariance, values to be checked, somebody who looks on."""
    assert operate(call) is not None
    names = ("query", "c_kv", "k_rope", "weight")
    in_float32 = Call(**{**vars(call), **{name: getattr(call, name).float() for name in names}})
    assert operate(in_float32) is None
    many = Call(**{**vars(call), "query": call.query.repeat(1, 1, 20, 1)})
    assert operate(many) is None
    empty = Call(**{**vars(call), "query": call.query[:, :, :0]})
    assert operate(empty) is None
    for name, value in (("MLA_PLUGIN_BATCH_INVARIANT", "1"), ("MLA_PLUGIN_CHECK", "1")):
        with monkeypatch.context() as context:
            context.setenv(name, value)
            assert operate(call) is None, name
    assert operate(call) is not None

    with monkeypatch.context() as context:
        context.setattr(operation, "_steps", {})
        context.setattr(operation, "resolve_decode", functools.partial(resolve_decode, backend="sdpa"))
        assert operate(call) is None

    class Watcher:
        @hookimpl(wrapper=True)
        def forward(self):
            return (yield)

    get_manager().register(Watcher(), "watcher")
    try:
        assert operate(call) is None
    finally:
        get_manager().unregister("watcher")
    assert operate(call) is not None


def test_a_wrong_argument_is_named_before_a_launch(call: Call) -> None:
    with pytest.raises(TypeError, match="seqlens_kv"):
        operate(call, ranges=call.ranges.long())
    for scale in (0.0, -0.5, float("nan"), float("inf"), True):
        with pytest.raises((ValueError, TypeError), match="softmax_scale"):
            operate(call, softmax_scale=scale)
    for dim_nope in (0, -1, call.query.shape[3] + 1):
        rows = len(call.weight) // call.query.shape[1]
        with pytest.raises(ValueError, match="dim_nope"):
            operate(Call(**{**vars(call), "dim_nope": dim_nope, "dim_v": rows - dim_nope}))
    assert operate(call, ranges=call.ranges[0, 0]) is None
    assert operate(call, ranges=call.ranges[..., :1].expand_as(call.ranges)) is None
    two = call.c_kv.repeat(1, 2, 1, 1)
    assert operate(Call(**{**vars(call), "c_kv": two})) is None


def test_rows_of_the_weight_far_apart_are_left_to_others(call: Call) -> None:
    """A tile of them exceeds int32 offsets."""
    shape = call.weight.shape
    most = max(projected.padded(call.dim_nope), projected.padded(call.dim_v))
    for apart, is_taken in ((2**31 // most - 8, True), (2**31 // most, False)):
        far = torch.empty_strided(shape, (apart, 1), dtype=call.weight.dtype, device="meta")
        assert (Call(**{**vars(call), "weight": far}).find_step() is not None) == is_taken


def test_lengths_at_any_address(call: Call) -> None:
    for shift in range(4):
        moved = torch.empty(call.ranges.numel() + shift, dtype=torch.int32)[shift:].view(call.ranges.shape)
        changed = Call(**{**vars(call), "ranges": moved.copy_(call.ranges)})
        found = operate(changed)
        assert found is not None
        changed.assert_right(found)


def test_a_plug_in_that_the_choice_imports_looks_on(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = operation.resolve_decode

    class Watcher:
        @hookimpl(wrapper=True)
        def forward(self):
            return (yield)

    def choose(request):
        get_manager().register(Watcher(), "watcher")
        return chosen(request)

    monkeypatch.setattr(operation, "resolve_decode", choose)
    try:
        assert operate(call) is None
    finally:
        get_manager().unregister("watcher")
