"""Latent attention over the ranks of a group: c_kv and k_rope are gathered, never K and V.

``all_gather`` and ``a2a`` are the two ways; ``run`` is what both share, and ``operator`` what torch.compile sees.
"""
