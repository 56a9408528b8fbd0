"""Who may import whom. The table is the design; a new import that it does not allow needs a change here first."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repository.project import ROOT

API = "mla_plugin"  # the public names of mla_plugin/__init__.py
VALUES = {"arguments", "hooks.types", "hooks.attention", "hooks.decode", "hooks.refusals"}
"""What a call and its answer are made of."""
SHARED = {"operations.decisions", "operations.edges"}
PASSES = {"operations.attention", "operations.latent", "operations.decode"}
ENTRIES = {f"{passes}.api" for passes in PASSES}
OPERATIONS = {"operations", *SHARED, *PASSES, *ENTRIES}
"""The operations: their entries are above context parallelism, which is above their passes."""

RULES = {"kernels.hopper.device", "kernels.decode.hopper.rule"}
"""Which devices and calls have kernels of their own."""

ALLOWED: dict[str, set[str]] = {
    "mla_plugin.variables": set(),
    "mla_plugin.environment": {"variables"},
    "mla_plugin.arguments": {"environment"},
    "mla_plugin.kernels": {"arguments", "kernels.decode.tiles", *RULES},
    "mla_plugin.kernels.hopper.device": set(),
    "mla_plugin.kernels.decode.tiles": set(),
    "mla_plugin.kernels.decode.hopper.rule": {"arguments", "kernels.decode.tiles"},
    "mla_plugin.hooks": set(),
    "mla_plugin.hooks.types": set(),
    "mla_plugin.hooks.attention": {"arguments", "hooks.types"},
    "mla_plugin.hooks.decode": {"arguments", "hooks.types"},
    "mla_plugin.hooks.refusals": {"arguments", "hooks.types", "hooks.attention", "hooks.decode"},
    "mla_plugin.hooks.spec": {"hooks", *VALUES},
    "mla_plugin.hooks.registry": {"hooks", "hooks.spec"},
    "mla_plugin.hooks.manager": {"hooks", "hooks.registry", "environment"},
    "mla_plugin.device": {"environment", "hooks.types"},
    "mla_plugin.plugins.shared": {"kernels", *VALUES},
    "mla_plugin.plugins": {"hooks", "kernels", "device", "plugins.shared", *VALUES},
    "mla_plugin.plugins.triton": {
        "hooks",
        "kernels",
        "kernels.decode.tiles",
        *RULES,
        "environment",
        "plugins.shared",
        *VALUES,
    },
    "mla_plugin.reference": VALUES,
    "mla_plugin.resolver": {"hooks.manager", "environment", "device", *RULES, *VALUES},
    "mla_plugin.layers": VALUES,
    **{f"mla_plugin.{shared}": set() for shared in SHARED},
    "mla_plugin.operations.attention": {*SHARED, "resolver", "hooks.manager", "environment", *VALUES},
    "mla_plugin.operations.decode.projected": {"kernels", "resolver", "hooks.manager", "environment", *VALUES},
    "mla_plugin.operations.latent": {*SHARED, "operations.attention", *VALUES},
    "mla_plugin.operations.decode": {"resolver", "hooks.manager", "environment", *VALUES},
    "mla_plugin.context_parallel": {*SHARED, *PASSES, "resolver", "environment", *VALUES},
    **{f"mla_plugin.{entry}": {*SHARED, *PASSES, "context_parallel", "resolver", *VALUES} for entry in ENTRIES},
    "mla_plugin.operations": {
        *(*SHARED, *PASSES, *ENTRIES, "context_parallel"),
        *("resolver", "hooks.manager", "layers", "environment", *VALUES),
    },
    "mla_plugin.cache": {"arguments", "cache_operators"},
    "mla_plugin.cache_operators": {"arguments", "kernels"},
    "mla_plugin.registration": set(),
    "mla_plugin.import_hook": set(),
    "mla_plugin.preparation": {"environment", "kernels"},
    "mla_plugin": {*OPERATIONS, "cache", "preparation", "registration", "environment", "hooks", "resolver", *VALUES},
    "mla_plugin.conformance": {
        *OPERATIONS,
        "hooks",
        "hooks.manager",
        "reference",
        "device",
        "environment",
        "variables",
        *VALUES,
    },
    "mla_plugin.compat": {API, "layers", *VALUES},
    "mla_plugin.compat.megatron": {API, "layers", "context_parallel", *VALUES},
    "mla_plugin.compat.transformers": {
        *(API, "layers", "context_parallel", "operations.decode.projected", "compat.transformers.few_keys"),
        *VALUES,
    },
    "mla_plugin.compat.transformers.few_keys": {"hooks.manager", "environment"},
    "mla_plugin.compat.transformer_engine": {
        *(API, *OPERATIONS, "context_parallel"),
        *("hooks.manager", "registration", "import_hook", "environment"),
        *VALUES,
    },
    "mla_plugin.compat.releases": set(),
    "mla_plugin.compat.vllm": {API, "environment", "compat.releases"},
    "mla_plugin.compat.sglang": {API, "compat.releases"},
    "mla_plugin.run": {API, "registration", "import_hook"},
    "mla_plugin.cli": {
        *(API, "operations", "context_parallel", "preparation"),
        *("resolver", "hooks.manager", "environment", "variables", "device", *RULES, *VALUES),
    },
}
THIRD_PARTY: dict[str, set[str]] = {"mla_plugin.kernels": {"torch", "triton"}}
"""Layers whose other imports are limited too, besides the standard library."""


def layer_of(module: str) -> str | None:
    """The longest name in the table that the module is or lies in; the package's root is a layer for itself alone."""
    if module == API:
        return API
    layers = [name for name in ALLOWED if name != API and (module == name or module.startswith(f"{name}."))]
    return max(layers, key=len, default=None)


def modules(root: Path) -> dict[str, Path]:
    """Dotted name of every module of the package, with hooks/ and compat/ at their own places."""
    found = {}
    for folder, prefix in (("mla_plugin", ()), ("hooks", ("mla_plugin",)), ("compat", ("mla_plugin",))):
        for path in (root / folder).rglob("*.py"):
            parts = (*prefix, *path.relative_to(root).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _named_in_a_call(node: ast.Call) -> Iterator[str]:
    """``importlib.import_module("x")`` and ``__import__("x")`` are imports too."""
    function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if function in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
        yield str(node.args[0].value)


def imports(source: str, module: str, is_package: bool, known: set[str]) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of every import at any depth; ``from a import b`` is ``a.b`` where that is a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, name) for name in _named_in_a_call(node))
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".") if is_package else module.split(".")[:-1]
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                submodule = f"{origin}.{alias.name}"
                yield node.lineno, submodule if submodule in known else origin


def violations(name: str, path: Path, source: str, known: set[str]) -> list[str]:
    """What the module imports against the table."""
    layer = layer_of(name)
    if layer is None:
        return [f"{path}: {name} belongs to no layer; add it to ALLOWED"]
    allowed = {target if target == API else f"{API}.{target}" for target in ALLOWED[layer]}
    found = []
    for line, target in imports(source, name, path.name == "__init__.py", known):
        top = target.split(".")[0]
        target_layer = layer_of(target) if top == API else None
        if top in ("hooks", "compat"):
            found.append(f"{path}:{line}: imports {target}; its name is mla_plugin.{target}")
        elif top == API and target_layer != layer and target_layer not in allowed:
            found.append(f"{path}:{line}: {layer} may not import {target}")
        elif layer == target_layer == "mla_plugin.plugins" and name.split(".")[:3] != target.split(".")[:3]:
            found.append(f"{path}:{line}: plugins never import one another")
        elif top != API and layer in THIRD_PARTY and not _is_allowed_outside(top, layer):
            found.append(f"{path}:{line}: {layer} may not import {top}")
    return found


def _is_allowed_outside(top: str, layer: str) -> bool:
    return top in sys.stdlib_module_names or top in THIRD_PARTY[layer]


def test_every_module_keeps_the_direction() -> None:
    found = modules(ROOT)
    assert {"mla_plugin", "mla_plugin.hooks.types", "mla_plugin.hooks.manager", "mla_plugin.compat"} <= found.keys()
    wrong = [line for name, path in found.items() for line in violations(name, path, path.read_text(), set(found))]
    assert not wrong, "\n".join(wrong)


def test_the_table_has_no_cycle() -> None:
    """The table itself must be a direction: removing layers that import nothing left must remove them all."""
    left = {layer: {t if t == API else f"{API}.{t}" for t in targets} - {layer} for layer, targets in ALLOWED.items()}
    while left:
        free = {layer for layer, targets in left.items() if not targets & left.keys()}
        assert free, f"these layers import each other: {sorted(left)}"
        left = {layer: targets for layer, targets in left.items() if layer not in free}


KNOWN = {
    "mla_plugin",
    "mla_plugin.context_parallel.api",
    "mla_plugin.operations.attention.api",
    "mla_plugin.compat.transformers",
    "mla_plugin.environment",
    "mla_plugin.hooks",
    "mla_plugin.plugins.cudnn",
    "mla_plugin.plugins.sdpa",
    "mla_plugin.resolver",
    "mla_plugin.hooks.types",
}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mla_plugin.hooks.types", "import mla_plugin.environment"),
        ("mla_plugin.hooks.types", "from mla_plugin import environment"),
        ("mla_plugin.hooks.types", "from . import environment"),
        ("mla_plugin.hooks.types", "from .environment import read"),
        ("mla_plugin.hooks.types", "from mla_plugin import attention"),
        ("mla_plugin.hooks.types", "def late():\n    from mla_plugin.operations.attention.api import attention"),
        ("mla_plugin.hooks.types", "import importlib\nimportlib.import_module('mla_plugin.operations.attention.api')"),
        ("mla_plugin.hooks.manager", "from hooks import spec"),
        ("mla_plugin.hooks.manager", "from mla_plugin.plugins import sdpa"),
        ("mla_plugin.plugins.sdpa", "from mla_plugin.plugins import cudnn"),
        ("mla_plugin.plugins.sdpa", "from .cudnn import forward"),
        ("mla_plugin.plugins.sdpa", "from mla_plugin.resolver import resolve"),
        ("mla_plugin.plugins.sdpa", "from mla_plugin.operations.attention.dispatch import forward"),
        ("mla_plugin.kernels.prefill.forward", "from mla_plugin.hooks.types import Plan"),
        ("mla_plugin.kernels.prefill.forward", "import numpy"),
        ("mla_plugin.resolver.preference", "from mla_plugin.operations import attention"),
        ("mla_plugin.operations.attention.api", "import mla_plugin.compat.transformers"),
        ("mla_plugin.cli.doctor", "import mla_plugin.compat.transformers"),
        ("mla_plugin.compat.transformers", "from mla_plugin.environment import read"),
        ("mla_plugin.operations.attention.run", "from mla_plugin.context_parallel.api import attention"),
        ("mla_plugin.context_parallel.p2p", "from mla_plugin.operations.attention.api import attention"),
        ("mla_plugin.somewhere", "import torch"),
    ],
)
def test_a_violation_is_caught(module: str, source: str) -> None:
    assert len(violations(module, Path(f"{module}.py"), source, KNOWN)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "mla_plugin.plugins.sdpa",
            "import torch\nfrom mla_plugin.hooks import hookimpl\nfrom mla_plugin.hooks.types import Plan",
        ),
        ("mla_plugin.kernels.prefill.forward", "import math\nimport triton\nfrom mla_plugin.kernels.tiles import tile"),
        ("mla_plugin.plugins.sdpa.masks", "from mla_plugin.plugins.sdpa import blocks\nfrom . import blocks"),
        ("mla_plugin.resolver.preference", "from mla_plugin.resolver.transformer_engine.cascade import decide"),
        ("mla_plugin.compat.transformers", "import mla_plugin\nfrom mla_plugin import attention"),
    ],
)
def test_what_is_allowed_passes(module: str, source: str) -> None:
    assert violations(module, Path(f"{module}.py"), source, KNOWN) == []
