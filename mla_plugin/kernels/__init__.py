"""Triton kernels for Multi-head Latent Attention: forward, backward and compressed decode."""

from mla_plugin.kernels.decode.attention import mla_decode_attention
from mla_plugin.kernels.prefill.attention import mla_attention

__all__ = ["mla_attention", "mla_decode_attention"]
