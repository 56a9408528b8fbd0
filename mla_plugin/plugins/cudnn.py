"""cuDNN attention through PyTorch: refusals only, first version."""

from __future__ import annotations

from mla_plugin.hooks import hookimpl
from mla_plugin.types import Accepted, AttentionRequest, Platform, Refused


@hookimpl
def select_backend(request: AttentionRequest, platform: Platform) -> Accepted | Refused:
    """Refuse."""
    return Refused((f"device {request.device_type!r}: nothing runs here yet",))
