"""Register with a host framework, and undo it."""

from __future__ import annotations

import importlib
from collections.abc import Callable

ADAPTERS = ("megatron", "sglang", "torchtitan", "transformer_engine", "transformers", "vllm")
"""Frameworks that have an adapter in ``mla_plugin.compat``."""
IMPORTED_BY_USERS = {
    "torchtitan": "torchtitan.models.common.config_utils",
    "transformer_engine": "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention",
    "transformers": "transformers.modeling_utils",
}
"""For each host a module that every program using its attention imports; the adapter registers after that import.

TransformerEngine's is where DotProductAttention is defined, in every supported version.
"""


class Registration:
    """The registration of ``mla_plugin.register`` with a host; ``uninstall`` undoes it.

    Attributes:
        host: the host's name.
    """

    def __init__(self, host: str, undo: Callable[[], None]) -> None:
        self.host = host
        self._undo: Callable[[], None] | None = undo

    def uninstall(self) -> None:
        """Restore the host; calling it again does nothing."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()


def register(host: str) -> Registration | None:
    """Register with a host framework's attention registry; a second call changes nothing.

    Args:
        host: ``"transformers"``: registers ``mla_plugin`` as an ``attn_implementation``. ``"megatron"``: every dense
            MLA layer of Megatron-Core built afterwards runs its attention through mla-plugin.
            ``"torchtitan"``: registers ``mla_plugin`` as an ``attn_backend``.
            ``"vllm"``, ``"sglang"``: registers its MLA backends in this process. The installed plug-in does so in every
            process of these hosts by itself.
            ``"transformer_engine"``: its DotProductAttention follows ``NVTE_MLA_TRITON`` and ``MLA_PLUGIN_TE``.

    Returns:
        for ``"transformer_engine"`` the registration, whose ``uninstall()`` undoes it; None for the other hosts.

    Raises:
        ValueError: there is no adapter for the host.
        ImportError: the host is not installed, or too old.
    """
    if host not in ADAPTERS:
        raise ValueError(f"no adapter for the host {host!r}; available: {', '.join(ADAPTERS)}")
    registration: Registration | None = importlib.import_module(f"mla_plugin.compat.{host}").register()
    return registration
