"""Write the resolver's table of measured calls from the kept results of ``prefill_backends.py``.

    python -m benchmarks.prefill_table

A test holds ``mla_plugin/resolver/attention_measured.py`` to what this writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MODULE = ROOT / "mla_plugin" / "resolver" / "attention_measured.py"
RESULTS = {
    (9, 0): {
        "H200": ("prefill_backends_NVIDIA_H200.json", "prefill_backends_between_NVIDIA_H200.json"),
        "H100": ("prefill_backends_NVIDIA_H100_80GB_HBM3.json", "prefill_backends_drawn_NVIDIA_H100_80GB_HBM3.json"),
    },
}
"""Kept results by compute capability."""

FUSED = ("triton", "fa3", "fa4", "fa2", "cudnn")
"""What the table compares: the fallback never goes first."""

LIBRARIES = ("triton", "flash-attn-4", "vllm")

HEAD = '''"""Milliseconds of one attention call by each backend, written by ``benchmarks/prefill_table.py``.

One call a line, bfloat16: head_dim_qk, head_dim_v, query heads, key-value heads, sequences, tokens of the longest one,
the mask (``causal``, ``full``, ``window``), ``packed`` sequences of log-normal lengths or ``dense`` ones, and whether
the backward is ``deterministic`` or ``free``. Then milliseconds of the forward and of the backward, by backend in the
order of ``BACKENDS``; ``-`` for one that refuses the call, or was wrong.
"""

from __future__ import annotations

from collections.abc import Mapping

BACKENDS = {backends!r}

'''
LAST = '''MEASURED: Mapping[tuple[int, int], Mapping[str, str]] = {measured}
"""By compute capability and GPU."""
'''


def _times(times: dict[str, float]) -> str:
    return " ".join(f"{times[name]:.3g}" if name in times else "-" for name in FUSED)


def _line(row: dict[str, Any]) -> str:
    mask = "window" if isinstance(row["mask"], int) else row["mask"]
    call = (*row["dims"], row["heads"], row["kv_heads"], row["batch"], row["longest"], mask)
    flags = ("packed" if row["packed"] else "dense", "deterministic" if row["deterministic"] else "free")
    return " ".join(map(str, (*call, *flags, "|", _times(row["forward"]), "|", _times(row["backward"]))))


def text() -> str:
    """The module."""
    parts = [HEAD.format(backends=FUSED).replace("'", '"')]
    measured = {}
    for capability, results in RESULTS.items():
        for gpu, names in results.items():
            records = [json.loads((ROOT / "benchmarks" / "results" / name).read_text()) for name in names]
            record = records[0]
            versions = ", ".join(f"{package} {record['packages'][package]}" for package in LIBRARIES)
            rows = "\n".join(_line(row) for found in records for row in found["rows"])
            parts.append(
                f'_{gpu} = """\n{rows}\n"""\n"""{record["gpu"]}; PyTorch {record["torch"]}, {versions}."""\n\n'
            )
        measured[capability] = ", ".join(f'"{gpu}": _{gpu}' for gpu in results)
    table = ", ".join(f"{capability}: {{{gpus}}}" for capability, gpus in measured.items())
    parts.append(LAST.format(measured=f"{{{table}}}"))
    return "".join(parts)


if __name__ == "__main__":
    MODULE.write_text(text())
