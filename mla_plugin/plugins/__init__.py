"""Built-in backends, one per file; each is an ordinary plugin."""
