"""TransformerEngine (PyTorch) 2.10 and newer: MLA calls of its ``DotProductAttention`` on our kernels, on request.

``mla_plugin.register("transformer_engine")`` wraps ``DotProductAttention.forward`` once, on the class, so that
TransformerEngine's own layers and Megatron's subclass go through it. Three ways lead there, and they can meet:

==================================================  ===================================================================
in a program that can be edited                     ``mla_plugin.register("transformer_engine")``
in one that cannot                                  ``python -m mla_plugin.run train.py ...``
from the environment, TransformerEngine >= 2.20     ``NVTE_PLUGIN=mla_plugin.compat.transformer_engine``
==================================================  ===================================================================

Without one of the two variables below the wrapper calls TransformerEngine's own forward and does nothing else. Both
are read at every call.

=========================  ============================================================================================
``NVTE_MLA_TRITON=1``      the Triton kernels, where the conditions of NVIDIA/TransformerEngine pull request 2950 hold
``MLA_PLUGIN_TE=fill``     the tables in ``gaps``: only where TransformerEngine fails, or runs its quadratic attention
=========================  ============================================================================================

Every other call is TransformerEngine's, with the arguments untouched. ``call`` lists what that is.

The wrapper stands above TransformerEngine's selection instead of taking the slot of ``NVTE_PLUGIN``
(``transformer_engine_torch.flash_attention`` and ``get_attention_backend``): the slot holds only one plugin
and does not exist before 2.20. It is asked only when the parameters of a call differ from the last one's, so a changed
variable would go unnoticed. A plugin in the slot keeps it and sees every call that is handed over.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import threading

from packaging.version import Version

from mla_plugin import environment
from mla_plugin.compat.transformer_engine.wrapper import Wrapper
from mla_plugin.import_hook import when_imported
from mla_plugin.registration import IMPORTED_BY_USERS, Registration

MINIMUM_VERSION = Version("2.10")
_registration: Registration | None = None
_registering = threading.Lock()


def register() -> Registration:
    """Wrap ``DotProductAttention.forward``, now or when TransformerEngine is imported; a second call changes nothing.

    Returns:
        the registration; its ``uninstall()`` restores TransformerEngine's own forward.

    Raises:
        ImportError: TransformerEngine is not installed or older than 2.10.
    """
    global _registration
    with _registering:
        if _registration is None:
            wrapper = Wrapper(_installed_version())
            forget = when_imported(IMPORTED_BY_USERS["transformer_engine"], wrapper.install)

            def undo() -> None:
                global _registration
                with _registering:
                    _registration = None
                    forget()
                    wrapper.uninstall()

            _registration = Registration("transformer_engine", undo)
        return _registration


def load_plugins() -> None:
    """TransformerEngine >= 2.20 calls this while it is imported, when ``NVTE_PLUGIN`` names this module.

    The plugin that ``MLA_PLUGIN_NVTE_PLUGIN`` names is loaded first; whoever takes TransformerEngine's slot keeps
    it. An error becomes TransformerEngine's own warning that the plugin failed to load.
    """
    other = environment.read("MLA_PLUGIN_NVTE_PLUGIN")
    if isinstance(other, str):
        importlib.import_module(other).load_plugins()
    register()


def _installed_version() -> Version:
    try:
        version = Version(importlib.metadata.version("transformer_engine"))
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(
            "transformer_engine is not installed: pip install --no-build-isolation transformer-engine[pytorch]"
        ) from error
    if version < MINIMUM_VERSION:
        raise ImportError(f"transformer_engine {version} is installed, mla_plugin needs >= {MINIMUM_VERSION}")
    return version
