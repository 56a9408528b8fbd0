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
RESULTS = {(9, 0): "decode_preference_NVIDIA_H200.json"}
"""Kept results by compute capability."""

BACKENDS = ("triton", "flashmla", "flashinfer", "fa3")
LIBRARIES = ("triton", "flash-mla", "flashinfer-python", "vllm")

HEAD = '''"""Milliseconds of one decode call by each backend, written by ``benchmarks/decode_table.py``.

One call a line, bfloat16, kv_lora_rank 512, rope 64: sequences, query heads, query tokens, mean length, longest length,
tokens of a page. Then milliseconds by backend in the order of ``BACKENDS``, a layer's share of the plan included; ``-``
for one that refuses the call, or was wrong.
"""

from __future__ import annotations

from collections.abc import Mapping

BACKENDS = {backends}

'''
LAST = '''MEASURED: Mapping[tuple[int, int], str] = {measured}
"""By compute capability."""
'''


def _line(row: dict[str, Any]) -> str:
    sizes = (row["B"], row["H"], row["S_q"], row["mean"], row["longest"], row["page"])
    times = (f"{row['ms'][name]:.4g}" if name in row["ms"] else "-" for name in BACKENDS)
    return " ".join(map(str, (*sizes, "|", *times)))


def text() -> str:
    """The module."""
    parts = [HEAD.format(backends=str(BACKENDS).replace("'", '"'))]
    measured = []
    for capability, name in RESULTS.items():
        record = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
        gpu = record["gpu"].split()[-1]
        known = [package for package in LIBRARIES if package in record["packages"]]
        versions = ", ".join(f"{package} {record['packages'][package]}" for package in known)
        rows = "\n".join(map(_line, record["rows"]))
        parts.append(
            f'_{gpu} = """\n{rows}\n"""\n"""{record["gpu"]}, PyTorch {record["torch"]};\n\n{versions}.\n"""\n\n'
        )
        measured.append(f"{capability}: _{gpu}")
    parts.append(LAST.format(measured=f"{{{', '.join(measured)}}}"))
    return "".join(parts)


if __name__ == "__main__":
    MODULE.write_text(text())
