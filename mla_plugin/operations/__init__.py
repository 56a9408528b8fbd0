"""The two operations: attention over expanded keys and values, and decode over the compressed cache."""
