"""Registering is all or nothing, whatever the plugin and whichever thread; run with every supported pluggy."""

from __future__ import annotations

import dataclasses
import functools
import threading
import types
import warnings
from collections.abc import Callable, Iterator

import pluggy
import pytest

from mla_plugin import Accepted, hookimpl
from mla_plugin.hooks import spec
from mla_plugin.hooks.manager import BackendManager
from tests.hooks.notes import notes


class Constant:
    """A backend whose forward gives one value, or raises it."""

    def __init__(self, value: object) -> None:
        self.value = value

    @hookimpl
    def select_backend(self) -> Accepted:
        return Accepted()

    @hookimpl
    def forward(self) -> object:
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value() if callable(self.value) else self.value


class FitsHalfway:
    """Its backward and forward fit; select_backend, which pluggy looks at last, does not."""

    @hookimpl
    def backward(self) -> str:
        return "halfway"

    @hookimpl(tryfirst=True)
    def forward(self) -> str:
        return "halfway"

    @hookimpl
    def select_backend(self, gpu: object) -> None: ...


class WrapsHalfway:
    """The same with a wrapper that fits."""

    @hookimpl(wrapper=True)
    def forward(self) -> Iterator[None]:
        yield
        return "halfway"

    @hookimpl(wrapper=True)
    def select_backend(self, gpu: object) -> Iterator[None]:
        return (yield)


@pytest.fixture
def manager() -> BackendManager:
    return BackendManager(builtins={}, load_entry_points=False)


def run(manager: BackendManager, backend: str, hook: str = "forward") -> object:
    return manager.caller(hook, backend)(plan=None, tensors=None)


@pytest.mark.parametrize("plugin", [FitsHalfway(), WrapsHalfway()])
def test_a_plugin_that_fits_halfway_is_not_registered_at_all(manager: BackendManager, plugin: object) -> None:
    manager.register(Constant(1), "one")
    generation = manager.generation
    for _ in range(2):
        with pytest.raises(pluggy.PluginValidationError, match="gpu"):
            manager.register(plugin, "halfway")
    assert run(manager, "one") == 1
    assert (manager.backends(), manager.wrappers(), manager.generation) == (("one",), (), generation)
    manager.register(Constant(2), "halfway")
    assert [run(manager, name) for name in manager.backends()] == [1, 2]


def test_each_backend_is_called_alone_whatever_else_is_registered(manager: BackendManager) -> None:
    for value in range(5):
        manager.register(Constant(value), f"backend{value}")
    assert [run(manager, f"backend{value}") for value in range(5)] == list(range(5))
    manager.unregister("backend3")
    with pytest.raises(ValueError, match="no backend named 'backend3' is registered; registered: backend0, "):
        manager.caller("forward", "backend3")
    assert run(manager, "backend4") == 4


def test_threads_that_register_unregister_and_compute(manager: BackendManager) -> None:
    """Every call gets its own backend's value; what is registered for good is there at the end."""
    seconds, errors, threads = 0.5, [], []
    stop = threading.Event()
    manager.register(Constant("steady"), "steady")

    class Timer:
        @hookimpl(wrapper=True)
        def forward(self) -> Iterator[None]:
            return (yield)

    def comes_and_goes(name: str) -> None:
        manager.register(Timer() if name.startswith("timer") else Constant(name), name)
        if not name.startswith("timer"):
            assert run(manager, name) == name
            assert name in manager.callers("forward")
        manager.unregister(name)

    def computes(_: str) -> None:
        assert run(manager, "steady") == "steady"
        assert all(call(plan=None, tensors=None) == name for name, call in manager.callers("forward").items())

    def breaks(_: str) -> None:
        for plugin in (FitsHalfway(), WrapsHalfway()):
            with pytest.raises(pluggy.PluginValidationError):
                manager.register(plugin, "halfway")

    def repeat(action: object, name: str) -> None:
        try:
            while not stop.is_set():
                action(name)
        except BaseException as error:
            errors.append(error)

    for action, name in [*[(comes_and_goes, f"{kind}{i}") for kind in ("own", "timer") for i in range(4)]]:
        threads.append(threading.Thread(target=repeat, args=(action, name)))
    threads += [threading.Thread(target=repeat, args=(action, "")) for action in (computes, breaks) for _ in range(4)]
    threads += [
        threading.Thread(target=lambda i=i: manager.register(Constant(f"last{i}"), f"last{i}")) for i in range(8)
    ]
    for thread in threads:
        thread.start()
    stop.wait(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert set(manager.backends()) == {"steady", *(f"last{i}" for i in range(8))}
    assert manager.wrappers() == ()
    assert [run(manager, name) for name in manager.backends()] == list(manager.backends())


def test_two_plugins_registered_at_once_are_both_there(manager: BackendManager) -> None:
    """A plugin whose inspection registers another one, which is a race without a thread."""

    class Registers(type):
        def __dir__(cls) -> list[str]:
            if "inner" not in manager.backends():
                manager.register(Constant("inner"), "inner")
            return super().__dir__()

    class Outer(metaclass=Registers):
        @staticmethod
        @hookimpl
        def select_backend() -> Accepted:
            return Accepted()

    manager.register(Outer, "outer")
    assert set(manager.backends()) == {"inner", "outer"}
    assert run(manager, "inner") == "inner"


class New:
    """A new-style wrapper that notes what it sees, and may replace the result."""

    def __init__(self, seen: list[str], name: str, result: object = None) -> None:
        self.seen, self.name, self.result = seen, name, result

    @hookimpl(wrapper=True)
    def forward(self) -> Iterator[None]:
        self.seen.append(f"{self.name} in")
        try:
            found = yield
        except KeyError:
            found = "rescued"
        self.seen.append(f"{self.name} out {found}")
        return found if self.result is None else self.result


class Old:
    """An old-style wrapper."""

    def __init__(self, seen: list[str], name: str, result: object = None) -> None:
        self.seen, self.name, self.result = seen, name, result

    @hookimpl(hookwrapper=True)
    def forward(self) -> Iterator[None]:
        self.seen.append(f"{self.name} in")
        outcome = yield
        self.seen.append(f"{self.name} out {outcome.get_result()}")
        if self.result is not None:
            outcome.force_result(self.result)


def test_wrappers_of_both_styles_nest_in_order_of_registration(manager: BackendManager) -> None:
    seen: list[str] = []
    manager.register(New(seen, "first"), "first")
    manager.register(Constant(1), "one")
    manager.register(Old(seen, "second", result=2), "second")
    manager.register(New(seen, "third"), "third")
    assert run(manager, "one") == 2
    assert seen == ["third in", "second in", "first in", "first out 1", "second out 1", "third out 2"]
    assert manager.wrappers() == ("first", "second", "third")
    manager.unregister("second")
    assert run(manager, "one") == 1


def test_a_wrapper_may_rescue_or_raise(manager: BackendManager) -> None:
    manager.register(Constant(KeyError("x")), "one")
    manager.register(New([], "rescues"), "rescues")
    assert run(manager, "one") == "rescued"

    class Raises:
        @hookimpl(wrapper=True)
        def forward(self) -> Iterator[None]:
            yield
            raise OSError("disk full")

    manager.register(Raises(), "raises")
    with pytest.raises(OSError, match="disk full") as caught:
        run(manager, "one")
    assert "'rescues', 'raises'" in notes(caught.value)[0]
    manager.unregister("raises")
    assert run(manager, "one") == "rescued"


@pytest.mark.filterwarnings("ignore:A plugin raised")
def test_an_old_wrapper_that_raises(manager: BackendManager) -> None:
    class Raises:
        @hookimpl(hookwrapper=True)
        def forward(self) -> Iterator[None]:
            yield
            raise OSError("disk full")

    manager.register(Constant(1), "one")
    manager.register(Raises(), "raises")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(OSError, match="disk full"):
            run(manager, "one")


def test_a_backends_own_wrapper_runs_around_its_own_calls_alone(manager: BackendManager) -> None:
    class Both(Constant):
        @hookimpl(wrapper=True, specname="forward")
        def around(self) -> Iterator[None]:
            return -(yield)

    manager.register(Both(5), "both")
    manager.register(Constant(1), "one")
    assert (run(manager, "both"), run(manager, "one")) == (-5, 1)
    assert manager.wrappers() == ()


def test_what_comes_or_goes_within_a_call_is_seen_by_the_next(manager: BackendManager) -> None:
    def leaves() -> str:
        manager.unregister("leaves")
        manager.register(New([], "late", result="replaced"), "late")
        return run(manager, "one")

    manager.register(Constant(1), "one")
    manager.register(Constant(leaves), "leaves")
    assert run(manager, "leaves") == "replaced"
    assert manager.backends() == ("one",)


@dataclasses.dataclass
class Equal:
    """Two of them are equal and have no hash."""

    value: int

    @hookimpl
    def select_backend(self) -> Accepted:
        return Accepted()

    @hookimpl
    def forward(self) -> int:
        return self.value


def test_equal_plugins_without_a_hash(manager: BackendManager) -> None:
    for name in ("a", "b", "c"):
        manager.register(Equal(7), name)
    manager.unregister("a")
    assert [run(manager, name) for name in ("b", "c")] == [7, 7]


def test_one_plugin_has_one_name(manager: BackendManager) -> None:
    plugin = Constant(1)
    manager.register(plugin, "first")
    with pytest.raises(ValueError, match="'second': the same plugin is registered already, under the name 'first'"):
        manager.register(plugin, "second")
    manager.unregister("first")
    manager.register(plugin, "second")
    assert run(manager, "second") == 1


@pytest.mark.parametrize("name", ["", " ", "a,b", " a", "a\n", "\x1b[31m"])
def test_a_name_that_no_variable_can_hold(manager: BackendManager, name: str) -> None:
    with pytest.raises(ValueError, match="a printable string without commas"):
        manager.register(Constant(1), name)


def test_a_name_is_a_text(manager: BackendManager) -> None:
    with pytest.raises(TypeError, match="name=5; a backend's name is a string"):
        manager.register(Constant(1), 5)


@pytest.mark.parametrize("name", ["注意", "flash.attn-π", "two words"])
def test_unusual_names(manager: BackendManager, name: str) -> None:
    manager.register(Constant(1), name)
    assert manager.backends() == (name,)
    assert run(manager, name) == 1


def unmarked_module(**functions: object) -> types.ModuleType:
    module = types.ModuleType("a_module")
    vars(module).update(functions)
    return module


class OnlySelects:
    @hookimpl
    def select_backend(self) -> Accepted:
        return Accepted()

    def backward(self) -> None: ...


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        (None, "'x', None, implements no hook; a backend is a module or an object with select_backend, forward"),
        (unmarked_module(), "implements no hook"),
        (unmarked_module(select_backend=print), "has select_backend without the marker; decorate it with @mla_plugin"),
        (unmarked_module(select_backend=print, forward=print), "has select_backend and forward without the marker"),
        (OnlySelects(), "has backward without the marker"),
        (Constant, r"is a class whose hooks need an instance; register Constant\(\)"),
    ],
)
def test_a_forgotten_marker_is_an_error_that_says_so(manager: BackendManager, plugin: object, words: str) -> None:
    with pytest.raises(pluggy.PluginValidationError, match=words):
        manager.register(plugin, "x")
    assert manager.backends() == manager.wrappers() == ()


def test_a_module_and_a_class_of_static_functions_are_plugins(manager: BackendManager) -> None:
    class Static:
        @staticmethod
        @hookimpl
        def select_backend() -> Accepted:
            return Accepted()

        @hookimpl(specname="forward")
        @staticmethod
        def compute() -> int:
            return 2

    @hookimpl
    def select_backend() -> Accepted:
        return Accepted()

    manager.register(unmarked_module(select_backend=select_backend, forward=hookimpl(lambda: 1)), "module")
    assert run(manager, "module") == 1
    manager.register(Static, "static")
    assert manager.backends() == ("module", "static")


def test_a_hook_of_another_name_needs_no_function_of_the_hooks_name(manager: BackendManager) -> None:
    class Named(Constant):
        @hookimpl(specname="backward")
        def gradient(self) -> str:
            return "gradient"

    manager.register(Named(1), "named")
    assert manager.caller("backward", "named")(plan=None, residuals=None, dout=None, dlse=None) == "gradient"


def test_a_hook_that_is_called_directly_gets_what_pluggy_would_pass() -> None:
    """One implementation and no wrapper: fewer arguments, defaults, and a wrapper that comes and goes."""

    class Backend:
        @hookimpl
        def select_backend(self) -> Accepted:
            return Accepted()

        @hookimpl
        def forward(self, tensors: object) -> object:
            return ("forward", tensors)

        @hookimpl
        def backward(self, plan: object, dlse: object = "default") -> object:
            return (plan, dlse)

    class Wrapper:
        @hookimpl(wrapper=True)
        def forward(self) -> Iterator[None]:
            return ("wrapped", (yield))  # type: ignore[misc]

    manager = BackendManager()
    manager.register(Backend(), "direct")
    by_pluggy = pluggy.PluginManager("mla_plugin")
    by_pluggy.add_hookspecs(spec)
    by_pluggy.register(Backend())
    forward = {"plan": 1, "tensors": 2}
    backward = {"plan": 1, "residuals": 2, "dout": 3, "dlse": 4}

    def both() -> None:
        assert manager.caller("forward", "direct")(**forward) == by_pluggy.hook.forward(**forward)
        assert manager.caller("backward", "direct")(**backward) == by_pluggy.hook.backward(**backward)

    both()
    manager.register(Wrapper(), "around")
    wrapper = Wrapper()
    by_pluggy.register(wrapper)
    both()
    assert manager.caller("forward", "direct")(**forward) == ("wrapped", ("forward", 2))
    manager.unregister("around")
    by_pluggy.unregister(wrapper)
    both()


def test_a_hook_that_takes_its_arguments_by_position_alone_gets_them() -> None:
    """A slash in the signature, or a decorator that passes ``*args`` on: pluggy calls both by position."""

    def decorated(function: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(function)
        def call(*args: object) -> object:
            return function(*args)

        return call

    class Backend:
        @hookimpl
        def select_backend(self, request: object, platform: object, /) -> Accepted:
            return Accepted()

        @hookimpl
        def forward(self, plan: object, tensors: object, /) -> object:
            return (plan, tensors)

        @hookimpl
        @decorated
        def backward(self, dlse: object, dout: object, residuals: object, plan: object) -> object:
            return (plan, residuals, dout, dlse)

    manager = BackendManager(builtins={})
    manager.register(Backend(), "positional")
    assert manager.caller("select_backend", "positional")(request=1, platform=2) == [Accepted()]
    assert manager.caller("forward", "positional")(plan=1, tensors=2) == (1, 2)
    assert manager.caller("backward", "positional")(plan=1, residuals=2, dout=3, dlse=4) == (1, 2, 3, 4)
