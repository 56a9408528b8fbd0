"""Writes a page for a backend on a device: what it computes, refuses and fails, as Markdown and JSON."""

from __future__ import annotations

import importlib.util
import json
import platform as host
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mla_plugin import device

ALL = "all"
"""Instead of a backend's name: every registered one."""
SELECTIONS: dict[tuple[str, str], str] = {
    ("triton", "cpu"): "its kernels run in Triton's interpreter",
    ("fa4", "cuda"): "each kind of its kernels compiles for about ten seconds",
}
"""(backend, device type) to the reason why the quick selection of the cases runs."""
FEW_REPEATS = frozenset({("triton", "cpu")})
"""Where one case in four is computed again and through the library."""


def device_name(given: str) -> str:
    """The device's name on the page: ``cpu``, or the GPU's name, such as ``NVIDIA H200``."""
    kind = torch.device(given).type
    return torch.cuda.get_device_name(given) if kind == "cuda" else kind


def file_name(backend: str, name: str) -> str:
    """``sdpa_cpu``, ``triton_h200``."""
    short = re.sub(r"[^a-z0-9]+", "_", name.lower().removeprefix("nvidia ")).strip("_")
    return f"{backend}_{short}"


def page(found: dict[str, Any], table: str, *, name: str, selection: str | None) -> str:
    """The page of one run.

    Args:
        found: what ``Matrix.as_json`` gave.
        table: what ``Matrix.as_markdown`` gave.
        name: of the device.
        selection: why a selection of the cases ran; None where all of them did.
    """
    backend, total = found["backend"], found["total"]
    packages = ", ".join(f"{package} {version}" for package, version in found["packages"].items())
    lines = [f"# What `{backend}` computes on {name}", ""]
    lines.append(f"Written by `python -m mla_plugin.conformance {backend} --pages FOLDER`; do not edit. {packages}.")
    if selection is not None:
        lines.append(f"A selection of the cases, because {selection}.")
    if found.get("few_repeats"):
        lines.append(
            "One case in four is computed again with other data, and through `mla_plugin.attention` or `decode`."
        )
    if (lowest_score := found.get("lowest_score")) is not None:
        lines.append(f"The keys of decode's call of low scores have {lowest_score:g} instead of -65536.")
    lines += ["", f"{total['computed']} cases computed, {total['refused']} refused, {total['failed']} failed.", ""]
    if not total["computed"] and not total["failed"]:
        lines += ["It computes nothing on this device:", "", *(f"- {reason}" for reason in found["reasons"]), ""]
    else:
        lines += [table.rstrip(), ""]
    if found["failures"]:
        lines += ["What failed:", "", *(f"- `{failure}`" for failure in found["failures"]), ""]
    return "\n".join(lines)


def packages(backend: str) -> dict[str, str]:
    """The versions on the page: those of packages that determine the answers."""
    found = {
        "mla-plugin": _own_version(),
        "Python": host.python_version(),
        "PyTorch": torch.__version__,
    }
    return found | {name: version for name, version in device.installed_packages() if name.startswith(_of(backend))}


def _own_version() -> str:
    try:
        return metadata.version("mla-plugin")
    except metadata.PackageNotFoundError:  # a plain checkout on PYTHONPATH
        return "0+unknown"


def _of(backend: str) -> tuple[str, ...]:
    names = {
        "triton": ("triton",),
        "fa2": ("flash-attn",),
        "fa3": ("flash-attn-3", "vllm", "sgl-kernel"),
        "fa4": ("flash-attn-4", "nvidia-cutlass-dsl"),
        "flashinfer": ("flashinfer",),
        "flashmla": ("flash-mla", "sgl-flash-mla", "vllm", "sglang-kernel", "sgl-kernel"),
    }
    return names.get(backend, ("no package",))


def write(
    backends: Iterable[str],
    given: str,
    folder: Path,
    *,
    processes: int,
    is_quick: bool,
    few_repeats: bool = False,
    lowest_score: float | None = None,
    rest: Sequence[str] = (),
) -> int:
    """Run the suite for each backend in a separate process, and write NAME_DEVICE.md, .json and .log.

    Args:
        backends: their names.
        given: the device.
        folder: where the files go; it is made.
        processes: that share a run, where pytest-xdist is installed; 0 for none.
        is_quick: the quick selection for every backend, not only where ``SELECTIONS`` says so.
        few_repeats: for every backend, as ``is_quick``.
        lowest_score: of ``DecodeConformance``; None: the default.
        rest: more arguments of pytest.

    Returns:
        1 when a case of any of them failed or a run ended early, otherwise 0; refusing everything is no failure here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name, status = device_name(given), 0
    can_share = processes and importlib.util.find_spec("xdist") is not None
    shared = ["-n", str(processes), "--dist", "loadgroup"] if can_share else []
    for backend in backends:
        started, target = time.monotonic(), folder / file_name(backend, name)
        where = (backend, torch.device(given).type)
        selection = SELECTIONS.get(where) or ("it was asked for" if is_quick else None)
        data, table = target.with_suffix(".json"), target.with_suffix(".table")
        data.unlink(missing_ok=True)
        repeats_few = few_repeats or where in FEW_REPEATS
        command = [sys.executable, "-m", "mla_plugin.conformance", backend, "--device", given]
        command += ["--json", str(data), "--markdown", str(table), *(["--quick"] if selection else []), *shared, *rest]
        command += ["--few-repeats"] if repeats_few else []
        command += [] if lowest_score is None else [f"--lowest-score={lowest_score}"]
        command += ["-vv"]  # a run that ends early has named what failed
        with target.with_suffix(".log").open("w") as log:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
        seconds = time.monotonic() - started
        if not data.exists():
            print(f"{backend}: the run ended early, see {target.with_suffix('.log')}")
            status = 1
            continue
        found = json.loads(data.read_text())
        found |= {"device": name, "packages": packages(backend), "selection": selection}
        found |= {"few_repeats": repeats_few, "lowest_score": lowest_score}
        data.write_text(json.dumps(found, indent=1) + "\n")
        target.with_suffix(".md").write_text(page(found, table.read_text(), name=name, selection=selection))
        table.unlink()
        counts = ", ".join(f"{found['total'][outcome]} {outcome}" for outcome in ("computed", "refused", "failed"))
        print(f"{backend} on {name}: {counts}, {seconds:.0f} s", flush=True)
        status = max(status, int(found["total"]["failed"] > 0))
    return status
