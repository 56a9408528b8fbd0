"""The Triton kernels of attention over expanded keys and values, and their launchers."""
