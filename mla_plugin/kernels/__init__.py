"""Triton kernels for Multi-head Latent Attention: forward, backward and compressed decode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mla_plugin.kernels.decode.attention import mla_decode_attention
    from mla_plugin.kernels.prefill.attention import mla_attention

__all__ = ["mla_attention", "mla_decode_attention"]


def __getattr__(name: str) -> Any:
    """Import on first use: ``hopper/rule.py`` is asked about calls where Triton need not be installed."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mla_plugin.kernels.decode.attention import mla_decode_attention
    from mla_plugin.kernels.prefill.attention import mla_attention

    globals().update(mla_attention=mla_attention, mla_decode_attention=mla_decode_attention)
    return globals()[name]
