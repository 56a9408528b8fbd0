"""Latent attention over the ranks of a group: c_kv and k_rope are gathered, never K and V.

``all_gather`` and ``a2a`` are the two communication types, ``run`` their common part, ``operator`` the operators.
"""
