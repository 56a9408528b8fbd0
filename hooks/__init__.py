"""The contract between mla-plugin and an attention backend: three pluggy hooks and their markers."""

import pluggy

PROJECT_NAME = "mla_plugin"

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)

__all__ = ["PROJECT_NAME", "hookimpl", "hookspec"]
