"""``mla-plugin doctor``: what is installed, missing or broken, and a command that fixes each problem."""

from __future__ import annotations

import argparse
import difflib
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from packaging.version import Version

import mla_plugin
from mla_plugin import device, environment
from mla_plugin.cli import terminal
from mla_plugin.hooks.manager import BUILTIN_BACKENDS, get_manager
from mla_plugin.resolver.installing import FLASH_ATTENTION_3, FLASH_MLA
from mla_plugin.variables import VARIABLES, Value

DESCRIPTION = "Report what is installed, missing or broken, with commands that fix it."

EPILOG = """\
exit status: 1 if something is broken; a missing optional package does not
count.

example: mla-plugin doctor
         mla-plugin doctor --json"""


@dataclass(frozen=True)
class Finding:
    """One line of the report; if something is broken or missing, ``remedy`` is the command to run."""

    state: Literal["ok", "missing", "broken", "note"]
    text: str
    remedy: str | None = None


@dataclass(frozen=True)
class Need:
    """A required distribution, with its minimum version and an upper limit."""

    name: str
    minimum: str
    purpose: str
    command: str
    optional: bool = True
    below: str | None = None


NEEDS = (
    Need("torch", "2.10", "everything", 'pip install "torch>=2.10"', optional=False),
    Need("pluggy", "1.5", "everything", 'pip install "pluggy>=1.5"', optional=False),
    Need("packaging", "24", "everything", 'pip install "packaging>=24"', optional=False),
    Need(
        "flash-attn",
        "2.7",
        "deterministic training on backend fa2, which otherwise uses PyTorch's own kernel",
        'pip install "mla-plugin[fa2]"',
        below="2.8.4",
    ),
    Need("flash-attn-4", "4.0.0b5", "backend fa4", 'pip install "mla-plugin[fa4]"'),
    Need("flashinfer-python", "0.6.12", "backend flashinfer", 'pip install "mla-plugin[flashinfer]"'),
    Need("transformers", "4.57", "Hugging Face models", 'pip install "mla-plugin[transformers]"'),
    Need("transformers", "5.15", "mla-plugin demo", 'pip install "mla-plugin[demo]"'),
    Need("megatron-core", "0.16", "Megatron-Core's MLA layers", 'pip install "mla-plugin[megatron]"'),
    Need("rich", "13", "mla-plugin demo", 'pip install "mla-plugin[demo]"'),
)


def packages() -> Iterator[Finding]:
    """Every required or optional package, with the version found."""
    for need in NEEDS:
        version = device.version(need.name)
        too_new = version is not None and need.below is not None and Version(version) >= Version(need.below)
        if version is not None and not too_new and Version(version) >= Version(need.minimum):
            yield Finding("ok", f"{need.name} {version}, for {need.purpose}")
            continue
        limit = f"not below {need.below}" if too_new else f"older than {need.minimum}"
        found = f"{version} is {limit}" if version else "is not installed"
        state: Literal["missing", "broken"] = "missing" if need.optional else "broken"
        yield Finding(state, f"{need.name} {found}; needed for {need.purpose}", need.command)
    yield _flash_attention_3()
    yield _flash_mla()
    yield from _flashinfer_compiler()


def _flash_attention_3() -> Finding:
    """The provider that backend fa3 uses; none of them can be declared as a dependency."""
    distributions = [distribution for distribution, _ in device.FLASH_ATTENTION_PROVIDERS["fa3"]]
    found = [(name, version) for name in distributions if (version := device.version(name)) is not None]
    if not found:
        return Finding("missing", f"none of {', '.join(distributions)}; needed for backend fa3", FLASH_ATTENTION_3)
    name, version = found[0]
    if name != distributions[0]:
        return Finding("note", f"{name} {version}, for backend fa3, forward only", FLASH_ATTENTION_3)
    return Finding("ok", f"{name} {version}, for backend fa3")


def _flash_mla() -> Finding:
    """The provider that backend flashmla uses."""
    for name, _, first in device.FLASH_MLA_PROVIDERS:
        version = device.version(name)
        if version is not None and (first is None or Version(version) >= Version(first)):
            return Finding("ok", f"{name} {version}, for backend flashmla")
    distributions = ", ".join(f"{name} {first or ''}".strip() for name, _, first in device.FLASH_MLA_PROVIDERS)
    return Finding("missing", f"none of {distributions}; needed for backend flashmla", FLASH_MLA)


def _flashinfer_compiler() -> Iterator[Finding]:
    """The tools that FlashInfer compiles its kernels with, if they are not precompiled."""
    if device.version("flashinfer-python") is None or device.version("flashinfer-jit-cache") is not None:
        return
    for tool in device.TOOLS:
        if tool in device.build_tools():
            yield Finding("ok", f"{tool}, used by FlashInfer to compile its kernels")
        else:
            remedy = "pip install ninja" if tool == "ninja" else "pip install flashinfer-jit-cache"
            yield Finding("missing", f"{tool} not found; FlashInfer needs it to compile its kernels", remedy)


def hardware() -> Iterator[Finding]:
    """The devices that PyTorch finds, and a driver that it cannot use."""
    from mla_plugin.kernels.hopper.device import CAPABILITY, unfit_device_because

    driver = device.nvidia_driver_version()
    for index in range(torch.cuda.device_count()):
        found = device.platform("cuda", index)
        major, minor = found.compute_capability or (0, 0)
        cudnn = ".".join(map(str, found.cudnn_version)) if found.cudnn_version else "none"
        name = torch.cuda.get_device_name(index)
        yield Finding("ok", f"{name}: sm{major}{minor}, CUDA {found.cuda_version}, cuDNN {cudnn}")
        slow = unfit_device_because(found.compute_capability, found.version("triton"))
        if found.compute_capability == CAPABILITY and slow is not None:
            yield Finding("note", f"{slow}; the plain kernels run, 1.1 to 1.8 times slower", 'pip install "torch<2.14"')
    if torch.cuda.is_available():
        return
    if driver is None:
        yield Finding("ok", "no NVIDIA driver: everything runs on the CPU")
    elif torch.version.cuda is None:
        text = f"NVIDIA driver {driver} is loaded, but this PyTorch ({torch.__version__}) is built without CUDA"
        yield Finding("broken", text, "pip install --force-reinstall --index-url https://pypi.org/simple torch")
    else:
        text = f"PyTorch is built for CUDA {torch.version.cuda} but finds no device with NVIDIA driver {driver}"
        yield Finding("broken", text, "nvidia-smi")


def variables() -> Iterator[Finding]:
    """The environment variables that are set, as parsed; misspelt names; names of unknown backends."""
    assigned = environment.assignments()
    known = {variable.name: variable for variable in VARIABLES}
    for name, text in assigned.items():
        if name not in known:
            yield from _unknown_variable(name, text, list(known))
            continue
        try:
            value = environment.parse(name, assigned)
        except environment.EnvironmentVariableError as error:
            yield Finding("broken", str(error), f"unset {name}")
            continue
        yield Finding("ok", f"{name}={text!r} is read as {value!r}: {known[name].meaning}")
        if name in ("MLA_PLUGIN_BACKEND", "MLA_PLUGIN_BLOCK"):
            yield from _unknown_backends(name, value)
    if not assigned:
        yield Finding("ok", "no variable is set")


def _unknown_variable(name: str, text: str, known: list[str]) -> Iterator[Finding]:
    """A variable that mla-plugin does not read: an error with our prefix, possibly one with TransformerEngine's."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
    if close or name.startswith("MLA_PLUGIN_"):
        hint = f"; did you mean {close[0]}?" if close else ""
        yield Finding("broken", f"{name}={text!r} is not a known variable{hint}", f"unset {name}")


def _unknown_backends(name: str, value: Value) -> Iterator[Finding]:
    names = {value} if isinstance(value, str) else set(value) if isinstance(value, tuple) else set()
    manager = get_manager()
    may_name = manager.known_names() if name == "MLA_PLUGIN_BLOCK" else frozenset(manager.backends())
    for unknown in sorted(names - may_name):
        yield Finding("broken", f"{name}: {manager.why_not_registered(unknown)}", f"unset {name}")


def backends() -> Iterator[Finding]:
    """The registered backends and wrappers, the blocked ones, and the broken entry points."""
    manager = get_manager()
    registered = dict.fromkeys(manager.backends(), "") | dict.fromkeys(manager.wrappers(), ", hook wrappers")
    for name, kind in registered.items():
        yield Finding("ok", f"{name}, from {_origin(name)}{kind}")
    for name in manager.waiting():
        yield Finding("note", f"{name}, from {_origin(name)}: not imported, excluded by MLA_PLUGIN_BLOCK")
    for name, reason in manager.broken.items():
        package = manager.origins.get(name)
        command = "pip uninstall" if name in registered else "pip install --upgrade"
        text = f"{name}, from {package or 'an unknown package'}: {reason}"
        yield Finding("broken", text, f"{command} {package}" if package else None)


def _origin(name: str) -> str:
    """The distribution that a registered plugin comes from; an entry point cannot take a built-in backend's name."""
    return "mla-plugin" if name in BUILTIN_BACKENDS else get_manager().origins.get(name, "an unknown package")


SECTIONS = {
    "Packages": packages,
    "Hardware": hardware,
    "Environment variables": variables,
    "Registered backends": backends,
}


def add_parser(commands: Any) -> None:
    """Add the command and its argument."""
    parser = commands.add_parser(
        "doctor",
        help="what is installed, missing or broken",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report; 1 when something is broken."""
    versions = {"mla-plugin": mla_plugin.__version__, "python": platform.python_version()}
    versions["platform"] = f"{sys.platform} {platform.machine()}"
    found = {title: list(section()) for title, section in SECTIONS.items()}
    broken = sum(finding.state == "broken" for findings in found.values() for finding in findings)
    if arguments.json:
        sections = {title: [asdict(finding) for finding in findings] for title, findings in found.items()}
        print(json.dumps({**versions, "broken": broken, "sections": sections}, indent=1))
        return 1 if broken else 0
    print("mla-plugin {mla-plugin}, Python {python}, {platform}".format(**versions))
    for title, findings in found.items():
        print(f"\n{title}")
        for finding in findings:
            terminal.show(f"  {finding.state:<8} {finding.text}")
            if finding.remedy:
                print(f"  {'':<8} -> {finding.remedy}")
    print(f"\n{broken} broken" if broken else "\nnothing is broken")
    return 1 if broken else 0
