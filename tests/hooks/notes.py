"""What an error says about its backend, on every Python."""

from __future__ import annotations

from mla_plugin.hooks.registry import RaisedInBackendError


def notes(error: BaseException) -> list[str]:
    """The error's notes, innermost backend first; before Python 3.11 they are its causes."""
    if hasattr(error, "__notes__"):
        return list(error.__notes__)
    found = []
    while isinstance(error.__cause__, RaisedInBackendError):
        error = error.__cause__
        found.insert(0, str(error))
    return found
