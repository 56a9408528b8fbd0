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


def capture_number(device: torch.device) -> int | None:
    """The number of the capture that the current stream takes part in, which no other capture of the process has.

    Returns:
        0 outside of a capture; None within one whose number the driver does not tell.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return 0
    get_capture_info = _driver()
    if get_capture_info is None:
        return None
    status, number = ctypes.c_int(), ctypes.c_uint64()
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    code = get_capture_info(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
    return number.value if code == 0 and status.value == _ACTIVE else None
