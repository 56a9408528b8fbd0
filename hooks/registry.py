"""An immutable snapshot of what is registered: checked plugins, and a caller for each backend's hooks."""

from __future__ import annotations

import contextlib
import inspect
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pluggy

from mla_plugin.hooks import PROJECT_NAME, spec

HOOKS = ("select_backend", "forward", "backward")

Caller = Callable[..., Any]


def _hooks_of(plugins: Mapping[str, object]) -> pluggy.PluginManager:
    """A pluggy manager that holds only these plugins; errors as ``BackendManager.register``."""
    pm = pluggy.PluginManager(PROJECT_NAME)
    pm.add_hookspecs(spec)
    for name, plugin in plugins.items():
        pm.register(plugin, name=name)
    pm.check_pending()
    return pm


def _is_wrapper(implementation: pluggy.HookImpl) -> bool:
    return implementation.wrapper or implementation.hookwrapper


def _is_backend(plugin: object, name: str) -> bool:
    """True for a backend, False for a plugin made of hook wrappers; errors as ``BackendManager.register``."""
    callers = _hooks_of({name: plugin}).hook
    found = {hook: getattr(callers, hook).get_hookimpls() for hook in HOOKS}
    forgotten = [hook for hook in HOOKS if not found[hook] and _has_function(plugin, hook)]
    if forgotten:
        raise pluggy.PluginValidationError(
            plugin,
            f"the plugin {name!r} has {' and '.join(forgotten)} without the marker; decorate it with "
            "@mla_plugin.hookimpl, or rename it if it is not a hook",
        )
    methods = (implementation.function for hook in HOOKS for implementation in found[hook])
    if isinstance(plugin, type) and any("self" in inspect.signature(method).parameters for method in methods):
        raise pluggy.PluginValidationError(
            plugin, f"the plugin {name!r} is a class whose hooks need an instance; register {plugin.__name__}()"
        )
    if not any(found.values()):
        raise pluggy.PluginValidationError(
            plugin,
            f"the plugin {name!r}, {reprlib.repr(plugin)}, implements no hook; a backend is a module or an object with "
            f"{', '.join(HOOKS)}, each marked with @mla_plugin.hookimpl",
        )
    computes = {hook for hook in HOOKS if not all(map(_is_wrapper, found[hook]))}
    if computes and "select_backend" not in computes:
        raise pluggy.PluginValidationError(
            plugin,
            f"the plugin {name!r} implements {' and '.join(sorted(computes))} without select_backend, so nothing would "
            "ever choose it; add select_backend, or make it a wrapper",
        )
    return bool(computes)


def _has_function(plugin: object, name: str) -> bool:
    """Looked up without running a property of the plugin."""
    found = inspect.getattr_static(plugin, name, None)
    return callable(found) or isinstance(found, (staticmethod, classmethod))


def _add_note(error: Exception, note: str) -> None:
    """Attach a note that the traceback shows. Before Python 3.11 it is a cause, put before the error's own."""
    add_note = getattr(error, "add_note", None)
    if add_note is not None:
        if note not in getattr(error, "__notes__", ()):  # the same error object may be raised again
            add_note(note)
        return
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if not (isinstance(cause, RaisedInBackendError) and str(cause) == note):
        failure = RaisedInBackendError(note)
        failure.__cause__ = cause
        error.__cause__ = failure


class RaisedInBackendError(Exception):
    """Says which backend an error comes from, as the error's cause, where errors have no notes (Python 3.10)."""


def _direct(caller: pluggy.HookCaller) -> Caller | None:
    """The implementation itself, if it is the only one and has no wrapper around it: 5 us faster than the caller."""
    implementations, declared = caller.get_hookimpls(), caller.spec
    if len(implementations) != 1 or _is_wrapper(implementations[0]) or not declared or not declared.opts["firstresult"]:
        return None
    (only,) = implementations
    if getattr(only, "kwargnames", ()):  # arguments with defaults: only pluggy knows what to pass
        return None
    function, names = only.function, only.argnames
    if set(names) == set(declared.argnames) == _names_by_keyword(function):
        return function

    def run(**arguments: object) -> Any:
        return function(*[arguments[name] for name in names])

    return run


def _names_by_keyword(function: Callable[..., Any]) -> set[str]:
    """Arguments that can be passed by name. pluggy passes by position, on which a decorator or ``/`` may rely."""
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD}


def _caller_that_names(caller: pluggy.HookCaller, backend: str) -> Caller:
    """The hook's caller; an exception keeps its type and gets a note that names the backend."""
    around = ", ".join(repr(found.plugin_name) for found in caller.get_hookimpls() if _is_wrapper(found))
    note = (
        f"mla-plugin: raised in {caller.name} of the backend {backend!r}"
        + (f" or in its hook wrappers, of {around}" if around else "")
        + f"; MLA_PLUGIN_BLOCK={backend} excludes it, MLA_PLUGIN_BACKEND or backend= chooses another"
    )

    run = _direct(caller) or caller

    def call(**arguments: object) -> Any:
        try:
            return run(**arguments)
        except Exception as error:
            with contextlib.suppress(Exception):  # an exception that takes no note must not be replaced by another
                _add_note(error, note)
            raise

    return call


@dataclass(frozen=True)
class Registry:
    """What is registered at one moment. It is immutable, so a call in progress keeps the plugins it started with.

    Attributes:
        plugins: every plugin by its name, in order of registration.
        backends: the names of those that are backends; the others are made of hook wrappers.
        callers: (hook, backend) to a caller of that backend's implementation and of the wrappers. Each backend has its
            own pluggy manager, which holds only the backend and the wrapper plugins, so a plugin that is half
            registered, or registered later, cannot be called.
    """

    plugins: Mapping[str, object] = field(default_factory=dict)
    backends: frozenset[str] = frozenset()
    callers: Mapping[tuple[str, str], Caller] = field(default_factory=dict)

    @property
    def wrappers(self) -> tuple[str, ...]:
        """Names of the plugins made of hook wrappers."""
        return tuple(name for name in self.plugins if name not in self.backends)

    def _callers_of(self, backends: Iterable[str]) -> Iterator[tuple[tuple[str, str], Caller]]:
        for backend in backends:
            members = {name: self.plugins[name] for name in (*self.wrappers, backend)}
            hooks = _hooks_of(members).hook
            for hook in HOOKS:
                yield (hook, backend), _caller_that_names(getattr(hooks, hook), backend)

    def added(self, plugin: object, name: str) -> Registry:
        """A copy with one more plugin; errors as ``BackendManager.register``."""
        is_backend = _is_backend(plugin, name)
        after = Registry({**self.plugins, name: plugin}, self.backends | ({name} if is_backend else set()))
        changed = {name} if is_backend else after.backends
        return Registry(after.plugins, after.backends, {**self.callers, **dict(after._callers_of(changed))})

    def removed(self, name: str) -> Registry:
        """A copy without one of its plugins."""
        plugins = {other: plugin for other, plugin in self.plugins.items() if other != name}
        after = Registry(plugins, self.backends - {name})
        if name in self.backends:
            callers = {key: caller for key, caller in self.callers.items() if key[1] != name}
        else:
            callers = dict(after._callers_of(after.backends))
        return Registry(after.plugins, after.backends, callers)
