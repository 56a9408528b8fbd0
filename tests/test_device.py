"""What is probed: cuDNN that cannot be used counts as absent."""

import logging

import pytest
import torch

from mla_plugin import device


@pytest.mark.parametrize(("found", "version"), [(91900, (9, 19, 0)), (8907, (8, 9, 7)), (None, None)])
def test_cudnn_versions(
    found: int | None, version: tuple[int, int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: found)
    assert device._cudnn_version() == version


def test_a_cudnn_that_pytorch_refuses_is_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """PyTorch raises where another library has loaded an older cuDNN before it."""

    def version() -> int:
        raise RuntimeError("cuDNN version incompatibility: compiled against (9, 19, 0) but found (9, 14, 0)")

    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    with caplog.at_level(logging.WARNING, "mla_plugin"):
        assert device._cudnn_version() is None
    assert "found (9, 14, 0)" in caplog.text
