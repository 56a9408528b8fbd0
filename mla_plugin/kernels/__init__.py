"""Triton kernels for Multi-head Latent Attention: forward, backward and compressed decode."""
