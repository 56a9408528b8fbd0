"""The wrapper around ``DotProductAttention.forward`` and the decisions it makes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any, TypeAlias

import torch
from packaging.version import Version

import mla_plugin
from mla_plugin import environment
from mla_plugin.arguments.options import CallOptions
from mla_plugin.compat.transformer_engine import gaps
from mla_plugin.compat.transformer_engine.call import Arguments, Call, Ranks, Signature, format_of, read
from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.hooks.manager import get_manager
from mla_plugin.hooks.types import NoBackendError
from mla_plugin.operations.attention.run import run

logger = logging.getLogger("mla_plugin")

_COMPARES_OFFSETS_BEFORE = Version("2.18")
_DECISIONS_KEPT = 4096


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _switches() -> tuple[bool, bool]:
    """Whether NVTE_MLA_TRITON and MLA_PLUGIN_TE are on; a compiled program keeps the values of its trace."""
    return environment.read("NVTE_MLA_TRITON") == "1", bool(environment.read("MLA_PLUGIN_TE"))


Circumstances: TypeAlias = tuple[environment.Gates, int]
"""What a decision depends on besides the request: the variables that are set, and the set of plugins."""


def _circumstances() -> Circumstances:
    return environment.gates(), get_manager().generation


@functools.lru_cache(maxsize=_DECISIONS_KEPT)
def _chosen(request: AttentionRequest, circumstances: Circumstances) -> str | None:
    """The backend that this library chooses; None if there is none. Unlike ``resolve`` it caches refusals too."""
    try:
        return mla_plugin.resolve(request).forward_backend
    except NoBackendError:
        return None
    except ValueError as error:  # from a variable; TransformerEngine reports errors in its own variables itself
        logger.warning("TransformerEngine keeps a call: %s", error)
        return None


@functools.lru_cache(maxsize=_DECISIONS_KEPT)
def _as_elsewhere(request: AttentionRequest) -> AttentionRequest:
    """The same request without a host: with this one, backends unknown to TransformerEngine would be left out."""
    return request.replace(host="direct")


class Wrapper:
    """Wraps the class's forward, and restores it.

    Args:
        version: of TransformerEngine.
    """

    def __init__(self, version: Version) -> None:
        self._version = version
        self._attention: Any = None
        self._original: Callable[..., Any] | None = None
        self._forward: Callable[..., Any] | None = None
        self._is_installed = False
        self._unfused: dict[tuple[object, ...], bool] = {}

    def install(self, module: ModuleType) -> None:
        """Wrap the forward of the DotProductAttention that the module defines."""
        self._attention = module.DotProductAttention
        self._original = original = self._attention.forward
        signature = Signature(original)
        if not signature.is_readable:
            logger.warning(
                "DotProductAttention.forward is %r, which hides its parameters: no call can be read, TransformerEngine "
                "keeps all; register mla_plugin before it, or let it use functools.wraps",
                original,
            )

        @functools.wraps(original)
        def forward(attention: Any, *args: Any, **kwargs: Any) -> Any:
            wants_triton, wants_filling = _switches()
            if self._is_installed and (wants_triton or wants_filling):
                arguments = signature.bind(args, kwargs)
                if arguments is not None:
                    out = self._run(attention, arguments, wants_triton, wants_filling)
                    if out is not None:
                        return out
            return original(attention, *args, **kwargs)

        self._forward = self._attention.forward = forward
        self._is_installed = True

    def uninstall(self) -> None:
        """Restore the class's own forward; a later wrapper around this one stays, and this one passes through."""
        self._is_installed = False
        if self._attention is not None and self._attention.forward is self._forward:
            self._attention.forward = self._original

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a graph break, as TransformerEngine's own up to 2.18
    def _run(self, module: Any, arguments: Arguments, wants_triton: bool, wants_filling: bool) -> torch.Tensor | None:
        """The attention on our kernels; None when TransformerEngine runs the call."""
        if format_of(module, arguments) == "thd" and not wants_filling:  # no case for NVTE_MLA_TRITON
            return None
        is_by_value = self._version < _COMPARES_OFFSETS_BEFORE
        call = read(module, arguments, compares_offsets=is_by_value, over_ranks=wants_filling)
        if call is None:
            return None
        is_mla = call.request.head_dim_qk != call.request.head_dim_v
        if wants_triton and is_mla and call.ranks is None and _chosen(call.request, _circumstances()) == "triton":
            return _attend(call, "triton")
        return self._fill(module, call) if wants_filling else None

    def _fill(self, module: Any, call: Call) -> torch.Tensor | None:
        """The attention output if there is a gap to fill, else None."""
        try:
            torch.cuda.get_device_capability(call.tensors.q.device)
        except (
            ValueError,
            AssertionError,
        ):  # not on a CUDA device, or PyTorch without CUDA: TransformerEngine's to refuse
            return None
        found = gaps.candidates(call, self._version)
        if not found:
            return None
        circumstances = _circumstances()
        if call.ranks is not None:
            if any(gap.is_selected_too for gap in found) or self._is_left_unfused(module, call, circumstances):
                return _attend_over_ranks(call, call.ranks)
            return None
        call = replace(call, request=_as_elsewhere(call.request))
        backend = _chosen(call.request, circumstances)
        if backend is None or not any(backend in gap.runs for gap in found):
            return None
        return _attend(call, backend) if self._is_left_unfused(module, call, circumstances) else None

    def _is_left_unfused(self, module: Any, call: Call, circumstances: Circumstances) -> bool:
        """TransformerEngine's own answer, cached for each kind of call."""
        known = gaps.parameters(module, call)
        key = (*known.values(), call.request.device_index, circumstances)
        answer = self._unfused.get(key)  # another thread may clear at any time
        if answer is None:
            if len(self._unfused) >= _DECISIONS_KEPT:
                self._unfused.clear()
            answer = self._unfused[key] = gaps.is_left_unfused(module, known)
        return answer


def _attend(call: Call, backend: str) -> torch.Tensor:
    """Run the call and merge heads and head_dim_v, as TransformerEngine returns them: [..., H * head_dim_v]."""
    with torch.autocast(call.request.device_type, enabled=False):  # TransformerEngine computes in its inputs' dtype
        return run(call.request, call.tensors, backend=backend).out.flatten(-2)


def _attend_over_ranks(call: Call, ranks: Ranks) -> torch.Tensor | None:
    """The same with our context parallelism; None, on every rank, if it does not support the call."""
    from mla_plugin.context_parallel import api
    from mla_plugin.context_parallel.checks import checked_request

    request, tensors = call.request, call.tensors
    is_packed = request.layout.is_packed
    options = CallOptions(
        qkv_format=request.qkv_format,
        attn_mask_type=request.attn_mask_type,
        max_seqlen_q=request.max_seqlen_q if is_packed else None,
        max_seqlen_kv=request.max_seqlen_kv if is_packed else None,
        pad_between_seqs=request.pad_between_seqs,
        deterministic=request.deterministic,
    )
    try:
        checked_request(tensors, options.completed(tensors), ranks.size, ranks.comm_type)
    except ValueError as error:
        logger.warning("TransformerEngine keeps a call over %d ranks: %s", ranks.size, error)
        return None
    with torch.autocast(request.device_type, enabled=False):
        return api.attention(tensors, options, None, ranks.group, ranks.comm_type).out.flatten(-2)
