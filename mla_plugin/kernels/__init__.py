"""Triton kernels for Multi-head Latent Attention: forward, backward and compressed decode."""

from mla_plugin.kernels.attention import mla_attention
from mla_plugin.kernels.decode_attention import mla_decode_attention

__all__ = ["mla_attention", "mla_decode_attention"]
