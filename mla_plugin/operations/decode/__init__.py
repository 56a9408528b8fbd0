"""Decode over the compressed cache: the entry, and the operator that torch.compile sees."""
