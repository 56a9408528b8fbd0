"""Absorbed decode for Hopper in Gluon: one warp or warpgroup loads, two compute. See kernels/README.md."""
