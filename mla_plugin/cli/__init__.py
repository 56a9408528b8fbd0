"""The command line: ``mla-plugin demo | explain | doctor | bench | warm-up``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import mla_plugin
from mla_plugin.cli import bench, demo, doctor, explain, warm_up


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mla-plugin", description="Multi-head Latent Attention on the best installed backend."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {mla_plugin.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (demo, explain, doctor, bench, warm_up):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: the arguments after the program's name; None for those of the process.

    Returns:
        0 on success, 1 if no backend is left or the command reports a failure (each command says when), 2 for invalid
        arguments or a missing package that the command needs.
    """
    if sys.stdout is None:  # the shell has closed it
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, the process writes to it until it ends
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has ended, as head does; Python would complain again when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, ImportError, OSError, mla_plugin.NoBackendError) as error:
        print(f"mla-plugin: {error}", file=sys.stderr)
        return 1 if isinstance(error, mla_plugin.NoBackendError) else 2
    return status
