"""What a caller says of a call beside its tensors."""

from __future__ import annotations

from typing import NamedTuple

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.mask import window_pair

HOSTS = ("direct", "transformer_engine", "transformers", "vllm", "sglang", "megatron")
"""Who may call: selection rules differ between hosts."""


class CallOptions(NamedTuple):
    """What a caller says of an attention call beside its tensors; ``AttentionRequest.of`` takes these by name.

    Attributes:
        qkv_format, attn_mask_type, window_size, bottom_right_diagonal, pad_between_seqs, lengths_may_differ, bias_type,
            bias_requires_grad, dropout_p, is_training, deterministic, return_lse, host: as in ``AttentionRequest``, in
            any spelling that it takes.
        max_seqlen_q, max_seqlen_kv: None for the tensors' extent.
    """

    qkv_format: str
    attn_mask_type: str
    window_size: tuple[int, int] | None
    bottom_right_diagonal: bool | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    pad_between_seqs: bool
    lengths_may_differ: bool
    bias_type: str
    bias_requires_grad: bool
    dropout_p: float
    is_training: bool
    deterministic: bool
    return_lse: bool
    host: str

    @classmethod
    def of(
        cls,
        tensors: AttentionTensors,
        *,
        qkv_format: str = "bshd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        pad_between_seqs: bool | None = None,
        lengths_may_differ: bool | None = None,
        bias_type: str = "no_bias",
        bias_requires_grad: bool | None = None,
        dropout_p: float = 0.0,
        is_training: bool | None = None,
        deterministic: bool = False,
        return_lse: bool = False,
        host: str = "direct",
    ) -> CallOptions:
        """The options of a call; where None is given, what its tensors say.

        Args:
            tensors: of the call.
            pad_between_seqs, lengths_may_differ, bias_requires_grad, is_training: None for what the tensors say.
            qkv_format, attn_mask_type, window_size, bottom_right_diagonal, max_seqlen_q, max_seqlen_kv, bias_type,
                dropout_p, deterministic, return_lse, host: as in ``mla_plugin.attention``.
        """
        return cls(
            qkv_format,
            attn_mask_type,
            None if window_size is None else window_pair(window_size),
            bottom_right_diagonal,
            max_seqlen_q,
            max_seqlen_kv,
            tensors.pads_between_sequences if pad_between_seqs is None else pad_between_seqs,
            tensors.lengths_may_differ if lengths_may_differ is None else lengths_may_differ,
            bias_type,
            getattr(tensors.bias, "requires_grad", False) if bias_requires_grad is None else bias_requires_grad,
            dropout_p,
            tensors.needs_gradient if is_training is None else is_training,
            deterministic,
            return_lse,
            host,
        )
