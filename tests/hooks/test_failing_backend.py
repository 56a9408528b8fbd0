"""An error out of a backend reaches the user as it is, with a note that names the backend and what to set."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterator

import pytest
import torch

import mla_plugin
from mla_plugin import Accepted, AttentionOutput, hookimpl
from mla_plugin.hooks.manager import get_manager
from mla_plugin.operations.attention import dispatch
from tests.hooks.notes import notes

Q = torch.randn(1, 5, 2, 8)


class Failing:
    """Raises in the hooks that it is told to; its forward computes nothing."""

    def __init__(self, error: BaseException, hook: str) -> None:
        self.error, self.hook = error, hook

    def _fail(self, hook: str) -> None:
        if hook == self.hook:
            raise self.error

    @hookimpl
    def select_backend(self) -> Accepted:
        self._fail("select_backend")
        return Accepted(priority=1)

    @hookimpl
    def forward(self, tensors: object) -> object:
        self._fail("forward")
        return AttentionOutput(torch.zeros(1, 5, 2, 8), torch.zeros(1, 2, 5))

    @hookimpl
    def backward(self) -> object:
        self._fail("backward")


@pytest.fixture
def add() -> Iterator[Callable[..., None]]:
    added = []

    def register(plugin: object, name: str = "failing") -> None:
        get_manager().register(plugin, name)
        added.append(name)

    yield register
    for name in added:
        get_manager().unregister(name)


class OwnError(ValueError):
    """Takes no ordinary arguments."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(code)
        self.where = where


ERRORS = {
    RuntimeError: lambda: RuntimeError("boom"),
    NotImplementedError: lambda: NotImplementedError("not yet"),
    torch.OutOfMemoryError: lambda: torch.OutOfMemoryError("CUDA out of memory"),
    KeyError: lambda: KeyError("k"),
    OwnError: lambda: OwnError(3, where="kernel"),
}


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("hook", ["forward", "backward"])
def test_the_error_keeps_its_type_and_names_its_backend(
    add: Callable[..., None], kind: type[Exception], hook: str
) -> None:
    error = ERRORS[kind]()
    add(Failing(error, hook))
    with pytest.raises(kind) as caught:
        mla_plugin.attention(Q.clone().requires_grad_(), Q, Q)[0].sum().backward()
    assert caught.value is error
    (note,) = notes(error)
    assert note == (
        f"mla-plugin: raised in {hook} of the backend 'failing'; MLA_PLUGIN_BLOCK=failing excludes it, "
        "MLA_PLUGIN_BACKEND or backend= chooses another"
    )
    assert note in "".join(traceback.format_exception(error))


def test_decode_names_its_backend_too(add: Callable[..., None]) -> None:
    add(Failing(RuntimeError("boom"), "forward"))
    cache = torch.randn(1, 4, 16), torch.randn(1, 4, 8)
    with pytest.raises(RuntimeError, match="boom") as caught:
        mla_plugin.decode(torch.randn(1, 1, 2, 16), torch.randn(1, 1, 2, 8), cache, softmax_scale=1.0)
    assert "raised in forward of the backend 'failing'" in notes(caught.value)[0]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_what_is_no_error_passes_untouched(add: Callable[..., None], error: BaseException) -> None:
    add(Failing(error, "forward"))
    with pytest.raises(type(error)) as caught:
        mla_plugin.attention(Q, Q, Q)
    assert notes(caught.value) == []


def test_one_error_raised_twice_has_one_note(add: Callable[..., None]) -> None:
    error = RuntimeError("boom")
    add(Failing(error, "forward"))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="boom"):
            mla_plugin.attention(Q, Q, Q)
    assert len(notes(error)) == 1


class OldError(RuntimeError):
    """As errors are before Python 3.11."""

    add_note = None


@pytest.mark.parametrize("kind", ["plain", "from a cause", "from a context", "from None"])
def test_without_notes_the_cause_names_the_backend(add: Callable[..., None], kind: str) -> None:
    class Old(Failing):
        def _fail(self, hook: str) -> None:
            if hook != "forward":
                return
            if kind == "plain":
                raise OldError("boom")
            try:
                raise KeyError("inner")
            except KeyError as inner:
                if kind == "from a context":
                    raise OldError("boom")  # noqa: B904
                raise OldError("boom") from (inner if kind == "from a cause" else None)

    add(Old(RuntimeError(), "forward"))
    with pytest.raises(OldError) as caught:
        mla_plugin.attention(Q, Q, Q)
    text = "".join(traceback.format_exception(caught.value))
    assert text.rstrip().endswith("OldError: boom")
    assert text.count("raised in forward of the backend 'failing'; MLA_PLUGIN_BLOCK=failing") == 1
    assert ("KeyError: 'inner'" in text) == (kind in ("from a cause", "from a context"))


def test_an_error_that_takes_no_note_is_not_hidden(add: Callable[..., None]) -> None:
    class FrozenError(RuntimeError):
        def add_note(self, note: str) -> None:
            raise AttributeError("frozen")

    add(Failing(FrozenError("boom"), "forward"))
    with pytest.raises(FrozenError, match="boom"):
        mla_plugin.attention(Q, Q, Q)


def test_a_backend_that_computes_with_another_one(add: Callable[..., None]) -> None:
    """Each of two nested backends computes its own call, and both are named when the inner one fails."""

    class Outer(Failing):
        @hookimpl
        def forward(self, plan: mla_plugin.Plan, tensors: mla_plugin.AttentionTensors) -> AttentionOutput:
            get_manager().register(object_with_wrapper(), "meanwhile")
            try:
                options = {"attn_mask_type": plan.request.attn_mask_type, "return_lse": True}
                out, lse = mla_plugin.attention(tensors.q, tensors.k, tensors.v, backend=self.hook, **options)
            finally:
                get_manager().unregister("meanwhile")
            return AttentionOutput(-out, lse)

    add(Outer(RuntimeError(), "sdpa"), "outer")
    expected = mla_plugin.attention(Q, Q, Q, backend="sdpa")
    torch.testing.assert_close(mla_plugin.attention(Q, Q, Q, backend="outer"), -expected, rtol=0, atol=0)
    add(Outer(RuntimeError(), "failing"), "outer2")
    add(Failing(RuntimeError("boom"), "forward"))
    with pytest.raises(RuntimeError, match="boom") as caught:
        mla_plugin.attention(Q, Q, Q, backend="outer2")
    inner, outer = notes(caught.value)
    assert "'failing' or in its hook wrappers, of 'meanwhile'" in inner
    assert "'outer2'; MLA" in outer


def object_with_wrapper() -> object:
    class Timer:
        @hookimpl(wrapper=True)
        def forward(self) -> Iterator[None]:
            return (yield)

    return Timer()


def test_a_backend_unregistered_between_decision_and_call_is_named(add: Callable[..., None]) -> None:
    request = mla_plugin.AttentionRequest("bshd", torch.float32, "cpu", 1, 2, 2, 5, 5, 8, 8)
    get_manager().register(Failing(RuntimeError(), ""), "short")
    plan = mla_plugin.resolve(request, backend="short")
    get_manager().unregister("short")
    with pytest.raises(ValueError, match="no backend named 'short' is registered; registered: triton"):
        dispatch.forward(plan, mla_plugin.AttentionTensors(Q, Q, Q, 1.0))
    with pytest.raises(ValueError, match="no backend named 'short' is registered"):
        mla_plugin.resolve(request, backend="short")
    get_manager().register(Failing(RuntimeError(), ""), "short")
    assert mla_plugin.resolve(request).forward_backend == "short"
    get_manager().unregister("short")
    assert mla_plugin.resolve(request).forward_backend == "sdpa"


def test_gradients_are_checked_once_a_wrapper_is_around_the_backward(add: Callable[..., None]) -> None:
    """Also where it came after the forward, which had no wrapper and was not checked."""

    class Rounding:
        @hookimpl(wrapper=True)
        def backward(self) -> Iterator[None]:
            found = yield
            return dataclasses.replace(found, dk=found.dk.bfloat16())  # type: ignore[misc]

    q, k, v = (Q.clone().requires_grad_() for _ in range(3))
    out = mla_plugin.attention(q, k, v, backend="sdpa")
    add(Rounding(), "rounding")
    with pytest.raises(RuntimeError, match=r"'sdpa' returned dk as .* torch\.bfloat16"):
        out.sum().backward()
