"""The suite for attention over expanded keys and values."""
