"""Entry points of other packages: not imported while they are blocked, named with their package when broken."""

from __future__ import annotations

import logging
import re
import threading
import types
from collections.abc import Callable, Iterator

import pytest

from mla_plugin import Accepted, NoBackendError, hookimpl, resolve
from mla_plugin.cli import doctor
from mla_plugin.hooks import manager as manager_module
from mla_plugin.hooks.manager import BUILTIN_BACKENDS, BackendManager, get_manager
from mla_plugin.resolver import asking, survey
from mla_plugin.resolver.attention import _plan
from tests.requests import mla_request

REQUEST = mla_request(device_type="cpu")


class First:
    """A backend that is chosen before every built-in one."""

    @hookimpl
    def select_backend(self) -> Accepted:
        return Accepted(priority=1)


class EntryPoint:
    """An entry point whose module is what ``load`` makes, and which counts its imports."""

    def __init__(self, name: str, load: Callable[[], object] = First, distribution: str | None = "package") -> None:
        self.name, self._load, self.imports = name, load, 0
        self.dist = None if distribution is None else types.SimpleNamespace(name=distribution)

    def load(self) -> object:
        self.imports += 1
        return self._load()


def raising(error: BaseException) -> Callable[[], object]:
    def load() -> object:
        raise error

    return load


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """The process starts again with these entry points and no others."""
    _plan.cache_clear()

    def use(*entry_points: EntryPoint) -> None:
        monkeypatch.setattr(manager_module.importlib.metadata, "entry_points", lambda group: entry_points)
        monkeypatch.setattr(manager_module, "_manager", None)
        monkeypatch.setattr(asking, "_warned", set())

    yield use
    _plan.cache_clear()


def test_a_blocked_module_is_not_imported_until_it_is_unblocked(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry_point = EntryPoint("shy")
    install(entry_point)
    monkeypatch.setenv("MLA_PLUGIN_BLOCK", "shy, cudnn")
    decision = survey(REQUEST)
    assert (entry_point.imports, get_manager().waiting()) == (0, ("shy",))
    assert get_manager().backends() == tuple(BUILTIN_BACKENDS)
    (entry,) = [entry for entry in decision.trace if entry.backend == "shy"]
    assert (entry.layer, entry.reasons) == ("environment", ("excluded by MLA_PLUGIN_BLOCK",))
    with pytest.raises(ValueError, match="'shy' is registered, MLA_PLUGIN_BLOCK named it, so it was not imported"):
        get_manager().caller("forward", "shy")
    with pytest.raises(NoBackendError, match=r"shy .*excluded by MLA_PLUGIN_BLOCK"):
        resolve(REQUEST, backend="shy")
    monkeypatch.setenv("MLA_PLUGIN_BLOCK", "cudnn")
    assert resolve(REQUEST).forward_backend == "shy"
    monkeypatch.setenv("MLA_PLUGIN_BLOCK", "shy")
    assert resolve(REQUEST).forward_backend == "sdpa"
    assert (entry_point.imports, get_manager().waiting()) == (1, ())


def test_a_name_that_is_registered_and_blocked_stands_once_in_the_trace(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(EntryPoint("shy", distribution="shy-attention"))
    monkeypatch.setenv("MLA_PLUGIN_BLOCK", "shy")
    get_manager().register(First(), "shy")
    assert [entry.backend for entry in survey(REQUEST).trace].count("shy") == 1
    monkeypatch.delenv("MLA_PLUGIN_BLOCK")
    assert resolve(REQUEST).forward_backend == "shy"
    assert "a backend named 'shy' is registered already" in get_manager().broken["shy"]


def test_what_is_not_blocked_is_there_before_the_first_selection(install: Callable[..., None]) -> None:
    entry_point = EntryPoint("eager")
    install(entry_point)
    assert get_manager().backends()[-1] == "eager"
    assert entry_point.imports == 1


def test_a_module_unblocked_in_many_threads_is_imported_once(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry_points = [EntryPoint(f"shy{i}") for i in range(20)]
    install(*entry_points)
    monkeypatch.setenv("MLA_PLUGIN_BLOCK", ",".join(entry_point.name for entry_point in entry_points))
    manager, errors, start = get_manager(), [], threading.Barrier(8)

    def load() -> None:
        try:
            start.wait()
            manager.load(frozenset())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [entry_point.imports for entry_point in entry_points] == [1] * 20
    assert len(manager.backends()) == len(BUILTIN_BACKENDS) + 20
    assert (manager.broken, manager.waiting()) == ({}, ())


def test_the_first_use_in_many_threads_makes_one_manager(install: Callable[..., None]) -> None:
    entry_point, start = EntryPoint("eager"), threading.Barrier(8)
    install(entry_point)
    found: list[BackendManager] = []

    def use() -> None:
        start.wait()
        found.append(get_manager())

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [get_manager()] * 8
    assert entry_point.imports == 1
    assert get_manager().backends()[-1] == "eager"


class Odd(BaseException):
    """Neither an Exception nor one of Python's own."""


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (raising(Odd("x")), "Odd: x"),
        (raising(SystemExit(2)), "SystemExit: 2"),
        (raising(MuteError()), "MuteError, whose message cannot be read"),
        (lambda: None, "PluginValidationError: the plugin 'odd', None, implements no hook"),
        (lambda: types.ModuleType("empty"), "implements no hook"),
        (lambda: types.SimpleNamespace(select_backend=print), "has select_backend without the marker"),
        (lambda: First, r"is a class whose hooks need an instance; register First\(\)"),
    ],
)
def test_a_broken_entry_point_is_named_with_its_package(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture, load: Callable[[], object], reason: str
) -> None:
    install(EntryPoint("odd", load, "odd-package"), EntryPoint("sound"))
    with caplog.at_level(logging.WARNING, "mla_plugin"):
        assert resolve(REQUEST).forward_backend == "sound"
    (found,) = [finding for finding in doctor.backends() if finding.state == "broken"]
    for text in (found.text, caplog.text):
        assert re.search(f"odd.* from odd-package: .*{reason}", text)
    assert found.remedy == "pip install --upgrade odd-package"


def test_an_interrupted_import_is_not_a_broken_package(install: Callable[..., None]) -> None:
    interrupted = [True]

    def load() -> object:
        if interrupted.pop() if interrupted else False:
            raise KeyboardInterrupt
        return First()

    install(EntryPoint("slow", load))
    with pytest.raises(KeyboardInterrupt):
        get_manager()
    assert get_manager().backends()[-1] == "slow"
    assert get_manager().broken == {}


def test_an_import_interrupted_at_a_selection_is_tried_again(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry_point = EntryPoint("slow", raising(KeyboardInterrupt()))
    install(entry_point)
    monkeypatch.setenv("MLA_PLUGIN_BLOCK", "slow")
    get_manager()
    with pytest.raises(KeyboardInterrupt):
        get_manager().load(frozenset())
    entry_point._load = First
    get_manager().load(frozenset())
    assert get_manager().backends()[-1] == "slow"


def test_two_packages_with_one_name(install: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    """The first in the alphabet is used, in whatever order the file system gives them."""
    used, left_out = EntryPoint("same", distribution="alpha"), EntryPoint("same", distribution="beta")
    install(left_out, used)
    with caplog.at_level(logging.WARNING, "mla_plugin"):
        assert resolve(REQUEST).forward_backend == "same"
    assert (used.imports, left_out.imports) == (1, 0)
    findings = {finding.text: finding for finding in doctor.backends()}
    assert findings["same, from alpha"].state == "ok"
    (broken,) = [finding for finding in findings.values() if finding.state == "broken"]
    assert broken.text == (
        "same, from alpha: beta has an entry point of this name too, which is left out; uninstall one of them"
    )
    assert broken.remedy == "pip uninstall alpha"
    assert "beta has an entry point of this name too" in caplog.text


def test_a_name_of_ours_is_of_ours_in_the_report(install: Callable[..., None]) -> None:
    thief = EntryPoint("sdpa", distribution="thief")
    install(thief)
    texts = [finding.text for finding in doctor.backends()]
    assert "sdpa, from mla-plugin" in texts
    assert "sdpa, from thief: its name is that of a built-in backend; choose another name" in texts
    assert thief.imports == 0


def test_wrappers_and_blocked_packages_stand_in_the_report(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = types.SimpleNamespace(forward=hookimpl(wrapper=True)(lambda: (yield)))
    install(EntryPoint("timer", lambda: timer, "timers"), EntryPoint("shy", distribution=None))
    monkeypatch.setenv("MLA_PLUGIN_BLOCK", "shy")
    findings = {finding.text: finding.state for finding in (*doctor.backends(), *doctor.variables())}
    assert findings["timer, from timers, hook wrappers"] == "ok"
    assert findings["shy, from an unknown package: not imported, excluded by MLA_PLUGIN_BLOCK"] == "note"
    assert "broken" not in findings.values()


def test_unreadable_metadata_leaves_the_builtin_backends(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def entry_points(group: str) -> object:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    install()
    monkeypatch.setattr(manager_module.importlib.metadata, "entry_points", entry_points)
    assert get_manager().backends() == tuple(BUILTIN_BACKENDS)
    assert "no package's entry points can be read: UnicodeDecodeError" in caplog.text
    assert any("UnicodeDecodeError" in finding.text for finding in doctor.backends())


def test_a_broken_package_that_is_asked_for_says_why(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(EntryPoint("shaky", raising(ImportError("no libshaky.so")), "shaky-attention"))
    message = (
        "no backend named 'shaky' is registered, shaky-attention is broken: ImportError: no libshaky.so; registered"
    )
    with pytest.raises(ValueError, match=message):
        resolve(REQUEST, backend="shaky")
    monkeypatch.setenv("MLA_PLUGIN_BACKEND", "shaky")
    with pytest.raises(ValueError, match=message):
        resolve(REQUEST)
    assert any(message in finding.text for finding in doctor.variables() if finding.state == "broken")


def test_a_misspelt_name_in_the_block_list_is_warned_about_once(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    timer = types.SimpleNamespace(forward=hookimpl(wrapper=True)(lambda: (yield)))
    install(EntryPoint("shy"), EntryPoint("gone", raising(ImportError("x"))), EntryPoint("timer", lambda: timer))
    get_manager()
    caplog.clear()
    for value, warnings in (("cudnn, gone, timer", 0), ("cudn, shy, fa22", 1), ("cudn", 1), ("cudn, shy, fa22", 0)):
        monkeypatch.setenv("MLA_PLUGIN_BLOCK", value)
        for batch in (1, 2):
            survey(REQUEST.replace(batch_size=batch))
        found = [record.getMessage() for record in caplog.records]
        assert len(found) == warnings, value
        caplog.clear()
        if "fa22" in value and found:
            assert found[0].startswith(
                "MLA_PLUGIN_BLOCK='cudn, shy, fa22' names 'cudn', 'fa22', which is not registered"
            )
            assert found[0].endswith("registered: triton, fa3, fa4, fa2, flashinfer, flashmla, cudnn, sdpa, shy")


def test_a_wrapper_is_no_backend_to_ask_for(install: Callable[..., None]) -> None:
    timer = types.SimpleNamespace(forward=hookimpl(wrapper=True)(lambda: (yield)))
    install(EntryPoint("timer", lambda: timer))
    with pytest.raises(ValueError, match="'timer' is registered, it is a plugin of hook wrappers; registered: triton"):
        resolve(REQUEST, backend="timer")


def test_a_module_that_computes_attention_when_unblocked_goes_on_without_itself(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = []

    def load() -> object:
        monkeypatch.delenv("MLA_PLUGIN_BLOCK", raising=False)
        chosen.append(resolve(REQUEST.replace(batch_size=31)).forward_backend)
        return First()

    install(EntryPoint("eager", load))
    monkeypatch.setenv("MLA_PLUGIN_BLOCK", "eager")
    get_manager()
    monkeypatch.delenv("MLA_PLUGIN_BLOCK")
    assert resolve(REQUEST).forward_backend == "eager"
    assert resolve(REQUEST.replace(batch_size=31)).forward_backend == "eager"
    assert chosen == ["sdpa"]
