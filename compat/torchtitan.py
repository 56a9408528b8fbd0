"""torchtitan: the attention backend ``mla_plugin``, for every language model of the library.

``mla_plugin.register("torchtitan")`` lets torchtitan's ``get_attention_config`` know the name, so that
``model_registry("16B", attn_backend="mla_plugin")`` builds layers whose ``inner_attention`` is ``PluginAttention``. To
torchtitan that is a ``VarlenAttention``, so its trainer describes documents by cumulative lengths; the dtype and the
widths of q, k and v stay. Selective activation checkpointing saves its outputs, as it does those of torchtitan's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from packaging.version import Version

try:
    import spmd_types as spmd
    from torchtitan.distributed import activation_checkpoint
    from torchtitan.distributed.utils import get_spmd_backend, is_in_batch_invariant_mode
    from torchtitan.models.common import config_utils
    from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
    from torchtitan.protocols.module import Module
except ImportError as error:
    raise ImportError(
        "mla_plugin.compat.torchtitan needs torchtitan >= 0.3 and what it depends on: pip install 'torchtitan>=0.3'"
    ) from error

import mla_plugin

NAME = "mla_plugin"
MINIMUM_VERSION = "0.3"

__all__ = ["MINIMUM_VERSION", "NAME", "PluginAttention", "register"]


class PluginAttention(VarlenAttention):  # type: ignore[misc]
    """Attention of one layer on the best installed backend, over documents side by side in each row."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):  # type: ignore[misc]
        """That of ``VarlenAttention``: ``window_size``."""

    def __init__(self, config: Config) -> None:
        Module.__init__(self)  # VarlenAttention's activates a FlashAttention of PyTorch
        self.window_size = config.window_size

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        out_transform: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The contract of ``VarlenAttention.forward``.

        Args:
            q: [B, S, H, head_dim_qk].
            k: [B, S, H_kv, head_dim_qk].
            v: [B, S, H_kv, head_dim_v]; q and k are cast to its dtype.
            attention_masks: cumulative lengths over the B S tokens, int32.
            scale: multiplies the scores; default head_dim_qk ** -0.5.
            out_transform: gets the output and its log-sum-exp [B, S, H], and gives what is returned.
            **kwargs: ``enable_gqa``, which the head counts say.

        Returns:
            [B, S, H, head_dim_v].

        Raises:
            TypeError: a mask of another kind, as FlexAttention has it.
        """
        if not isinstance(attention_masks, VarlenMetadata):
            raise TypeError(
                f"attention_masks is a {type(attention_masks).__name__}; {NAME} takes VarlenMetadata, as torchtitan "
                "makes it where every layer has attn_backend='mla_plugin' or 'varlen'"
            )
        is_causal = self.window_size[1] == 0
        with spmd.no_typecheck():
            result = mla_plugin.attention(
                *(x.to(v.dtype).flatten(0, 1) for x in (q, k, v)),
                qkv_format="thd",
                attn_mask_type="padding_causal" if is_causal else "padding",
                window_size=None if self.window_size in ((-1, 0), (-1, -1)) else tuple(self.window_size),
                cu_seqlens_q=attention_masks.cu_seq_q,
                cu_seqlens_kv=attention_masks.cu_seq_k,
                max_seqlen_q=attention_masks.max_q,
                max_seqlen_kv=attention_masks.max_k,
                softmax_scale=scale,
                return_lse=out_transform is not None,
                batch_invariant=is_in_batch_invariant_mode(),
            )
        out, lse = result if isinstance(result, tuple) else (result, None)
        if get_spmd_backend() == "spmd_types" and spmd.is_type_checking():
            _give_types_of_heads(q, out, lse)
        out = out.view(*q.shape[:-1], v.shape[-1]).to(q.dtype)
        if out_transform is None or lse is None:
            return out
        return out_transform(out, lse.transpose(0, 1).reshape(q.shape[:-1]))


def _give_types_of_heads(q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """The sharding of the queries, for torchtitan's check of it."""
    from spmd_types.runtime import get_partition_spec

    packed = q.flatten(0, 1)
    local, partition = spmd.get_local_type(packed), get_partition_spec(packed)
    spmd.assert_type(out, local, partition)
    if lse is not None:
        spmd.assert_type(lse, local, None if partition is None else spmd.PartitionSpec(partition[1], partition[0]))


def register() -> None:
    """Let torchtitan know the attention backend ``mla_plugin``; calling it again changes nothing.

    Raises:
        ImportError: torchtitan is older than 0.3.
    """
    found = version("torchtitan")
    if Version(found) < Version(MINIMUM_VERSION):
        raise ImportError(f"torchtitan {found} is installed, mla_plugin needs >= {MINIMUM_VERSION}")
    original = config_utils.get_attention_config
    if original.__module__ == __name__:
        return

    def get_attention_config(backend: str) -> Any:
        return PluginAttention.Config() if backend == NAME else original(backend)

    for name, module in list(sys.modules.items()):  # models import the function by its name
        if name.startswith("torchtitan.") and getattr(module, "get_attention_config", None) is original:
            module.get_attention_config = get_attention_config  # type: ignore[attr-defined]

    save_ops = activation_checkpoint._get_default_save_ops
    activation_checkpoint._get_default_save_ops = lambda: save_ops() | {torch.ops.mla_plugin.attention_forward.default}
