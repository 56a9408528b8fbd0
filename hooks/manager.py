"""The plugin manager: built-in backends by dotted name, third-party ones by entry point, one caller per backend."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import threading
from collections.abc import Mapping

from mla_plugin import environment
from mla_plugin.hooks.registry import Caller, Registry

ENTRY_POINT_GROUP = "mla_plugin"
BUILTIN_BACKENDS: dict[str, str] = {
    "triton": "mla_plugin.plugins.triton",
    "fa3": "mla_plugin.plugins.fa3",
    "fa4": "mla_plugin.plugins.fa4",
    "fa2": "mla_plugin.plugins.fa2",
    "flashinfer": "mla_plugin.plugins.flashinfer",
    "flashmla": "mla_plugin.plugins.flashmla",
    "cudnn": "mla_plugin.plugins.cudnn",
    "sdpa": "mla_plugin.plugins.sdpa",
}

logger = logging.getLogger("mla_plugin")


def describe_error(error: BaseException) -> str:
    """The error's type and message, even if its ``__str__`` raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, whose message cannot be read"


class BackendManager:
    """Holds the registered backends and hands out hook callers that reach one backend and every hook wrapper.

    A plugin that implements ``select_backend`` (other than as a wrapper) is a backend; its hook wrappers run only
    around its own calls. The wrappers of any other plugin, such as a timer, run around every call.

    Registration is atomic, and every method may be called from any thread and from within a hook: a call in progress
    finishes with the plugins that it started with.

    The module of an entry point that MLA_PLUGIN_BLOCK names is not imported; once the variable no longer names it, the
    next selection imports it.

    Args:
        builtins: backend name to module, in order; with an empty mapping, use ``register``.
        load_entry_points: register the backends of other installed packages too.

    Attributes:
        generation: incremented whenever a plugin is added or removed.
        broken: names of broken entry points, and why.
        origins: name of an entry point to the name of its distribution, if known.
    """

    def __init__(self, *, builtins: Mapping[str, str] = BUILTIN_BACKENDS, load_entry_points: bool = True) -> None:
        self._builtins = dict(builtins)
        self._lock = threading.Lock()
        self._registry = Registry()
        self._callers: Mapping[tuple[str, str], Caller] = {}
        self._waiting: dict[str, importlib.metadata.EntryPoint] = {}
        self.generation = 0
        self.broken: dict[str, str] = {}
        self.origins: dict[str, str] = {}
        self._ours: dict[str, object] = {}
        for name, module in self._builtins.items():
            self._ours[name] = importlib.import_module(module)
            self.register(self._ours[name], name)
        if load_entry_points:
            self._find_entry_points()
            self.load(environment.names("MLA_PLUGIN_BLOCK", dict(environment.gates())))

    def _find_entry_points(self) -> None:
        """Entry points of other packages, sorted by name and distribution, because directory order is arbitrary."""
        try:
            found = [
                (entry_point.name, _distribution(entry_point) or "", entry_point)
                for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
            ]
        except Exception as error:  # one unreadable entry_points.txt must not take the host down
            self._report("(entry points)", f"no package's entry points can be read: {describe_error(error)}")
            return
        for name, distribution, entry_point in sorted(found, key=lambda item: item[:2]):
            if distribution:
                self.origins.setdefault(name, distribution)
            if name in self._builtins:
                self._report(name, "its name is that of a built-in backend; choose another name")
            elif name in self._waiting:
                other = distribution or "another package"
                self._report(
                    name, f"{other} has an entry point of this name too, which is left out; uninstall one of them"
                )
            else:
                self._waiting[name] = entry_point

    def load(self, blocked: frozenset[str]) -> None:
        """Import and register the pending entry points, except the blocked ones.

        No lock is held meanwhile: a module that computes attention at import, in any thread, runs without the backend.
        """
        for name in tuple(self._waiting):
            entry_point = None if name in blocked else self._waiting.pop(name, None)
            if entry_point is None:  # blocked, or another thread imports it
                continue
            try:
                self.register(entry_point.load(), name)
            except KeyboardInterrupt:
                self._waiting[name] = entry_point
                raise
            except BaseException as error:  # SystemExit too: a broken package must not take the host down
                self._report(name, describe_error(error))

    def _report(self, name: str, reason: str) -> None:
        self.broken[name] = f"{self.broken[name]}; {reason}" if name in self.broken else reason
        origin = self.origins.get(name, "an unknown package")
        logger.warning("broken backend %r, from %s: %s", name, origin, reason)

    def register(self, plugin: object, name: str) -> None:
        """Register a backend, or a plugin of hook wrappers, under a name; after an error nothing has changed.

        Raises:
            TypeError: the name is not a string.
            ValueError: the name is taken or cannot be written in MLA_PLUGIN_BLOCK, or the plugin is registered already.
            pluggy.PluginValidationError: a hook implementation does not match its specification, has a name that is
                not a hook's, or lacks its marker; the plugin implements no hook, or computes without
                ``select_backend``.
        """
        if not isinstance(name, str):
            raise TypeError(f"name={name!r}; a backend's name is a string")
        if not name.isprintable() or not name.strip() or name != name.strip() or "," in name:
            raise ValueError(f"name={name!r}; expected a printable string without commas or surrounding spaces")
        while True:
            before = self._registry
            if name in before.plugins:
                raise ValueError(
                    f"a backend named {name!r} is registered already; unregister it first or choose another name"
                )
            for other, registered in before.plugins.items():
                if registered is plugin:
                    raise ValueError(f"{name!r}: the same plugin is registered already, under the name {other!r}")
            if self._publish(before, before.added(plugin, name)):
                return

    def unregister(self, name: str) -> None:
        """Remove a plugin; unknown names raise ValueError."""
        while True:
            before = self._registry
            if name not in before.plugins:
                raise ValueError(self.why_not_registered(name))
            if self._publish(before, before.removed(name)):
                return

    def _publish(self, before: Registry, after: Registry) -> bool:
        """Replace the old registry by the new one, unless another thread has replaced it meanwhile.

        Building a registry runs code of plugins, so it happens outside the lock. The generation is incremented last, so
        a decision of the new generation never uses the old callers.
        """
        with self._lock:
            if self._registry is not before:
                return False
            self._registry, self._callers = after, after.callers
            self.generation += 1
            return True

    def backends(self) -> tuple[str, ...]:
        """Names of the backends: built-ins in table order, then the others in order of registration."""
        return self._in_order(self._registry)

    def _in_order(self, registry: Registry) -> tuple[str, ...]:
        others = [name for name in registry.plugins if name not in self._builtins]
        return tuple(name for name in (*self._builtins, *others) if name in registry.backends)

    def wrappers(self) -> tuple[str, ...]:
        """Names of the plugins made of hook wrappers, in order of registration."""
        return self._registry.wrappers

    def is_ours(self, backend: str) -> bool:
        """True for a built-in backend without hook wrappers around it, so that no third-party code made its results.

        A third-party backend registered under a built-in's name does not count.
        """
        registry = self._registry
        return backend in self._ours and registry.plugins.get(backend) is self._ours[backend] and not registry.wrappers

    def waiting(self) -> tuple[str, ...]:
        """Names of the entry points that are not imported, because MLA_PLUGIN_BLOCK named them."""
        return tuple(self._waiting)

    def known_names(self) -> frozenset[str]:
        """Every known plugin name: registered, pending or broken."""
        return frozenset((*self._registry.plugins, *self.waiting(), *tuple(self.broken)))

    def why_not_registered(self, name: object) -> str:
        """The error message for a name that no backend is registered under."""
        why = ""
        if isinstance(name, str) and name in self.broken:
            why = f", {self.origins.get(name, 'its package')} is broken: {self.broken[name]}"
        elif isinstance(name, str) and name in self._waiting:
            why = ", MLA_PLUGIN_BLOCK named it, so it was not imported"
        elif isinstance(name, str) and name in self._registry.plugins:
            why = ", it is a plugin of hook wrappers"
        return f"no backend named {name!r} is registered{why}; registered: {', '.join(self.backends())}"

    def caller(self, hook: str, backend: str) -> Caller:
        """The hook's caller that reaches ``backend`` and every wrapper.

        An error out of it keeps its type and names the backend in a note (its cause, on Python 3.10).

        Raises:
            ValueError: no such backend.
        """
        caller = self._callers.get((hook, backend))
        if caller is None:
            raise ValueError(self.why_not_registered(backend))
        return caller

    def callers(self, hook: str) -> dict[str, Caller]:
        """Every backend's caller of the hook, from one snapshot, in the order of ``backends``."""
        registry = self._registry
        return {name: registry.callers[(hook, name)] for name in self._in_order(registry)}


def _distribution(entry_point: importlib.metadata.EntryPoint) -> str | None:
    distribution = getattr(entry_point, "dist", None)
    return None if distribution is None else distribution.name


_manager: BackendManager | None = None
_is_loading = False
_lock = threading.RLock()


def get_manager() -> BackendManager:
    """The process's manager, created at first use.

    Raises:
        RuntimeError: a backend's module asks for it while it is being imported.
    """
    global _manager, _is_loading
    if _manager is None:
        with _lock:
            if _is_loading:
                raise RuntimeError("a backend's module calls mla_plugin while it is imported; do so in its hooks")
            if _manager is None:
                _is_loading = True
                try:
                    _manager = BackendManager()
                finally:
                    _is_loading = False
    return _manager
