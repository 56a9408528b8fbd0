"""Write the resolver's table of measured decode calls from the kept results of ``decode_backends.py``.

    python -m benchmarks.decode_table

A test holds ``mla_plugin/resolver/decode_measured.py`` to what this writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MODULE = ROOT / "mla_plugin" / "resolver" / "decode_measured.py"
RESULTS = {
    (9, 0): {
        "H200": "decode_preference_NVIDIA_H200.json",
        "H100": "decode_preference_NVIDIA_H100_80GB_HBM3.json",
    }
}
"""Kept results by compute capability and GPU."""

BACKENDS = ("triton", "flashmla", "flashinfer", "fa3")
LIBRARIES = ("triton", "flash-mla", "flashinfer-python", "vllm")

HEAD = '''"""Milliseconds of one decode call by each backend, written by ``benchmarks/decode_table.py``.

One call a line, bfloat16, kv_lora_rank 512, rope 64: sequences, query heads, query tokens, mean length, longest length,
tokens of a page. Then for each GPU milliseconds by backend in the order of ``BACKENDS``, a layer's share of the plan
included; ``-`` for one that refuses the call, or was wrong.
"""

from __future__ import annotations

from collections.abc import Mapping

BACKENDS = {backends}

'''
LAST = '''MEASURED: Mapping[tuple[int, int], tuple[tuple[str, ...], str]] = {measured}
"""By compute capability: the GPUs, and the table of them."""
'''


def _sizes(row: dict[str, Any]) -> str:
    return " ".join(str(row[name]) for name in ("B", "H", "S_q", "mean", "longest", "page"))


def _times(row: dict[str, Any] | None) -> str:
    found = {} if row is None else row["ms"]
    return " ".join(f"{found[name]:.4g}" if name in found else "-" for name in BACKENDS)


def _versions(record: dict[str, Any]) -> str:
    known = [package for package in LIBRARIES if package in record["packages"]]
    versions = ", ".join(f"{package} {record['packages'][package]}" for package in known)
    return f"{record['gpu']}, PyTorch {record['torch']};\n{versions}."


def text() -> str:
    """The module."""
    parts = [HEAD.format(backends=str(BACKENDS).replace("'", '"'))]
    measured = []
    for capability, results in RESULTS.items():
        records = [json.loads((ROOT / "benchmarks" / "results" / name).read_text()) for name in results.values()]
        rows = [{_sizes(row): row for row in record["rows"]} for record in records]
        calls = dict.fromkeys(sizes for found in rows for sizes in found)
        lines = "\n".join(" | ".join((sizes, *(_times(found.get(sizes)) for found in rows))) for sizes in calls)
        name = f"_SM{capability[0]}{capability[1]}"
        versions = "\n\n".join(map(_versions, records))
        parts.append(f'{name} = """\n{lines}\n"""\n"""{versions}\n"""\n\n')
        gpus = str(tuple(results)).replace("'", '"')
        measured.append(f"{capability}: ({gpus}, {name})")
    parts.append(LAST.format(measured=f"{{{', '.join(measured)}}}"))
    return "".join(parts)


if __name__ == "__main__":
    MODULE.write_text(text())
