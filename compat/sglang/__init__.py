"""SGLang 0.5.11 and newer: prefill and decode of MLA models on the fastest installed backend.

SGLang calls ``register`` in each of its processes, by the entry point ``mla_plugin`` of ``sglang.srt.plugins``, so
nothing has to be imported or edited. ``--attention-backend mla_plugin`` then chooses it, and so do
``--prefill-attention-backend`` and ``--decode-attention-backend`` for one half. ``backend`` computes, ``extend`` holds
what a prefill needs, ``refusals`` says what is not taken and why.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from mla_plugin.compat.sglang import refusals, releases
from mla_plugin.compat.sglang.refusals import NAME

__all__ = ["NAME", "create", "register"]

_logger = logging.getLogger("sglang.mla_plugin")


def register() -> None:
    """Make the backend known to this process's SGLang; calling it again changes nothing.

    Raises:
        ImportError: SGLang is not installed or older than 0.5.11.
    """
    has = releases.installed()
    from sglang.srt import server_args
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    found = attention_registry.ATTENTION_BACKENDS.get(NAME)
    if found is not None:
        if found is not create:
            _logger.warning("the attention backend %s is another plugin's; mla-plugin leaves it", NAME)
        return
    attention_registry.register_attention_backend(NAME)(create)
    if NAME not in server_args.ATTENTION_BACKEND_CHOICES:
        server_args.add_attention_backend_choices([NAME])
    chunks = server_args if has.chunk_names else importlib.import_module("sglang.srt.model_executor.model_runner")
    if NAME not in chunks.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS:
        chunks.add_chunked_prefix_cache_attention_backend(NAME)
    HookRegistry.register("sglang.srt.server_args.ServerArgs.check_server_args", _check_server_args, HookType.AFTER)


def _check_server_args(result: Any, server_args: Any, *_: Any, **__: Any) -> None:
    """Refuse arguments before SGLang loads a model."""
    if refusals.is_chosen(server_args):
        refusals.raise_if(refusals.of_arguments(server_args))


def create(runner: Any) -> Any:
    """The backend of a model runner, as SGLang's registry calls it.

    Raises:
        ValueError: the model, the device or an argument is not taken; every reason is in the message.
    """
    if not releases.is_tested():
        _logger.warning("SGLang is newer than %s, the newest release that mla-plugin was tested with", releases.NEWEST)
    refusals.raise_if([*refusals.of_arguments(runner.server_args), *refusals.of_runner(runner)])
    from mla_plugin.compat.sglang import dispatch
    from mla_plugin.compat.sglang.backend import MLAPluginAttnBackend

    dispatch.register(expands_prefixes=refusals.expands_prefixes(runner))
    return MLAPluginAttnBackend(runner)
