"""The core attention of a layer: Megatron's interface, computed by ``mla_plugin.attention``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

import mla_plugin
from mla_plugin.compat.megatron import ranks

_VARIANTS = (None, "gated_delta_net", *(["dsa"] if hasattr(DSAttention, "requires_dsa_inputs") else []))
"""Up to 0.18 a configuration with DSA hands the inputs of sparse attention to every layer; since, the spec decides."""

_COMPUTES: dict[str, tuple[tuple[Any, ...], str]] = {
    "softmax_type": (("vanilla",), "use TEDotProductAttention"),
    "experimental_attention_variant": (
        _VARIANTS,
        "sparse layers need their own core attention; dense layers next to DSA need megatron-core >= 0.19",
    ),
    "fp8_dot_product_attention": ((False,), "set it to False: the linear layers may still use fp8"),
    "fp8_multi_head_attention": ((False,), "set it to False: the linear layers may still use fp8"),
    "batch_invariant_mode": ((False,), "use TEDotProductAttention"),
}
"""Supported values of a configuration, and what to do about others."""

_MASKS_WITHOUT_TENSOR = ("causal", "causal_bottom_right", "no_mask")

_SHARPNESS = 2.0**20
"""Multiplied by this factor, the scores of n keys have a log-sum-exp within log(n) / 2**20 of their maximum."""


class MLACoreAttention(MegatronModule):  # type: ignore[misc]
    """Attention of one layer on the best installed backend; head_dim_qk and head_dim_v may differ.

    It has no parameters, so checkpoints are compatible with Megatron's own core attentions.

    Args:
        config: used are ``attention_dropout``, ``window_size``, ``window_attn_skip_freq``, ``deterministic_mode``,
            ``qk_clip`` and ``log_max_attention_logit``.
        layer_number: counts from 1; with ``window_attn_skip_freq`` it decides whether the window applies.
        attn_mask_type: default for the call's.
        attention_type: ``"self"`` or ``"cross"``; used only for packed sequences with context parallelism.
        attention_dropout: default ``config.attention_dropout``.
        softmax_scale: multiplies the scores; default head_dim_qk ** -0.5. MLA layers give theirs, with YaRN's factor.
        k_channels: not used; q and k show it.
        v_channels: head_dim_v. MLA layers give it; with None v is used as given.
        num_splits: not used; it divides work within a kernel.
        cp_comm_type: with ``context_parallel_size`` above 1 how K and V are exchanged: ``"p2p"`` (also for None),
            ``"all_gather"`` or ``"a2a"``. Layers give theirs from ``config.cp_comm_type``.
        pg_collection: its ``tp`` group, and with ``context_parallel_size`` above 1 its ``cp`` group; default the global
            ones, if there are any.

    Attributes:
        current_max_attn_logits: float32 (float64 for float64 inputs) [H], with ``qk_clip`` or
            ``log_max_attention_logit``: the largest scaled score of each head since Megatron's ``clip_qk`` last set it
            to None; otherwise None. One module therefore serves one number of heads.

    Raises:
        ValueError: the configuration has an unsupported option; the message names it and says what to do.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = "p2p",
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        for name, (accepted, advice) in _COMPUTES.items():
            given = getattr(config, name, accepted[0])
            if given not in accepted:
                values = " or ".join(map(repr, accepted))
                raise ValueError(f"MLACoreAttention: {name}={given!r}, expected {values}; {advice}")
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.attention_type = attention_type
        self.attention_dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale
        self.v_channels = v_channels
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window_size = config.window_size if has_window else None
        self.tp_group = (
            parallel_state.get_tensor_model_parallel_group(check_initialized=False)
            if pg_collection is None
            else pg_collection.tp
        )
        self.cp_group = ranks.group_of_layer(config, pg_collection)
        self.cp_comm_type = cp_comm_type or "p2p"
        if self.cp_group is not None:
            ranks.check_layer(self.cp_comm_type, self.attention_dropout)
        self.current_max_attn_logits: torch.Tensor | None = None
        self.register_load_state_dict_pre_hook(_drop_te_extra_state)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        num_splits: int | None = None,
    ) -> torch.Tensor:
        """Attention of this rank's heads, and with context parallelism of this rank's tokens.

        Args:
            query: [S_q, B, H, head_dim_qk], or [T_q, H, head_dim_qk] with ``packed_seq_params``.
            key: the same with S_kv or T_kv tokens and H_kv heads; H is a multiple of H_kv.
            value: key's shape with head_dim_v. Packed, its last dimension may be wider than ``v_channels``: the rest is
                zeros that Megatron appended, which are left out and get the gradient 0.
            attention_mask: bool, True = masked out, broadcastable to [B, H, S_q, S_kv]; used only for the mask types
                ``padding`` and ``arbitrary``, as in TransformerEngine.
            attn_mask_type: default the constructor's. Packed, ``causal`` means causal in each sequence.
            attention_bias: added to the scaled scores, broadcastable to [B, H, S_q, S_kv]; not for packed sequences.
            packed_seq_params: lengths of packed sequences, ``qkv_format="thd"``; offsets with padding and
                ``pad_between_seqs`` are followed. With context parallelism they are those of whole sequences, each
                padded to a multiple of twice the ranks. Its ``cp_group`` replaces the layer's for this call.
            num_splits: not used.

        Returns:
            [S_q, B, H * head_dim_v]; packed [T_q, H * head_dim_v], or [T_q, H, v_channels] where v came with zeros
            appended. Rows of padding between packed sequences are 0.

        Raises:
            ValueError: an argument is invalid or not supported; the message says what is expected.
            NoBackendError: no backend takes the request; the message lists every backend's reasons.
            ContextParallelError: the ranks call with different arguments, or one of them failed.
        """
        arguments = _packed(packed_seq_params) if packed_seq_params is not None else {"qkv_format": "sbhd"}
        mask_type = (attn_mask_type or self.attn_mask_type).name
        arguments |= _masked(mask_type, attention_mask, is_packed=packed_seq_params is not None)
        arguments |= {
            "softmax_scale": self.softmax_scale,
            "window_size": self.window_for(mask_type),
            "host": "megatron",
        }
        arguments |= self._shared_by_ranks(arguments, mask_type, packed_seq_params)
        native = self._native_width(value, is_packed=packed_seq_params is not None)
        if self.config.qk_clip or getattr(self.config, "log_max_attention_logit", False):
            if attention_bias is not None:
                raise ValueError("qk_clip and attention_bias together: the largest score would hold the bias")
            self._record_max_logits(query, key, native, arguments)
        if attention_bias is not None:
            arguments |= {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": attention_bias}
        dropout_p = self.attention_dropout if self.training else 0.0
        with self._dropout_of_this_rank() if dropout_p else contextlib.nullcontext():
            out = self._attend(
                query, key, native, dropout_p=dropout_p, deterministic=self.config.deterministic_mode, **arguments
            )
        out = cast(torch.Tensor, out)
        return out if native is not value else out.flatten(-2)

    def window_for(self, mask_type: str) -> tuple[int, int] | None:
        """The layer's window with such a mask: without a causal one TransformerEngine takes (-1, 0) for no window."""
        window: tuple[int, int] | None = self.window_size
        is_none = window is not None and tuple(window) == (-1, 0) and "causal" not in mask_type
        return None if is_none else window

    def _attend(self, *qkv: torch.Tensor, **arguments: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """``mla_plugin.attention``; its error also names the option by which Megatron set the environment variables."""
        try:
            return mla_plugin.attention(*qkv, **arguments)
        except mla_plugin.NoBackendError as error:
            chosen = self.config.attention_backend
            is_switched = any("NVTE_" in reason for entry in error.trace for reason in entry.reasons)
            if chosen is AttnBackend.auto or not is_switched:
                raise
            advice = (
                f"config.attention_backend is {chosen}, and Megatron-Core sets NVTE_FLASH_ATTN, NVTE_FUSED_ATTN and "
                "NVTE_UNFUSED_ATTN accordingly; AttnBackend.auto (--attention-backend auto) lets every backend run"
            )
            raise mla_plugin.NoBackendError(f"{error}\n{advice}", error.trace) from None

    def _shared_by_ranks(
        self, arguments: dict[str, Any], mask_type: str, packed_seq_params: PackedSeqParams | None
    ) -> dict[str, Any]:
        """The arguments that context parallelism adds or changes."""
        group = ranks.group_of_call(packed_seq_params, self.cp_group)
        if group is None:
            return {}
        ranks.check_mask(mask_type, is_packed=packed_seq_params is not None)
        shared = {"cp_group": group, "cp_comm_type": self.cp_comm_type}
        if packed_seq_params is not None and self.attention_type == "self":
            shared |= ranks.LENGTHS_OF_QUERIES
        return shared

    def _native_width(self, value: torch.Tensor, *, is_packed: bool) -> torch.Tensor:
        """v without the zeros that Megatron appended to a packed v, as a view; v itself if there are none."""
        width = value.shape[-1]
        if self.v_channels is None or width == self.v_channels:
            return value
        if not is_packed or width < self.v_channels:
            raise ValueError(
                f"value has head dimension {width} and this layer was built for v_channels={self.v_channels}; "
                "only packed sequences (qkv_format='thd') may bring more, zeros that Megatron appended"
            )
        # values can be read without a synchronisation on the CPU only
        if value.device.type == "cpu" and value[..., self.v_channels :].any():
            raise ValueError(
                f"value has head dimension {width}, this layer was built for {self.v_channels}, and what is beyond is "
                "not zero; give v_channels the true width"
            )
        return value[..., : self.v_channels]

    @torch.no_grad()
    def _record_max_logits(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: dict[str, Any]
    ) -> None:
        """Raise ``current_max_attn_logits`` to the largest scaled, visible score of each head.

        max(s) <= lse(c * s) / c <= max(s) + log(n) / c, so a forward with a sharpened scale gives the maximum through
        the log-sum-exp of whichever backend runs, under every mask and layout, in linear memory.
        """
        previous, num_heads = self.current_max_attn_logits, query.shape[-2]
        if previous is not None and len(previous) != num_heads:
            raise ValueError(
                f"query has {num_heads} heads and current_max_attn_logits holds the largest scores of {len(previous)}; "
                "build a MLACoreAttention for each number of heads, or set current_max_attn_logits to None"
            )
        softmax_scale = query.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        sharpened = {**arguments, "softmax_scale": softmax_scale * _SHARPNESS}
        _, lse = self._attend(query, key, value, return_lse=True, **sharpened)
        heads = 0 if arguments["qkv_format"] == "thd" else 1  # [H, T] or [B, H, S]
        rows = lse.transpose(0, heads).flatten(1)
        largest = rows.amax(1) / _SHARPNESS if rows.shape[1] else rows.new_full((num_heads,), -torch.inf)
        self.current_max_attn_logits = largest if previous is None else torch.maximum(previous, largest)

    @contextlib.contextmanager
    def _dropout_of_this_rank(self) -> Iterator[None]:
        """Use a separate dropout stream for each tensor-parallel rank, because ranks have different heads.

        Attention takes its seed from the CPU generator, which Megatron seeds alike on all ranks of a tensor-parallel
        group, restores for recomputation, and finds advanced alike on all ranks afterwards.
        """
        seed = int(torch.randint(2**62, ()))
        rank = 0 if self.tp_group is None else self.tp_group.rank()
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(seed + rank)
            yield


def _drop_te_extra_state(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Drop TransformerEngine's quantisation state, so that a checkpoint of its core attention loads strictly."""
    state_dict.pop(f"{prefix}_extra_state", None)


def _packed(params: PackedSeqParams) -> dict[str, Any]:
    """Arguments for packed sequences; lengths of k and v default to q's."""
    if params.qkv_format != "thd":
        raise ValueError(f"packed_seq_params.qkv_format={params.qkv_format!r}, expected 'thd'")
    arguments: dict[str, Any] = {"qkv_format": "thd"}
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        arguments[name] = getattr(params, name)
    for name in ("max_seqlen_q", "max_seqlen_kv"):
        longest = getattr(params, name)
        arguments[name] = None if longest is None else int(longest)
    if params.cu_seqlens_q_padded is not None:
        arguments["pad_between_seqs"] = getattr(params, "pad_between_seqs", None)
    return arguments


def _masked(mask_type: str, attention_mask: torch.Tensor | None, *, is_packed: bool) -> dict[str, Any]:
    """Arguments for a mask: its name, and for ``padding`` and ``arbitrary`` the mask tensor."""
    if is_packed or mask_type in _MASKS_WITHOUT_TENSOR:
        return {"attn_mask_type": mask_type}
    if mask_type not in ("padding", "arbitrary"):
        accepted = ", ".join((*_MASKS_WITHOUT_TENSOR, "padding, arbitrary"))
        raise ValueError(f"attn_mask_type={mask_type} without packed_seq_params, expected {accepted}")
    if attention_mask is None:
        raise ValueError(f"attn_mask_type={mask_type} needs attention_mask, bool, True = masked out")
    return {"attn_mask_type": "arbitrary", "attention_mask": attention_mask}
