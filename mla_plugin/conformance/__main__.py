"""``python -m mla_plugin.conformance NAME``: the suite for one backend, and the matrix of what it computes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite; 0 when everything that the backend accepts is right, and it accepts something."""
    parser = argparse.ArgumentParser(prog="python -m mla_plugin.conformance", description=__doc__)
    parser.add_argument("backend", help="name that the backend is registered under; with --pages, all is every one")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--quick", action="store_true", help="a selection: less than a minute on a CPU")
    parser.add_argument(
        "--few-repeats", action="store_true", help="for interpreters: one case in four is computed again"
    )
    parser.add_argument(
        "--lowest-score", type=float, help="of every key in decode's call of low scores, -65536 by default"
    )
    parser.add_argument("--json", metavar="FILE", help="write the matrix as JSON")
    parser.add_argument("--markdown", metavar="FILE", help="write the matrix as Markdown, for a README")
    parser.add_argument("--pages", metavar="FOLDER", help="write a page for the backend and the device, .md and .json")
    parser.add_argument("--processes", type=int, default=0, help="with --pages: share each run, by pytest-xdist")
    given, rest = parser.parse_known_args(arguments)
    if given.pages and (given.json or given.markdown):
        parser.error("--pages writes both forms into its folder; leave out --json and --markdown")
    if given.processes and not given.pages:
        parser.error("--processes goes with --pages; otherwise pass pytest-xdist's own: -n N --dist loadgroup")
    try:
        import pytest
    except ImportError:
        print("the suite runs in pytest, which is not installed: pip install pytest", file=sys.stderr)
        return 2
    if given.pages:
        return _pages(given, rest)
    command = ["-p", "mla_plugin_pytest", "--pyargs", "mla_plugin.conformance", "-q", "-p", "no:cacheprovider"]
    command += ["--backend", given.backend, "--device", given.device]
    command += ["--quick"] if given.quick else []
    command += ["--few-repeats"] if given.few_repeats else []
    command += [] if given.lowest_score is None else [f"--lowest-score={given.lowest_score}"]
    command += ["--matrix-json", given.json] if given.json else []
    command += ["--matrix-markdown", given.markdown] if given.markdown else []
    return int(pytest.main([*command, *rest]))


def _pages(given: argparse.Namespace, rest: Sequence[str]) -> int:
    """A page for each backend."""
    from mla_plugin.conformance import pages
    from mla_plugin.hooks.manager import get_manager

    registered = get_manager().backends()
    if given.backend not in (pages.ALL, *registered):
        print(get_manager().why_not_registered(given.backend), file=sys.stderr)
        return 2
    names = registered if given.backend == pages.ALL else [given.backend]
    return pages.write(
        names,
        given.device,
        Path(given.pages),
        processes=given.processes,
        is_quick=given.quick,
        few_repeats=given.few_repeats,
        lowest_score=given.lowest_score,
        rest=rest,
    )


if __name__ == "__main__":
    sys.exit(main())
