"""The check of more than 2**31 elements, over fewer: it passes what is right and sees where addresses come round."""

from __future__ import annotations

import unittest

import pytest
import torch

from mla_plugin.conformance import ConformanceError
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
        beyond.check_memory("cuda")
