"""The packages that carry FlashAttention 3, and how each is called.

Its own package, ``flash-attn-3``, has everything. vLLM and SGLang ship the same kernels without the backward, built for
lengths that differ: SGLang's function takes packed sequences only, vLLM's operator dense tensors too if ``seqused_k``
comes with them ("This flash attention build only supports varlen" otherwise). vLLM's Python wrapper hides
``seqused_q``, so the operator is called instead.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.device import FLASH_ATTENTION_PROVIDERS
from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.hooks.types import Platform
from mla_plugin.plugins.shared.dense import Run
from mla_plugin.plugins.shared.flash_family import Options, imported, not_installed
from mla_plugin.plugins.shared.packed import Rows, row_lengths
from mla_plugin.plugins.shared.refusals import off_cuda

Outputs = tuple[torch.Tensor, torch.Tensor]


def _common(options: Options) -> dict[str, Any]:
    """Keyword arguments that the Python functions of every provider take, dense or packed."""
    return options.named("softmax_scale", "causal", "window_size")


def _lengths(options: Options) -> dict[str, Any]:
    """Keyword arguments for packed sequences."""
    return options.offsets | options.named("seqused_q", "seqused_k")


def _packed(options: Options) -> tuple[object, ...]:
    """The operators' arguments for lengths, in the order of ``_PACKED``."""
    used = (options.seqused_q, options.seqused_k)
    if options.cu_seqlens_q is None:
        return (None, None, *used, None, None)
    return (options.cu_seqlens_q, options.cu_seqlens_k, *used, options.max_seqlen_q, options.max_seqlen_k)


def _mask(options: Options) -> tuple[float, bool, int, int]:
    """The operators' arguments for scale and mask, in the order of ``_MASK``."""
    return (options.softmax_scale, options.causal, *options.window_size)


@dataclass(frozen=True)
class Provider:
    """One package.

    Attributes:
        distribution: name of the distribution, as ``Platform.version`` takes it.
        module: what to import.
        takes_dense: it has a function for dense tensors; otherwise every call has cu_seqlens.
        needs_lengths: that function needs ``seqused_k``.
        has_backward: it can train.
        has_windows: its sliding windows are correct.
    """

    distribution: str
    module: str
    takes_dense: bool = False
    needs_lengths: bool = False
    has_backward: bool = False
    has_windows: bool = True

    def library(self) -> Any:
        """The imported module.

        Raises:
            RuntimeError: the distribution is installed, but its module cannot be imported.
        """
        remedy = f"reinstall it for PyTorch {torch.__version__}, or leave the backend out with MLA_PLUGIN_BLOCK=fa3"
        return imported(self.distribution, self.module, remedy)

    def options(self, request: AttentionRequest, tensors: AttentionTensors, rows: Rows) -> Options:
        """Of a call whose rows are those of ``rows``."""
        found = Options.of(request, tensors.softmax_scale, rows)
        if not self.needs_lengths or rows.kv is not None:
            return found
        return found._replace(seqused_k=row_lengths(request.batch_size, request.max_seqlen_kv, tensors.k.device))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> Outputs:
        """Out and the natural-log lse, [H, T], or [B, H, S_q] for dense tensors.

        Args:
            q, k, v: packed [T, H, D], or dense [B, S, H, D] where the provider takes it.
            options: the rest.
        """
        raise NotImplementedError

    def forward_with(self, options: Options) -> Run:
        """``forward`` with these options, for many calls of dense batches."""
        return functools.partial(self.forward, options=options)

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        options: Options,
    ) -> None:
        """Write dq, dk and dv into ``gradients``; positions outside the sequences are not written."""
        raise NotImplementedError


class FlashAttn3(Provider):
    """``flash_attn_interface``, built from the hopper folder of FlashAttention's repository.

    Its operators ``flash_attn_3::fwd`` and ``bwd`` (in builds since May 2025) are called directly: the functions
    above them take 15 us more host time, for their own autograd function and operator.
    """

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> Outputs:
        """See ``Provider``; newer builds return lse only when asked, older ones always."""
        library = self.library()
        operators = _operators(library)
        if operators is not None:
            result = operators.forward(q, k, v, *_packed(options), *_mask(options))
            return result[0], result[1]
        if options.cu_seqlens_q is None:
            function, lengths = library.flash_attn_func, {}
        else:
            function, lengths = library.flash_attn_varlen_func, _lengths(options)
        wants_lse = {"return_attn_probs": True} if "return_attn_probs" in _parameters(function) else {}
        result = function(q, k, v, **lengths, **_common(options), **wants_lse)
        if not isinstance(result, tuple):
            raise RuntimeError(
                f"{self.module}.{function.__name__} returned out without the log-sum-exp and has no argument "
                "return_attn_probs to ask for it; install a newer flash-attn-3"
            )
        return result[0], result[1]

    def forward_with(self, options: Options) -> Run:
        """See ``Provider``; what follows q, k and v is put together once."""
        operators = _operators(self.library())
        if operators is None:
            return super().forward_with(options)
        return operators.forward.after(3, *_packed(options), *_mask(options))

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        options: Options,
    ) -> None:
        """See ``Provider``; the window is one argument in older builds and two in newer ones."""
        library = self.library()
        operators = _operators(library)
        if operators is not None:
            inputs = (dout, q, k, v, out, lse)
            operators.backward(*inputs, *gradients, *_packed(options), *_mask(options), options.deterministic)
            return
        function = library._flash_attn_backward
        is_one = "window_size" in _parameters(function)
        window = (options.window_size,) if is_one else options.window_size
        softcap = 0.0
        function(
            dout,
            q,
            k,
            v,
            out,
            lse,
            options.cu_seqlens_q,
            options.cu_seqlens_k,
            options.seqused_q,
            options.seqused_k,
            options.max_seqlen_q,
            options.max_seqlen_k,
            *gradients,
            options.softmax_scale,
            options.causal,
            *window,
            softcap,
            options.deterministic,
        )


class Vllm(Provider):
    """The operator ``_vllm_fa3_C::fwd`` that ``vllm.vllm_flash_attn`` loads.

    Its sliding windows are wrong from a few tiles beyond the window's left side on: vLLM's copy of the kernel moves the
    keys' start to the window's, and since vllm-project/flash-attention pull request 93 (October 2025) the tiles that
    need a mask are counted without that shift (``n_block_min_causal_local_mask`` and
    ``n_block_min_before_local_mask`` in ``hopper/mainloop_fwd_sm90_tma_gmma_ws.hpp`` use ``tot_seqlen_k`` where
    ``n_offset`` is off ``seqlen_k``), so tiles on the diagonal go unmasked. FlashAttention's own kernel, which SGLang
    ships, has no such shift. Releases before that change are not known to be right.
    """

    def operator(self) -> Any:
        """``fwd``; once it is registered, nothing has to be imported.

        Raises:
            RuntimeError: the module cannot be imported, or it can where vLLM was built without the operator.
        """
        if not hasattr(torch.ops._vllm_fa3_C, "fwd"):
            self.library()
        if not hasattr(torch.ops._vllm_fa3_C, "fwd"):
            raise RuntimeError(
                f"{self.distribution} is installed, but {self.module} has no FlashAttention 3: install a vllm "
                "built for Hopper, or leave the backend out with MLA_PLUGIN_BLOCK=fa3"
            )
        return torch.ops._vllm_fa3_C.fwd.default

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> Outputs:
        """See ``Provider``."""
        result = _vllm_operator(self.operator())(q, k, v, *_packed(options), *_mask(options))
        return result[0], result[1]

    def forward_with(self, options: Options) -> Run:
        """See ``Provider``; what follows q, k and v is put together once."""
        return _vllm_operator(self.operator()).after(3, *_packed(options), *_mask(options))


class SglKernel(Provider):
    """``sgl_kernel.flash_attn``, SGLang's build."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> Outputs:
        """See ``Provider``."""
        function = self.library().flash_attn_varlen_func
        result = function(q, k, v, **_lengths(options), **_common(options), return_softmax_lse=True)
        return result[0], result[1]


_KINDS: dict[str, Callable[[str, str], Provider]] = {
    "flash-attn-3": functools.partial(FlashAttn3, takes_dense=True, has_backward=True),
    "vllm": functools.partial(Vllm, takes_dense=True, needs_lengths=True, has_windows=False),
    "sgl-kernel": SglKernel,
}
PROVIDERS: tuple[Provider, ...] = tuple(
    _KINDS[distribution](distribution, module) for distribution, module in FLASH_ATTENTION_PROVIDERS["fa3"]
)
"""In search order."""

_ONES = ("num_splits", "cp_world_size")
_ZEROS = {"int": 0, "float": 0.0, "bool": False}


@functools.lru_cache(maxsize=256)
def find(platform: Platform) -> Provider | None:
    """The first provider whose distribution is installed."""
    return next((provider for provider in PROVIDERS if platform.version(provider.distribution) is not None), None)


def installed(platform: Platform) -> Provider:
    """The provider that a plan was made for."""
    provider = find(platform)
    if provider is None:
        raise RuntimeError(f"no provider of FlashAttention 3 is installed on {platform}; the plan is another machine's")
    return provider


def absence(device_type: str, platform: Platform) -> Iterator[str]:
    """Why the library cannot run at all: no provider is installed, or the device is not Hopper."""
    yield from not_installed(platform, "FlashAttention 3", *(provider.distribution for provider in PROVIDERS))
    off_device = tuple(off_cuda(device_type, platform.device_type))
    yield from off_device
    if not off_device and platform.compute_capability != (9, 0):
        yield f"compute_capability={platform.compute_capability}, expected (9, 0)"


class ByPlace:
    """Calls an operator by position: by name PyTorch would look up each of about forty arguments at every call.

    Arguments that are not given are absent, off or, for counts, 1. The builds differ in the arguments after
    ``sm_margin``, which enable features that are not used here.

    Args:
        operator: the overload; its schema gives each argument's position.
        names: arguments of each call, in order.
        fixed: other arguments, the same in every call.

    Raises:
        RuntimeError: the operator has no such argument.
    """

    def __init__(self, operator: Any, names: tuple[str, ...], **fixed: object) -> None:
        arguments = operator._schema.arguments
        places = {argument.name: place for place, argument in enumerate(arguments)}
        unknown = ", ".join(name for name in (*names, *fixed) if name not in places)
        if unknown:
            raise RuntimeError(f"{operator} has no argument {unknown}; this build of FlashAttention 3 is unknown")
        self._operator = getattr(operator, "_op", operator)  # what an overload calls, without its Python frame
        self._places = [places[name] for name in names]
        self._arguments = [fixed.get(argument.name, _neutral(argument)) for argument in arguments]

    def __call__(self, *given: object) -> Any:
        """Call it; ``given`` is what ``names`` says."""
        return self._operator(*self._placed(given, self._places))

    def after(self, count: int, *given: object) -> Callable[..., Any]:
        """The operator as a function of its first ``count`` arguments; ``given`` is what follows them in ``names``."""
        operator, rest = self._operator, self._placed(given, self._places[count:])[count:]
        return lambda *first: operator(*first, *rest)

    def _placed(self, given: Sequence[object], places: Sequence[int]) -> list[object]:
        arguments = self._arguments.copy()
        for place, value in zip(places, given, strict=True):
            arguments[place] = value
        return arguments


def _neutral(argument: Any) -> object:
    """The value that disables an argument."""
    if argument.has_default_value():
        return argument.default_value
    return 1 if argument.name in _ONES else _ZEROS.get(str(argument.type))


_PACKED = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "max_seqlen_q", "max_seqlen_k")
_MASK = ("softmax_scale", "is_causal", "window_size_left", "window_size_right")


class _Operators(NamedTuple):
    """flash-attn-3's, by what ``FlashAttn3`` gives them."""

    forward: ByPlace
    backward: ByPlace


@functools.cache
def _operators(library: Any) -> _Operators | None:
    """The operators registered by the imported module; None for a build before May 2025, which has only functions."""
    namespace = torch.ops.flash_attn_3
    if not (hasattr(namespace, "fwd") and hasattr(namespace, "bwd")):
        return None
    written = ("dq", "dk", "dv")
    return _Operators(
        ByPlace(namespace.fwd.default, ("q", "k", "v", *_PACKED, *_MASK), num_splits=1),
        ByPlace(
            namespace.bwd.default,
            ("dout", "q", "k", "v", "out", "softmax_lse", *written, *_PACKED, *_MASK, "deterministic"),
        ),
    )


@functools.cache
def _vllm_operator(operator: Any) -> ByPlace:
    return ByPlace(operator, ("q", "k", "v", *_PACKED, *_MASK))


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
