"""Kernels for compute capability 9.0 written in Gluon, Triton's lower-level language."""
