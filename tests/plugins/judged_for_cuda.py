"""For the conformance of emulated libraries: requests are judged for a CUDA device, and computed on the CPU."""

from __future__ import annotations

from typing import Any

from mla_plugin.conformance import DecodeConformance
from mla_plugin.hooks.decode import DecodeRequest


class JudgedForCuda(DecodeConformance):
    """A suite whose every decode request says that it is on a CUDA device."""

    def _answer(self, request: Any) -> Any:
        is_decode = isinstance(request, DecodeRequest)
        return super()._answer(request.replace(device_type="cuda") if is_decode else request)
