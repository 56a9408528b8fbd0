"""Long lines are folded for terminals only, and commands never."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from mla_plugin.cli import main, terminal
from tests.repository.project import ROOT

COMMAND = 'pip install --no-build-isolation "git+https://github.com/somebody/something.git#subdirectory=somewhere"'


@pytest.mark.parametrize(
    ("line", "indent"),
    [
        ("  flashinfer  refuses   AttentionRequest, expected DecodeRequest: this backend reads a compressed cache", 24),
        ("  sdpa        off       NVTE_UNFUSED_ATTN=0, and a reason that is too long for what is left of a line", 24),
        ("  missing  flash-attn is not installed; needed for deterministic training on backend fa2 and more", 11),
        ("bshd bfloat16, batch 2, lengths 4096 x 4096, 128 heads, head dims 192/128, causal, training  on cpu", 2),
    ],
)
def test_a_long_line_continues_under_its_last_column(line: str, indent: int) -> None:
    first, *rest = terminal.folded(line, 80).split("\n")
    assert rest
    assert all(len(part) <= 80 for part in (first, *rest))
    assert all(part.startswith(" " * indent) and part[indent] != " " for part in rest)
    assert " ".join(" ".join((first, *rest)).split()) == " ".join(line.split())


def test_other_lines_stay_as_they_are() -> None:
    text = f"=> forward: triton\n\n           -> {COMMAND}\n=> {COMMAND}\nshort  line\n"
    assert terminal.folded(text, 80) == text


def test_a_word_that_is_too_long_stays_whole() -> None:
    assert COMMAND.split()[-1] in terminal.folded(f"  broken   {COMMAND}", 40)


@pytest.mark.parametrize("command", ["explain", "doctor"])
def test_only_a_terminal_gets_folded_lines(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main([command])
    whole = capsys.readouterr().out
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((80, 24)))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main([command])
    assert capsys.readouterr().out == terminal.folded(whole, 80) != whole


def test_a_reader_that_ends_early_is_no_error() -> None:
    command = [sys.executable, "-c", "import sys; from mla_plugin.cli import main; sys.exit(main(['doctor']))"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_stdout_is_no_error() -> None:
    command = f"{sys.executable} -c \"import sys; from mla_plugin.cli import main; sys.exit(main(['explain']))\" >&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
