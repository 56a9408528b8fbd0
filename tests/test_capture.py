"""Streams and captures are told apart, with stand-ins for CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from mla_plugin.arguments import capture


def test_no_capture_goes_on_here() -> None:
    assert capture.stream_and_capture(torch.device("cpu")) == (0, 0)


@pytest.fixture
def a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 40 + index, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.mark.usefixtures("a_stream")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_streams_are_told_apart(device: str) -> None:
    assert capture.stream_and_capture(torch.device(device)) == (41, 0)


@pytest.mark.usefixtures("a_stream")
def test_a_capture_without_a_driver_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(capture, "_driver", lambda: None)
    assert capture.stream_and_capture(torch.device("cuda", 1)) is None


@pytest.mark.usefixtures("a_stream")
def test_a_driver_that_tells_of_no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives an error, or the status of a stream whose capture has ended."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for code in (1, 0):
        monkeypatch.setattr(capture, "_driver", lambda code=code: lambda *_: code)
        assert capture.stream_and_capture(torch.device("cuda", 1)) is None


@pytest.mark.usefixtures("a_stream")
def test_a_stream_of_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for with that device as the current one."""

    @contextlib.contextmanager
    def on(device: torch.device) -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(torch._C, "_cuda_getDevice", lambda: device.index, raising=False)
            yield

    monkeypatch.setattr(torch.cuda, "device", on)
    assert capture.stream_and_capture(torch.device("cuda", 3)) == (43, 0)
