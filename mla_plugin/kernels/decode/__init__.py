"""The Triton kernels over the compressed cache, and their launchers."""
