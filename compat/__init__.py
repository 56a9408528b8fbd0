"""Adapters to host frameworks, one file per host. Nothing in mla_plugin imports them."""
