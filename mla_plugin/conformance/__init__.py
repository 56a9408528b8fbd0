"""The conformance suite: what any backend must pass."""
