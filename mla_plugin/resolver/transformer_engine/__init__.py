"""TransformerEngine's own selection of a backend, rule for rule."""
