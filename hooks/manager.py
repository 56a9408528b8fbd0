"""The plugin manager: built-in backends by dotted name, other packages' by entry point, one caller per backend."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pluggy

from mla_plugin.hooks import PROJECT_NAME, spec

ENTRY_POINT_GROUP = "mla_plugin"
BUILTIN_BACKENDS: dict[str, str] = {
    "triton": "mla_plugin.plugins.triton",
    "fa3": "mla_plugin.plugins.fa3",
    "fa4": "mla_plugin.plugins.fa4",
    "fa2": "mla_plugin.plugins.fa2",
    "flashinfer": "mla_plugin.plugins.flashinfer",
    "cudnn": "mla_plugin.plugins.cudnn",
    "sdpa": "mla_plugin.plugins.sdpa",
}

logger = logging.getLogger("mla_plugin")


class BackendManager:
    """Holds the registered backends and hands out hook callers that reach one backend and every hook wrapper.

    A plugin that implements ``select_backend`` (other than as a wrapper) is a backend. Any other plugin, such as a
    timer made of hook wrappers, takes part in every call.

    Args:
        builtins: backend name to module, in order; an empty mapping gives a manager to fill by ``register``.
        load_entry_points: register the backends of other installed packages too.
    """

    def __init__(self, *, builtins: Mapping[str, str] = BUILTIN_BACKENDS, load_entry_points: bool = True) -> None:
        self._pm = pluggy.PluginManager(PROJECT_NAME)
        self._pm.add_hookspecs(spec)
        self._builtins = dict(builtins)
        self._callers: dict[tuple[str, str], Callable[..., Any]] = {}
        self.generation = 0
        self.broken: dict[str, str] = {}
        for name, module in self._builtins.items():
            self.register(importlib.import_module(module), name)
        if load_entry_points:
            self._load_entry_points()

    def _load_entry_points(self) -> None:
        for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
            if self._pm.has_plugin(entry_point.name):
                if entry_point.name in self._builtins:
                    self._report(entry_point.name, "its name is that of a built-in backend; choose another name")
                continue
            try:
                self.register(entry_point.load(), entry_point.name)
            except (Exception, SystemExit) as error:  # a broken package must not take the host down
                self._report(entry_point.name, f"{type(error).__name__}: {error}")

    def _report(self, name: str, reason: str) -> None:
        self.broken[name] = reason
        logger.warning("the backend %r is left out: %s", name, reason)

    def register(self, plugin: object, name: str) -> None:
        """Register a backend, or a plugin of hook wrappers, under a name.

        Raises:
            ValueError: the name is taken.
            pluggy.PluginValidationError: a hook implementation does not fit its specification, is marked under a name
                that is no hook, or would answer for other backends, because ``select_backend`` is missing.
        """
        if self._pm.has_plugin(name):
            raise ValueError(
                f"a backend named {name!r} is registered already; unregister it first or choose another name"
            )
        try:
            self._pm.register(plugin, name=name)
            self._pm.check_pending()
            self._check_is_backend_or_wrappers(plugin, name)
        except pluggy.PluginValidationError:
            if self._pm.has_plugin(name):  # what fitted is in place already, and would be called
                self._pm.unregister(name=name)
            raise
        self._invalidate()

    def _check_is_backend_or_wrappers(self, plugin: object, name: str) -> None:
        own = [
            (caller.name, implementation)
            for caller in self._pm.get_hookcallers(plugin) or ()
            for implementation in caller.get_hookimpls()
            if implementation.plugin is plugin
        ]
        computes = {hook for hook, implementation in own if not (implementation.wrapper or implementation.hookwrapper)}
        if computes and "select_backend" not in computes:
            raise pluggy.PluginValidationError(
                plugin,
                f"the plugin {name!r} implements {' and '.join(sorted(computes))} without select_backend, and would "
                "compute what other backends are asked for; add select_backend, or make it a wrapper",
            )

    def unregister(self, name: str) -> None:
        """Remove a plugin; unknown names raise ValueError."""
        if not self._pm.has_plugin(name):
            raise ValueError(f"no backend named {name!r} is registered; registered: {', '.join(self.backends())}")
        self._pm.unregister(name=name)
        self._invalidate()

    def _invalidate(self) -> None:
        self._callers.clear()
        self.generation += 1

    def backends(self) -> tuple[str, ...]:
        """Names of the backends: built-ins in table order, then the others in order of registration."""
        implementations = self._pm.hook.select_backend.get_hookimpls()
        names = [impl.plugin_name for impl in implementations if not (impl.wrapper or impl.hookwrapper)]
        builtin = [name for name in self._builtins if name in names]
        return (*builtin, *(name for name in names if name not in self._builtins))

    def caller(self, hook: str, backend: str) -> Callable[..., Any]:
        """The hook's caller that reaches ``backend`` and every wrapper, cached until a plugin comes or goes.

        Raises:
            ValueError: no such backend.
        """
        key = (hook, backend)
        caller = self._callers.get(key)
        if caller is None:
            if backend not in self.backends():
                raise ValueError(f"no backend named {backend!r}; registered: {', '.join(self.backends())}")
            others = [self._pm.get_plugin(name) for name in self.backends() if name != backend]
            caller = self._pm.subset_hook_caller(hook, remove_plugins=others)
            self._callers[key] = caller
        return caller


_manager: BackendManager | None = None
_is_loading = False
_lock = threading.RLock()


def get_manager() -> BackendManager:
    """The process's manager, made at the first use.

    Raises:
        RuntimeError: a backend's module asks for it while it is being imported.
    """
    global _manager, _is_loading
    if _manager is None:
        with _lock:
            if _is_loading:
                raise RuntimeError("a backend's module computes or explains attention at import; do it in its hooks")
            if _manager is None:
                _is_loading = True
                try:
                    _manager = BackendManager()
                finally:
                    _is_loading = False
    return _manager
