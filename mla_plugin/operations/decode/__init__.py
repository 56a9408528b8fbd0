"""Decode over the compressed cache: the entry point and the torch.library operator."""
