"""The arguments of a call: memory layouts, masks, tensors and options, and their checks."""
