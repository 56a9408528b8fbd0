"""Attention over expanded keys and values: the entry, the operator that torch.compile sees, the way to a backend."""
