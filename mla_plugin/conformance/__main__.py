"""``python -m mla_plugin.conformance NAME``: the suite for one backend, and the matrix of what it computes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite; 0 when everything that the backend accepts is right, and it accepts something."""
    parser = argparse.ArgumentParser(prog="python -m mla_plugin.conformance", description=__doc__)
    parser.add_argument("backend", help="name that the backend is registered under")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--quick", action="store_true", help="a selection: less than a minute on a CPU")
    parser.add_argument("--json", metavar="FILE", help="write the matrix as JSON")
    parser.add_argument("--markdown", metavar="FILE", help="write the matrix as Markdown, for a README")
    given, rest = parser.parse_known_args(arguments)
    try:
        import pytest
    except ImportError:
        print("the suite runs in pytest, which is not installed: pip install pytest", file=sys.stderr)
        return 2
    command = ["-p", "mla_plugin_pytest", "--pyargs", "mla_plugin.conformance", "-q", "-p", "no:cacheprovider"]
    command += ["--backend", given.backend, "--device", given.device]
    command += ["--quick"] if given.quick else []
    command += ["--matrix-json", given.json] if given.json else []
    command += ["--matrix-markdown", given.markdown] if given.markdown else []
    return int(pytest.main([*command, *rest]))


if __name__ == "__main__":
    sys.exit(main())
