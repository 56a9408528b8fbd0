"""Attention over expanded keys and values: the entry point, the torch.library operators, the call of a backend."""
