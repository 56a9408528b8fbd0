"""``python -m mla_plugin.run train.py ...``: run a program with mla-plugin registered in the frameworks that it uses.

It is ``mla_plugin.register(host)`` for a program that cannot be edited, and works under launchers that start a module:
``torchrun --nproc-per-node 8 -m mla_plugin.run train.py ...``. Processes that the program itself spawns start without
it.

Without ``--host`` torchtitan, TransformerEngine and transformers are registered as soon as the program imports them; a
version that is too old gives a warning. mla-plugin is then selected as usual: in TransformerEngine with
``NVTE_MLA_TRITON`` and ``MLA_PLUGIN_TE``, in transformers with ``attn_implementation="mla_plugin"``, and in torchtitan
with ``attn_backend="mla_plugin"``. Many programs take the last two as an argument. Megatron-Core is registered only
with ``--host megatron``, because from then on all its layers run their attention through mla-plugin.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import mla_plugin
from mla_plugin.import_hook import when_imported
from mla_plugin.registration import ADAPTERS, IMPORTED_BY_USERS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mla_plugin.run",
        description="Run a program with mla-plugin registered in the frameworks that it imports.",
        usage="%(prog)s [-h] [--host HOST] {script.py | -m module} [argument ...]",
        epilog="example: python -m mla_plugin.run -m trl sft --attn_implementation mla_plugin ...",
    )
    parser.add_argument(
        "--host",
        action="append",
        choices=ADAPTERS,
        help="register this host before the program starts, and no other; may be given more than once. "
        f"Default: {' and '.join(sorted(IMPORTED_BY_USERS))}, when the program imports them",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="the program is a module's name, not a file")
    parser.add_argument("program", help="a Python file, or with -m a module; what follows are its own arguments")
    return parser


def _count_of_ours(given: Sequence[str]) -> int:
    """How many leading arguments are ours, the program included; argparse would take some of those after it."""
    position = 0
    while position < len(given) and given[position].startswith("-"):
        if given[position] in ("-m", "-h", "--help"):
            position += 1
            if given[position - 1] == "-m":
                break
        else:
            position += 2 if given[position] == "--host" else 1
    return position + 1


def _register_when_imported(host: str) -> None:
    def register(_: ModuleType) -> None:
        try:
            mla_plugin.register(host)
        except ImportError as error:
            warnings.warn(f"mla-plugin is not registered with {host}: {error}", stacklevel=2)

    when_imported(IMPORTED_BY_USERS[host], register)


def main(argv: Sequence[str] | None = None) -> None:
    """Register, then run the program as ``__main__`` in this process.

    Raises:
        ImportError: a host that ``--host`` names is not installed or too old.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    ours = _count_of_ours(given)
    options = _parser().parse_args(given[:ours])
    if not options.is_module and not Path(options.program).is_file():
        _parser().error(f"no file {options.program!r}; for a module, put -m before its name")
    if options.host is None:
        for host in IMPORTED_BY_USERS:
            _register_when_imported(host)
    for host in options.host or ():
        mla_plugin.register(host)
    sys.argv = [options.program, *given[ours:]]
    if options.is_module:
        runpy.run_module(options.program, run_name="__main__", alter_sys=True)
    else:
        if not getattr(sys.flags, "safe_path", False):  # under python -P no folder was put in front
            sys.path[0] = str(Path(options.program).resolve().parent)  # as "python script.py" does
        runpy.run_path(options.program, run_name="__main__")


if __name__ == "__main__":
    main()
