"""Which CUDA graph is being captured, for work that each graph must hold once, whatever was done before."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

_ACTIVE = 1
"""CU_STREAM_CAPTURE_STATUS_ACTIVE."""


@functools.cache
def _driver() -> Any:
    """CUDA's driver, of which PyTorch shows no function that tells captures apart; None where it is not found."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError):
        return None


def stream_and_capture(device: torch.device) -> tuple[int, int] | None:
    """The current stream of ``device``, and the capture that it takes part in.

    Kernels of calls with an equal result run in the order of their launches, also when a graph is replayed.

    Returns:
        (address of the stream, number of the capture, which no other capture of the process has, or 0 outside of one);
        None within a capture whose number the driver does not tell.
    """
    if device.type != "cuda":
        return 0, 0
    current = torch._C._cuda_getDevice()  # torch.cuda.current_device makes four more function calls
    if device.index not in (None, current):
        with torch.cuda.device(device):  # PyTorch tells it of the current device's stream alone
            return stream_and_capture(device)
    stream: int = torch._C._cuda_getCurrentRawStream(current)
    if not torch.cuda.is_current_stream_capturing():
        return stream, 0
    get_capture_info = _driver()
    if get_capture_info is None:
        return None
    status, number = ctypes.c_int(), ctypes.c_uint64()
    code = get_capture_info(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None)
    return (stream, number.value) if code == 0 and status.value == _ACTIVE else None
