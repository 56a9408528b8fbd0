"""The arguments of a call other than its tensors."""

from __future__ import annotations

from typing import NamedTuple

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.mask import window_pair

HOSTS = ("direct", "transformer_engine", "transformers", "megatron")
"""The frameworks that call; selection rules differ between them."""
COMM_TYPES = ("p2p", "all_gather", "a2a")
"""How the ranks of a context-parallel group exchange K and V."""


class CallOptions(NamedTuple):
    """The arguments of an attention call other than its tensors; ``AttentionRequest.of`` takes them by name.

    Attributes:
        qkv_format, attn_mask_type, window_size, bottom_right_diagonal, bias_type, dropout_p, deterministic, return_lse,
            host, batch_invariant: as in ``mla_plugin.attention``, in any spelling that it accepts.
        max_seqlen_q, max_seqlen_kv: None for the tensors' extent.
        partial: as in ``AttentionRequest``.
        pad_between_seqs, lengths_may_differ, bias_requires_grad, is_training: as in ``AttentionRequest``; None:
            ``completed`` takes them from the tensors.
    """

    qkv_format: str = "bshd"
    attn_mask_type: str = "causal"
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    pad_between_seqs: bool | None = None
    lengths_may_differ: bool | None = None
    bias_type: str = "no_bias"
    bias_requires_grad: bool | None = None
    dropout_p: float = 0.0
    is_training: bool | None = None
    deterministic: bool = False
    return_lse: bool = False
    host: str = "direct"
    partial: bool = False
    batch_invariant: bool = False

    def completed(self, tensors: AttentionTensors) -> CallOptions:
        """A copy in which values that are None are taken from the tensors."""
        pads, differ = self.pad_between_seqs, self.lengths_may_differ
        bias, training = self.bias_requires_grad, self.is_training
        return self._replace(
            window_size=None if self.window_size is None else window_pair(self.window_size),
            pad_between_seqs=tensors.pads_between_sequences if pads is None else pads,
            lengths_may_differ=tensors.lengths_may_differ if differ is None else differ,
            bias_requires_grad=getattr(tensors.bias, "requires_grad", False) if bias is None else bias,
            is_training=tensors.needs_gradient if training is None else training,
        )
