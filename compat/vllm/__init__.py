"""vLLM 0.25.1 and newer: decode and prefill of MLA models on the fastest installed backend.

vLLM loads ``load_plugin`` in each of its processes, by the entry point ``mla_plugin`` of ``vllm.general_plugins``, so
nothing has to be imported or edited. It registers names; vLLM imports the classes when they are chosen:

=======================================================  =====================================================
``--attention-backend MLA_PLUGIN``                       decode: ``decode.MLAPluginBackend``
``MLA_PLUGIN_VLLM_OVERRIDE=1``                           the same, wherever vLLM would take its ``TRITON_MLA``
``--attention-config.mla_prefill_backend MLA_PLUGIN``    prefill: ``prefill.MLAPluginPrefillBackend``
=======================================================  =====================================================

Before vLLM 0.32 the name is ``CUSTOM`` in both: the registries took no new names.
"""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

from mla_plugin import environment
from mla_plugin.compat.vllm import releases

DECODE = "mla_plugin.compat.vllm.decode.MLAPluginBackend"
PREFILL = "mla_plugin.compat.vllm.prefill.MLAPluginPrefillBackend"

__all__ = ["DECODE", "PREFILL", "load_plugin", "register"]

_logger = logging.getLogger("vllm.mla_plugin")  # vLLM's handlers are those of the logger "vllm"


def load_plugin() -> None:
    """``register`` for vLLM's entry point, where any error would end vLLM: it gives a warning instead."""
    try:
        register()
    except ImportError as error:
        _logger.warning("mla-plugin is not registered: %s", error)
    except Exception:  # a newer vLLM may have changed its registries
        _logger.warning("mla-plugin is not registered; vLLM runs without it.", exc_info=True)


def register() -> None:
    """Make both backends known to this process's vLLM; calling it again changes nothing.

    Raises:
        ImportError: vLLM is not installed or older than 0.25.1.
    """
    has = releases.installed()
    if not releases.is_tested():
        _logger.warning("vLLM is newer than %s, the newest release that mla-plugin was tested with", releases.NEWEST)
    from vllm.v1.attention.backends import registry
    from vllm.v1.attention.backends.mla.prefill import registry as prefill_registry

    name = releases.name(has)
    decode_names = registry.AttentionBackendEnum
    _register(name, decode_names, registry.register_backend, registry, DECODE)
    _register(
        name,
        prefill_registry.MLAPrefillBackendEnum,
        prefill_registry.register_mla_prefill_backend,
        prefill_registry,
        PREFILL,
    )
    if environment.read("MLA_PLUGIN_VLLM_OVERRIDE"):
        registry.register_backend(decode_names.TRITON_MLA, DECODE)


def _register(name: str, names: Any, register_name: Any, registry: ModuleType, path: str) -> None:
    """Register a class under a name that may be new; a name that another plugin took is left to it."""
    if name not in names.__members__:
        register_name(name, path)
        return
    member = names[name]
    if not member.is_overridden():
        register_name(member, path)
    elif member.get_path() != path:
        _logger.warning(
            "%s.%s is %s of another plugin; mla-plugin leaves it. VLLM_PLUGINS=mla_plugin loads only mla-plugin",
            names.__name__,
            name,
            member.get_path(),
        )
