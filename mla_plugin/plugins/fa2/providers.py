"""Where FlashAttention 2 comes from: the package ``flash-attn``, or PyTorch, which carries the same kernels.

Both take query, key and value of one head dimension, dense [B, S, H, D] or packed [T, H, D].
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from packaging.version import Version

from mla_plugin.device import FLASH_ATTENTION_PROVIDERS
from mla_plugin.hooks.types import Platform
from mla_plugin.plugins.shared.dense import Run
from mla_plugin.plugins.shared.flash_family import Options, below_dispatcher, empty_like, imported

# Looked up by attribute, so that a test can replace them.
aten_forward = torch.ops.aten._flash_attention_forward.default._op
aten_backward = torch.ops.aten._flash_attention_backward.default._op

((DISTRIBUTION, MODULE),) = FLASH_ATTENTION_PROVIDERS["fa2"]
FIRST_VERSION, FIRST_VERSION_ON_BLACKWELL, BELOW_VERSION = "2.7.0", "2.7.3", "2.8.4"
"""From 2.7 on the log-sum-exp of packed sequences is [H, T] and the backward is one function with one signature.

The upper limit is TransformerEngine's; with older and newer versions PyTorch's own FlashAttention 2 is used.
"""


class FlashAttn:
    """The package."""

    is_deterministic = True

    def __init__(self, version: str) -> None:
        self.name = f"{DISTRIBUTION} {version}"

    def _library(self) -> Any:
        remedy = (
            f"reinstall it for PyTorch {torch.__version__}, or uninstall it: PyTorch's own FlashAttention 2 then takes "
            "its place"
        )
        return imported(self.name, MODULE, remedy)

    def forward_with(self, options: Options) -> Run:
        """The forward with these options, for one call or many: out, and lse [B, H, S_q] or [H, T]."""
        library, is_packed = self._library(), options.cu_seqlens_q is not None
        name = "_flash_attn_varlen_forward" if is_packed else "_flash_attn_forward"
        function, (left, right) = getattr(library, name, None), options.window_size
        if function is not None:
            return functools.partial(
                below_dispatcher(function),
                **options.offsets,
                dropout_p=0.0,
                softmax_scale=options.softmax_scale,
                causal=options.causal,
                window_size_left=left,
                window_size_right=right,
                softcap=0.0,
                alibi_slopes=None,
                return_softmax=False,
            )
        return functools.partial(
            library.flash_attn_varlen_func if is_packed else library.flash_attn_func,
            **options.offsets,
            **options.named("softmax_scale", "causal", "window_size"),
            return_attn_probs=True,
        )

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        options: Options,
    ) -> tuple[torch.Tensor, ...]:
        """Gradients of q, k and v."""
        gradients = (empty_like(q), empty_like(k), empty_like(v))
        library = self._library()
        is_dense = options.cu_seqlens_q is None
        function = library._flash_attn_backward if is_dense else library._flash_attn_varlen_backward
        below_dispatcher(function)(
            dout,
            q,
            k,
            v,
            out,
            lse,
            *gradients,
            **options.offsets,
            dropout_p=0.0,
            softmax_scale=options.softmax_scale,
            causal=options.causal,
            window_size_left=options.window_size[0],
            window_size_right=options.window_size[1],
            softcap=0.0,
            alibi_slopes=None,
            deterministic=options.deterministic,
        )
        return gradients


class PyTorch:
    """The operators used by PyTorch's scaled_dot_product_attention, which itself refuses calls that they support.

    The backward is deterministic only under torch.use_deterministic_algorithms, so this is not guaranteed.
    """

    is_deterministic = False
    name = "PyTorch's own FlashAttention 2"

    def forward_with(self, options: Options) -> Run:
        """The forward with these options, for one call or many: out, and lse [B, H, S_q] or [H, T]."""
        run, keywords = aten_forward, _keywords(options)
        arguments = (*_positions(options), 0.0, options.causal, False)
        return lambda q, k, v: run(q, k, v, *arguments, **keywords)

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        options: Options,
    ) -> tuple[torch.Tensor, ...]:
        """Gradients of q, k and v; the random state is only read with dropout."""
        state, unused = (torch.empty(shape, dtype=torch.uint64, device=q.device) for shape in ((2,), ()))
        gradients: tuple[torch.Tensor, ...] = aten_backward(
            dout, q, k, v, out, lse, *_positions(options), 0.0, options.causal, state, unused, **_keywords(options)
        )
        return gradients


def _positions(options: Options) -> tuple[torch.Tensor | None, torch.Tensor | None, int, int]:
    return options.cu_seqlens_q, options.cu_seqlens_k, options.max_seqlen_q, options.max_seqlen_k


def _keywords(options: Options) -> dict[str, float]:
    left, right = options.window_size
    return {"scale": options.softmax_scale, "window_size_left": left, "window_size_right": right}


@functools.lru_cache(maxsize=256)
def find(platform: Platform) -> FlashAttn | PyTorch:
    """The package if a suitable version is installed, otherwise PyTorch."""
    version = platform.version(DISTRIBUTION)
    if version is None:
        return PyTorch()
    is_blackwell = platform.compute_capability is not None and platform.compute_capability >= (10, 0)
    first = FIRST_VERSION_ON_BLACKWELL if is_blackwell else FIRST_VERSION
    return FlashAttn(version) if Version(first) <= Version(version) < Version(BELOW_VERSION) else PyTorch()
