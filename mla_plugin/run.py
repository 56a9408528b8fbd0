"""``python -m mla_plugin.run train.py ...``: run a program with this library inside its TransformerEngine.

It is ``mla_plugin.register("transformer_engine")`` for a program that cannot be edited, and works under launchers that
start a module: ``torchrun --nproc-per-node 8 -m mla_plugin.run train.py ...``. Processes that the program itself
spawns start without it.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import mla_plugin


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mla_plugin.run",
        description="Run a program with mla-plugin inside its TransformerEngine; NVTE_MLA_TRITON=1 and "
        "MLA_PLUGIN_TE=fill say what it may do there.",
        usage="%(prog)s [-h] {script.py | -m module} [argument ...]",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="the program is a module's name, not a file")
    parser.add_argument("program", help="a Python file, or with -m a module; what follows are its own arguments")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Register with TransformerEngine, then run the program as ``__main__`` in this process.

    Raises:
        ImportError: TransformerEngine is not installed or older than 2.10.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    ours = 2 if given[:1] == ["-m"] else 1  # as for Python itself; argparse would drop a "--" behind the program
    options = _parser().parse_args(given[:ours])
    if not options.is_module and not Path(options.program).is_file():
        _parser().error(f"no file {options.program!r}; for a module, put -m before its name")
    mla_plugin.register("transformer_engine")
    sys.argv = [options.program, *given[ours:]]
    if options.is_module:
        runpy.run_module(options.program, run_name="__main__", alter_sys=True)
    else:
        if not getattr(sys.flags, "safe_path", False):  # under python -P no folder was put in front
            sys.path[0] = str(Path(options.program).resolve().parent)  # as "python script.py" does
        runpy.run_path(options.program, run_name="__main__")


if __name__ == "__main__":
    main()
