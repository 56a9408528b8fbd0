"""Attention over latents, expanded to K and V for a group of heads at a time."""
