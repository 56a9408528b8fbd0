"""Absorbed decode of a few queries together with the products of W_UK and W_UV."""
