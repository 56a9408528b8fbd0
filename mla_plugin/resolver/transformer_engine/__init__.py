"""Reproduces TransformerEngine's selection of a backend, rule by rule."""
