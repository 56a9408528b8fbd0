"""Triton kernels for Multi-head Latent Attention: forward, backward and compressed decode."""

from mla_plugin.kernels.attention import mla_attention

__all__ = ["mla_attention"]
