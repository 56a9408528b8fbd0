"""The suite for decode over the compressed cache."""
