"""Attention over latents, expanded to K and V a group of heads at a time: the entry, the operator, the two passes."""
