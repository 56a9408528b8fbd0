import importlib
import logging
import types
from collections.abc import Iterator

import pluggy
import pytest
import torch

from mla_plugin import Accepted, AttentionOutput, AttentionTensors, Plan, Refused, hookimpl
from mla_plugin.hooks import manager as manager_module
from mla_plugin.hooks.manager import BUILTIN_BACKENDS, BackendManager
from mla_plugin.operations.attention import dispatch
from tests.requests import CPU, mla_request


class Constant:
    """A backend whose output is one number."""

    def __init__(self, value: float) -> None:
        self.value = value

    @hookimpl
    def select_backend(self, request: object, platform: object) -> Accepted:
        return Accepted()

    @hookimpl
    def forward(self, plan: Plan, tensors: AttentionTensors) -> AttentionOutput:
        return AttentionOutput(torch.full((1,), self.value), torch.zeros(1))


class Recorder:
    """A plugin of wrappers: no backend, sees every call."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    @hookimpl(wrapper=True)
    def forward(self, plan: Plan) -> Iterator[None]:
        self.seen.append(plan.forward_backend)
        return (yield)


def fake_entry_point(name: str, loaded: object) -> types.SimpleNamespace:
    def load() -> object:
        if isinstance(loaded, BaseException):
            raise loaded
        return loaded() if isinstance(loaded, types.FunctionType) else loaded

    return types.SimpleNamespace(name=name, load=load)


def use_entry_points(monkeypatch: pytest.MonkeyPatch, *entry_points: object) -> None:
    monkeypatch.setattr(manager_module.importlib.metadata, "entry_points", lambda group: entry_points)


def test_builtin_backends_come_first_in_table_order() -> None:
    manager = BackendManager(load_entry_points=False)
    manager.register(Constant(1.0), "other")
    plugin = importlib.import_module(BUILTIN_BACKENDS["triton"])
    manager.unregister("triton")
    manager.register(plugin, "triton")
    assert manager.backends() == tuple(manager.callers("forward")) == (*BUILTIN_BACKENDS, "other")


def test_entry_points_are_registered_under_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    use_entry_points(monkeypatch, fake_entry_point("first", Constant(1.0)), fake_entry_point("second", Constant(2.0)))
    assert BackendManager().backends()[-2:] == ("first", "second")


def test_a_broken_entry_point_is_reported_by_name_and_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_entry_points(
        monkeypatch, fake_entry_point("bad", ImportError("no libfoo")), fake_entry_point("good", Constant(1))
    )
    with caplog.at_level(logging.WARNING, "mla_plugin"):
        manager = BackendManager()
    assert "good" in manager.backends()
    assert manager.broken == {"bad": "ImportError: no libfoo"}
    assert "'bad'" in caplog.text


def test_an_entry_point_that_exits_or_asks_for_the_manager_takes_nothing_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resolves_at_import() -> object:
        return manager_module.get_manager()

    use_entry_points(
        monkeypatch, fake_entry_point("exits", SystemExit(3)), fake_entry_point("early", resolves_at_import)
    )
    monkeypatch.setattr(manager_module, "_manager", None)
    assert manager_module.get_manager().backends() == tuple(BUILTIN_BACKENDS)
    assert manager_module.get_manager().broken["exits"] == "SystemExit: 3"
    assert "while it is imported" in manager_module.get_manager().broken["early"]


def test_an_entry_point_cannot_take_a_builtin_name(monkeypatch: pytest.MonkeyPatch) -> None:
    use_entry_points(monkeypatch, fake_entry_point("sdpa", Constant(1.0)))
    manager = BackendManager()
    assert manager.backends() == tuple(BUILTIN_BACKENDS)
    assert "built-in" in manager.broken["sdpa"]


def test_an_implementation_with_an_unknown_argument_is_refused_at_registration() -> None:
    class Wrong:
        @hookimpl
        def select_backend(self, request: object, gpu: object) -> None: ...

    with pytest.raises(pluggy.PluginValidationError, match="gpu"):
        BackendManager(load_entry_points=False).register(Wrong(), "wrong")


class Misspelt(Constant):
    @hookimpl
    def select_backnd(self, request: object) -> None: ...


class WithoutSelect:
    @hookimpl
    def forward(self, plan: Plan, tensors: AttentionTensors) -> AttentionOutput:
        return AttentionOutput(torch.full((1,), 7.0), torch.zeros(1))


@pytest.mark.parametrize(
    ("plugin", "words"), [(Misspelt(1.0), "select_backnd"), (WithoutSelect(), "forward without select_backend")]
)
def test_what_cannot_be_a_backend_leaves_no_trace(plugin: object, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = BackendManager(load_entry_points=False)
    monkeypatch.setattr(dispatch, "get_manager", lambda: manager)
    manager.register(Constant(1.0), "good")
    with pytest.raises(pluggy.PluginValidationError, match=words):
        manager.register(plugin, "wrong")
    manager.register(Recorder(), "recorder")
    x = torch.zeros(1)
    output = dispatch.forward(Plan(mla_request(), CPU, "good", "good"), AttentionTensors(x, x, x, 1.0))
    assert output.out.item() == 1.0
    assert manager.backends() == (*BUILTIN_BACKENDS, "good")


def test_a_name_is_taken_once() -> None:
    manager = BackendManager(load_entry_points=False)
    manager.register(Constant(1.0), "mine")
    with pytest.raises(ValueError, match="registered already"):
        manager.register(Constant(2.0), "mine")
    manager.unregister("mine")
    with pytest.raises(ValueError, match="no backend named 'mine'"):
        manager.unregister("mine")


def test_the_caller_reaches_its_backend_alone_and_every_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = BackendManager(load_entry_points=False)
    monkeypatch.setattr(dispatch, "get_manager", lambda: manager)
    recorder = Recorder()
    manager.register(Constant(1.0), "one")
    manager.register(recorder, "recorder")
    x = torch.zeros(1)
    tensors = AttentionTensors(x, x, x, 1.0)
    plan_one = Plan(mla_request(), CPU, "one", "one")
    assert dispatch.forward(plan_one, tensors).out.item() == 1.0
    manager.register(Constant(2.0), "two")  # a later backend does not get in front of the cached caller
    assert dispatch.forward(plan_one, tensors).out.item() == 1.0
    assert dispatch.forward(Plan(mla_request(), CPU, "two", "two"), tensors).out.item() == 2.0
    assert recorder.seen == ["one", "one", "two"]
    assert "recorder" not in manager.backends()


def test_a_backend_without_forward_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Half:
        @hookimpl
        def select_backend(self, request: object) -> Accepted:
            return Accepted()

    manager = BackendManager(load_entry_points=False)
    monkeypatch.setattr(dispatch, "get_manager", lambda: manager)
    manager.register(Half(), "half")
    x = torch.zeros(1)
    with pytest.raises(RuntimeError, match="'half' accepted the request but has no forward"):
        dispatch.forward(Plan(mla_request(), CPU, "half", "half"), AttentionTensors(x, x, x, 1.0))


def test_an_unknown_backend_lists_the_registered_ones() -> None:
    with pytest.raises(ValueError, match=r"no backend named 'nope' is registered; registered: .*sdpa"):
        BackendManager(load_entry_points=False).caller("forward", "nope")


def test_refused_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="at least one reason"):
        Refused(())
    with pytest.raises(TypeError, match="'too wide'; expected a tuple"):
        Refused("too wide")


def test_priority_is_a_number() -> None:
    for given in ("high", 1.0, True, False, None):
        with pytest.raises(TypeError, match=f"priority={given!r}; expected an integer"):
            Accepted(priority=given)
    assert Accepted(priority=-3).priority == -3


@pytest.mark.parametrize(("name", "value"), [("num_kv_heads", 0), ("head_dim_qk", 0), ("batch_size", -1)])
def test_a_request_has_no_impossible_numbers(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}; expected at least {value + 1}"):
        mla_request(**{name: value})


def test_a_built_in_backend_is_ours_until_its_hooks_are_wrapped():
    manager = BackendManager(load_entry_points=False)
    manager.register(Constant(1.0), "sample")
    assert manager.is_ours("sdpa")
    assert not manager.is_ours("sample")

    class Timer:
        @hookimpl(wrapper=True)
        def forward(self):
            return (yield)

    manager.register(Timer(), "timer")
    assert not manager.is_ours("sdpa")
    manager.unregister("timer")
    assert manager.is_ours("sdpa")


def test_a_backend_under_the_name_of_a_built_in_one_is_not_ours():
    manager = BackendManager(load_entry_points=False)
    ours = importlib.import_module(BUILTIN_BACKENDS["sdpa"])
    manager.unregister("sdpa")
    assert not manager.is_ours("sdpa")
    manager.register(Constant(1.0), "sdpa")
    assert not manager.is_ours("sdpa")
    manager.unregister("sdpa")
    manager.register(ours, "sdpa")
    assert manager.is_ours("sdpa")
