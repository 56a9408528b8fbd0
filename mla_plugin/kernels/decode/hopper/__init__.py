"""Absorbed decode for Hopper in Gluon: one warp loads, two warpgroups compute. See kernels/README.md."""
