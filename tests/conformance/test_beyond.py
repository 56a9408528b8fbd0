"""The check of more than 2**31 elements, over fewer: it passes what is right and sees where addresses come round."""

from __future__ import annotations

import unittest
from pathlib import Path

import pytest
import torch

from mla_plugin.conformance import ConformanceError, memory
from mla_plugin.conformance.attention import beyond
from tests.conformance.broken_attention import PICK, broken
from tests.conformance.broken_decode import PAGES, TAKE
from tests.conformance.whole_table import suite_of

ELEMENTS = 400_000


def test_attention() -> None:
    beyond.check(suite_of("attention", None), ELEMENTS)


@pytest.mark.parametrize("qkv_format", ["bshd", "thd"])
def test_attention_whose_rows_come_round(qkv_format: str) -> None:
    """As if the last sequence's address had lost a bit."""
    start = "rows.start % 192" if qkv_format == "thd" else "0"
    wrong = (
        f"        rows = slice({start}, {start} + 64) if layout.is_packed else rows\n" if qkv_format == "thd" else ""
    )
    take = "        k_b = k[row % 3, :, columns]" if qkv_format == "bshd" else "        k_b = k[row, :, rows]"
    fault = broken("rows_come_round", PICK, f"{PICK}\n{wrong}{take}")
    with pytest.raises(ConformanceError, match=rf"of sequence \d of \d in {qkv_format}, q has \d+ elements"):
        beyond.check(suite_of("attention", fault), ELEMENTS)


def test_decode() -> None:
    suite_of("decode", None).check_far_rows(2 * ELEMENTS)


@pytest.mark.parametrize(
    "fault",
    [
        broken("pages_come_round", PAGES, PAGES + "\n    pages = pages % 8"),
        broken(
            "rows_come_round",
            TAKE,
            TAKE + "\n    t = t._replace(c_kv=t.c_kv[[0, 1, 0]]) if t.page_table is None else t",
        ),
    ],
    ids=str,
)
def test_decode_whose_rows_come_round(fault) -> None:
    with pytest.raises(ConformanceError, match="out"):
        suite_of("decode", fault).check_far_rows(2 * ELEMENTS)


def test_too_little_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (24 << 30, 80 << 30))
    with pytest.raises(unittest.SkipTest, match="not run: 24 GiB of the device's memory are free, 48 are needed"):
        memory.check_memory("cuda")


def test_a_backend_without_memory_fails_nothing() -> None:
    with (
        pytest.raises(unittest.SkipTest, match="not run: the backend ran out of memory: CUDA out of memory"),
        memory.not_run_without_memory(),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 24 GiB.\nSee the manual.")


GROUPS = {  # of both versions: folders, their limits and what is in use, and what then is free
    "second": ("0::/", {"": ("memory.max", 5 << 20, "memory.current", 2 << 20)}, 3 << 20),
    "unlimited": ("0::/", {"": ("memory.max", "max", "memory.current", 2 << 20)}, None),
    "of_a_parent": (
        "0::/a/b",
        {
            "a/b": ("memory.max", "max", "memory.current", 1 << 20),
            "a": ("memory.max", 4 << 20, "memory.current", 3 << 20),
        },
        1 << 20,
    ),
    "first": (
        "9:cpu,memory:/a",
        {"memory/a": ("memory.limit_in_bytes", 8 << 20, "memory.usage_in_bytes", 7 << 20)},
        1 << 20,
    ),
    "first_in_a_container": (
        "9:memory:/docker/a",
        {"memory": ("memory.limit_in_bytes", 8 << 20, "memory.usage_in_bytes", 7 << 20)},
        1 << 20,
    ),
    "overdrawn": ("0::/", {"": ("memory.max", 1 << 20, "memory.current", 2 << 20)}, 0),
    "another_controller": ("3:cpu:/", {"": ("memory.max", 1 << 20, "memory.current", 2 << 20)}, None),
}


@pytest.mark.parametrize(("line", "folders", "free"), GROUPS.values(), ids=GROUPS)
def test_the_limit_of_a_control_group(line: str, folders: dict, free: int | None, tmp_path: Path) -> None:
    for name, (limit, most, usage, used) in folders.items():
        folder = tmp_path / "mounted" / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, value in ((limit, most), (usage, used), ("memory.stat", "anon 4096\nsock 0")):
            (folder / file).write_text(f"{value}\n")
    (tmp_path / "cgroup").write_text(f"1:name=systemd:/\n{line}\n")
    found = memory.free_on_the_host(tmp_path / "cgroup", tmp_path / "mounted")
    assert found == free if free is not None else found > 64 << 20


def test_files_in_memory_count_as_free(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/\n")
    files = {"memory.max": "100", "memory.current": "90", "memory.stat": "inactive_file 40"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert memory.free_on_the_host(tmp_path / "cgroup", tmp_path) == 50
