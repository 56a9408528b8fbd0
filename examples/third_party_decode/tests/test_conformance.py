"""The backend against the suite that mla-plugin ships; run it with ``pytest`` where both packages are installed."""

from mla_plugin.conformance import DecodeConformance


class TestTokenwise(DecodeConformance):
    backend = "tokenwise"
    refuses = {"leftpad": "has_leftpad_kv"}  # noqa: RUF012
