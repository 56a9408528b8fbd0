"""A wrong answer of one plugin is that plugin's own: it is in the trace under its name, and the others are used."""

from __future__ import annotations

import enum
import types
from collections.abc import Iterator

import pytest
import torch

from mla_plugin import (
    Accepted,
    AttentionRequest,
    DecodeRequest,
    NoBackendError,
    Platform,
    Refused,
    attention,
    explain,
    hookimpl,
    resolve,
)
from mla_plugin.hooks.manager import get_manager
from mla_plugin.resolver import preference, survey, survey_decode
from mla_plugin.resolver.why import why
from tests.requests import mla_request

REQUEST = mla_request(device_type="cpu")
DECODE = DecodeRequest(REQUEST.dtype, "cpu", 1, 1, 2, 512, 64, 64)


def forged(answer: Accepted | Refused, **attributes: object) -> Accepted | Refused:
    """An answer with attributes that its class would not take."""
    for name, value in attributes.items():
        object.__setattr__(answer, name, value)
    return answer


class Lazy(Accepted):
    """Computes its priority, and fails."""

    @property
    def priority(self) -> int:
        raise ZeroDivisionError("no priority")

    def __init__(self) -> None:
        pass


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Made:
    """Makes a new object of the class for each request."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __call__(self) -> object:
        return self.kind()


class Level(enum.IntEnum):
    HIGH = 9


class Plugin:
    def __init__(self, answer: object) -> None:
        self.answer = answer

    @hookimpl
    def select_backend(self, request: AttentionRequest) -> object:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer() if callable(self.answer) and not isinstance(self.answer, type) else self.answer


@pytest.fixture
def add() -> Iterator[object]:
    added = []

    def register(plugin: object, name: str = "odd") -> None:
        get_manager().register(plugin, name)
        added.append(name)

    yield register
    for name in added:
        get_manager().unregister(name)


WRONG = [
    (lambda: Refused("too wide"), "'too wide'"),
    (lambda: Refused(5), "5"),
    (lambda: Refused((5,)), "(5,)"),
    (lambda: Refused(("a", None)), "None"),
    (lambda: forged(Refused(("a",)), reasons="too wide"), "reasons='too wide'"),
    (lambda: Accepted(notes="a note"), "'a note'"),
    (lambda: Accepted(notes=(1,)), "(1,)"),
    (lambda: Accepted(notes=["a"]), "['a']"),
    (lambda: Accepted(priority=True), "TypeError: priority=True; expected an integer"),
    (lambda: forged(Accepted(), priority=True), "priority=True"),
    (lambda: Accepted(priority=1.0), "1.0"),
    (lambda: Accepted(priority=float("nan")), "nan"),
    (lambda: forged(Accepted(), priority=float("nan")), "priority=nan"),
    (lambda: Accepted(priority=None), "None"),
    (lambda: Accepted(backward_by="sdqa"), "'sdqa'"),
    (lambda: Accepted(backward_by=["sdpa"]), "['sdpa']"),
    (lambda: Accepted(backward_by=""), "''"),
    (lambda: Accepted(drops_nan="no"), "drops_nan='no'"),
    (lambda: Accepted(kv_cache_formats="fp8"), "kv_cache_formats='fp8'"),
    (Lazy, "Lazy"),
    (Made(Lazy), "no priority"),
    (Accepted, "Accepted"),
    (Refused, "Refused"),
    (Made(Mute), "Mute"),
    (lambda: None, "None"),
    (lambda: [Accepted()], "Accepted"),
    (SystemExit(3), "SystemExit: 3"),
    (RecursionError("deep"), "RecursionError: deep"),
]


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize(("answer", "words"), WRONG)
def test_a_wrong_answer_is_a_refusal_of_its_plugin(add: object, answer: object, words: str, is_training: bool) -> None:
    add(Plugin(answer))
    add(Plugin(Accepted()), "sound")
    request = REQUEST.replace(is_training=is_training)
    for decision in (survey(request), survey_decode(DECODE)):
        (entry,) = [entry for entry in decision.trace if entry.backend == "odd"]
        assert (entry.accepted, entry.layer) == (False, "backend")
        assert words in entry.reasons[0]
        assert decision.plan.forward_backend == "sound"
    assert "odd" in explain(request)
    with pytest.raises(NoBackendError, match="odd"):
        resolve(request, backend="odd")


def test_an_unknown_backward_lists_the_known(add: object) -> None:
    add(Plugin(Accepted(backward_by="sdqa")))
    (entry,) = [entry for entry in survey(REQUEST).trace if entry.backend == "odd"]
    assert "backward_by='sdqa'" in entry.reasons[0]
    assert "cudnn, fa2, fa3, fa4, flashinfer, flashmla, odd, sdpa, triton" in entry.reasons[0]


def test_a_blocked_backward_is_named_as_blocked(add: object, monkeypatch: pytest.MonkeyPatch) -> None:
    add(Plugin(Accepted(priority=1, backward_by="cudnn")))
    monkeypatch.setenv("MLA_PLUGIN_BLOCK", "cudnn")
    decision = survey(REQUEST.replace(is_training=True))
    assert decision.plan.forward_backend == "sdpa"
    assert decision.trace[0].reasons == ("its backward runs on 'cudnn', which MLA_PLUGIN_BLOCK excludes",)
    assert survey(REQUEST).plan.forward_backend == "odd"


def test_a_backward_that_is_switched_off_is_named_as_off(add: object) -> None:
    add(Plugin(Accepted(priority=1, backward_by="sdpa")))
    training, off = REQUEST.replace(is_training=True), {"NVTE_UNFUSED_ATTN": "0"}
    assert survey(training, environ={}).plan.backward_backend == "sdpa"
    decision = survey(training, environ=off)
    assert decision.plan is None
    assert decision.trace[0].reasons == ("its backward runs on 'sdpa', which NVTE_UNFUSED_ATTN=0 switches off",)
    blocked = survey(training, environ=off | {"MLA_PLUGIN_BLOCK": "sdpa"})
    assert blocked.trace[0].reasons == ("its backward runs on 'sdpa', which MLA_PLUGIN_BLOCK excludes",)
    assert survey(REQUEST, environ=off).plan.forward_backend == "odd"
    plan = survey(training, backend="odd", environ=off).plan
    assert (plan.forward_backend, plan.backward_backend) == ("odd", "sdpa")


def test_a_backward_that_refuses_is_named_so(add: object) -> None:
    add(Plugin(Accepted(priority=1, backward_by="cudnn")))
    decision = survey(REQUEST.replace(is_training=True), environ={})
    assert decision.trace[0].reasons == ("its backward runs on 'cudnn', which refuses the request",)


def test_an_answer_is_read_once(add: object) -> None:
    class Once(Accepted):
        """Its priority can be read once."""

        @property
        def priority(self) -> int:
            vars(self)["reads"] = vars(self).get("reads", 0) + 1
            return 5 if vars(self)["reads"] == 1 else 1 / 0

        def __init__(self) -> None:
            pass

    add(Plugin(Made(Once)))
    assert survey(REQUEST).plan.forward_backend == "odd"


def test_right_answers_of_unusual_classes(add: object) -> None:
    class Mine(Accepted):
        """Nothing but another name."""

    add(Plugin(Mine(priority=3, notes=("mine",))), "mine")
    add(Plugin(Accepted(priority=Level.HIGH)), "level")
    decision = survey(REQUEST)
    assert [entry.backend for entry in decision.trace[:2]] == ["level", "mine"]
    assert decision.trace[1].reasons == ("mine",)


class Wrapper:
    """Replaces every backend's answer by another result."""

    def __init__(self, result: object) -> None:
        self.result = result

    @hookimpl(wrapper=True)
    def select_backend(self) -> Iterator[None]:
        yield
        return self.result


@pytest.mark.parametrize("result", [Accepted(), None, "yes", [Accepted(), Accepted()], (Accepted(),), {}])
def test_a_wrapper_that_breaks_the_answers_breaks_no_call(add: object, result: object) -> None:
    add(Wrapper(result), "wrapper")
    decision = survey(REQUEST)
    assert decision.plan is None
    assert all("with its hook wrappers; it must return a list of one answer" in e.reasons[0] for e in decision.trace)


def test_a_wrapper_may_replace_the_answers(add: object) -> None:
    add(Wrapper([Refused(("not today",))]), "wrapper")
    assert {entry.reasons for entry in survey(REQUEST).trace} == {("not today",)}


def test_an_interrupted_selection_is_interrupted(add: object) -> None:
    add(Plugin(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        survey(REQUEST)


def test_a_backend_that_asks_for_a_decision_in_its_own_is_left_out(add: object) -> None:
    add(Plugin(lambda: resolve(REQUEST.replace(batch_size=99))), "odd")
    decision = survey(REQUEST.replace(batch_size=99))
    assert decision.plan.forward_backend == "sdpa"


@pytest.mark.parametrize("names", [("a", "b", "c"), ("c", "b", "a"), ("b", "c", "a")])
def test_equal_priorities_are_tried_by_name(add: object, names: tuple[str, ...]) -> None:
    for name in names:
        add(Plugin(Accepted(priority=2)), name)
    for decision in (survey(REQUEST), survey_decode(DECODE)):
        assert [entry.backend for entry in decision.trace[:3]] == ["a", "b", "c"]
    assert preference.by_priority(dict.fromkeys(names, 0) | {"z": 1}) == ["z", "a", "b", "c"]


@pytest.mark.parametrize("backend", [5, 0, False, True, 1.5, ["sdpa"], {}, b"sdpa", object])
@pytest.mark.parametrize("request_", [REQUEST, DECODE], ids=["attention", "decode"])
def test_a_backend_is_asked_for_by_a_text(backend: object, request_: object) -> None:
    for call in (resolve, explain):
        with pytest.raises(TypeError) as caught:
            call(request_, backend=backend)
        assert f"backend={backend!r}; the name of a backend, or None" in str(caught.value)
        assert "registered: triton, fa3" in str(caught.value)


@pytest.mark.parametrize("tokens", [3, 0])
def test_a_call_checks_the_backend_even_if_there_is_nothing_to_compute(tokens: int) -> None:
    q = torch.zeros(1, tokens, 2, 8)
    for backend in (5, ["sdpa"], b"sdpa"):
        with pytest.raises(TypeError, match=r"backend=.*; the name of a backend, or None for the best one"):
            attention(q, q, q, backend=backend)


@pytest.mark.parametrize("backend", ["", "  "])
@pytest.mark.parametrize("request_", [REQUEST, DECODE], ids=["attention", "decode"])
def test_an_empty_name_is_not_none(backend: str, request_: object) -> None:
    for call in (resolve, explain):
        with pytest.raises(
            ValueError, match=f"backend='{backend}'; the name of a backend, or None.*registered: triton"
        ):
            call(request_, backend=backend)


ENTRIES = {
    "resolve": resolve,
    "explain": explain,
    "explain, why": lambda request, **given: explain(request, why="sdpa", **given),
    "why": lambda request, **given: why("sdpa", request, **given),
    "survey": lambda request, **given: (survey if isinstance(request, AttentionRequest) else survey_decode)(
        request, **given
    ),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("request_", [REQUEST, DECODE], ids=["attention", "decode"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"platform": "cuda"}, "platform='cuda'; expected a mla_plugin.Platform, or None for the current device"),
        ({"platform": Platform}, "expected a mla_plugin.Platform"),
        ({"platform": 0}, "platform=0; expected a mla_plugin.Platform"),
        ({"environ": ["NVTE_FLASH_ATTN=0"]}, "environ=['NVTE_FLASH_ATTN=0']; expected names and values"),
        ({"environ": ""}, "environ=''; expected names and values as in os.environ, all strings"),
        ({"environ": {"NVTE_FLASH_ATTN": 0}}, "environ={'NVTE_FLASH_ATTN': 0}; expected names and values"),
        ({"environ": {b"NVTE_FLASH_ATTN": "0"}}, "such as {'NVTE_FLASH_ATTN': '0'}, or None for the process's"),
    ],
)
def test_a_hypothetical_machine_is_checked_by_every_entry(
    entry: str, request_: object, given: dict[str, object], words: str
) -> None:
    with pytest.raises(TypeError) as caught:
        ENTRIES[entry](request_, **given)
    assert words in str(caught.value)


@pytest.mark.parametrize("request_", [REQUEST, DECODE], ids=["attention", "decode"])
def test_any_mapping_of_strings_is_an_environment(request_: object) -> None:
    environ = types.MappingProxyType({"NVTE_FLASH_ATTN": "0"})
    for call in ENTRIES.values():
        assert call(request_, platform=Platform(), environ=environ)
