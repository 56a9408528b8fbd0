"""Adapters to host frameworks, one module or package per host; a host is imported only when its adapter is used."""
