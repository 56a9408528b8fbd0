"""SGLang's attention backend: absorbed steps by ``mla_plugin.decode``, expanded ones by ``mla_plugin.attention``.

SGLang reads prefixes from the cache, multiplies by W_UK, W_UV and kv_b_proj, and merges chunks and ranks. Lengths and
pages stay on the device, so that its CUDA graphs hold decode and the verification of drafts.
"""

from __future__ import annotations

import logging
import math
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType

import mla_plugin
from mla_plugin.compat.sglang import refusals, releases
from mla_plugin.compat.sglang.extend import Extend

HAS = releases.installed()
FILL_LENGTH = 1
"""Of rows that pad a CUDA graph's batch: SGLang derives their positions from it, and all its MLA backends take 1."""

_logger = logging.getLogger("sglang.mla_plugin")


class Steps(NamedTuple):
    """A batch whose requests have equally many query tokens.

    Attributes:
        page_table: int32 [B, n].
        lengths: [B], keys in this rank's cache, the query tokens' included. Only the device knows them; all layers of
            the step have the same object, so that the first one plans for all.
    """

    page_table: torch.Tensor
    lengths: mla_plugin.DecodeLengths


class MLAPluginAttnBackend(AttentionBackend):  # type: ignore[misc]
    """Attention of a model's MLA layers."""

    needs_cpu_seq_lens: bool = False  # of decode and verification; a prefill always has them

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.kv_index_translator = getattr(runner, "kv_index_translator", None)  # SGLang 0.5.20 reads prefixes by it
        self.forward_metadata: Any = None  # Steps or Extend of the step; SGLang's name
        config = runner.model_config
        self._rank, self._rope = config.kv_lora_rank, config.qk_rope_head_dim
        self._page_size = self.token_to_kv_pool.page_size
        self._ranks, self._own_rank = _sharing()
        self._slots = self._page_size * self._ranks  # a page holds every n-th of so many slots
        self._max_length = self.req_to_token_pool.req_to_token.shape[1]
        self._is_shared = refusals.is_of_one_half(runner.server_args)
        self._format: dict[str, Any] = {}
        if runner.kv_cache_dtype == refusals.QUANTISED:  # SGLang casts numbers to e4m3: they have no scale
            self._format = {"kv_cache_format": "fp8", "kv_scale": torch.ones((), device=runner.device)}
        _logger.info("mla-plugin %s computes MLA attention.", mla_plugin.__version__)

    # metadata of a step

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Metadata of a step without a CUDA graph."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self.forward_metadata = None
        elif mode.is_decode() or mode.is_target_verify():
            drafts = self._drafts(mode, forward_batch.spec_info)
            table = self._pages(forward_batch.req_pool_indices, self._max_length)
            lengths = self._own_lengths(forward_batch.seq_lens, drafts)
            self.forward_metadata = Steps(table, mla_plugin.DecodeLengths(seqlens_kv=lengths))
        elif mode.is_extend_without_speculative():
            self.forward_metadata = Extend(forward_batch)
        else:
            raise NotImplementedError(
                f"mla-plugin cannot compute a step of {mode.name}; drafts are computed by the backend of "
                "--speculative-draft-attention-backend"
            )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Buffers that all graphs of decode and verification read."""
        slots, pages = self.req_to_token_pool.req_to_token, math.ceil(self._max_length / self._slots)
        table = slots.new_zeros((max_bs, pages), dtype=torch.int32)
        self._graph = (table, slots.new_zeros(max_bs, dtype=torch.int32))

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Metadata of a captured or replayed step, where ``releases.Has.batch_hook``."""
        mode, batch = forward_batch.forward_mode, forward_batch.batch_size
        if mode.is_decode_or_idle() or mode.is_target_verify():
            drafts = self._drafts(mode, forward_batch.spec_info)
            self._fill(forward_batch.req_pool_indices[:batch], forward_batch.seq_lens[:batch], drafts)
        elif in_capture:
            raise NotImplementedError(
                "mla-plugin cannot capture a whole prefill, whose lengths it reads on the host; pass "
                "--cuda-graph-backend-prefill disabled"
            )
        else:
            self.init_forward_metadata(forward_batch)

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None,
        forward_mode: Any,
        spec_info: Any,
    ) -> None:
        """Metadata of a captured step, where there is no ``batch_hook``."""
        self._fill(req_pool_indices[:bs], seq_lens[:bs], self._drafts(forward_mode, spec_info))

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_sum: int,
        encoder_lens: torch.Tensor | None,
        forward_mode: Any,
        spec_info: Any,
        seq_lens_cpu: torch.Tensor | None,
    ) -> None:
        """Metadata of a replayed step, where there is no ``batch_hook``."""
        self._fill(req_pool_indices[:bs], seq_lens[:bs], self._drafts(forward_mode, spec_info))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of rows that pad a graph's batch."""
        return FILL_LENGTH

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Nothing is derived from the drafts' mask or positions: drafts are chains."""

    # layers

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Absorbed attention of one query token a request; the host reads nothing of the device.

        Args:
            q: [T, H, R] with ``q_rope`` [T, H, Dr]; or both side by side, [T, H, R + Dr].
            k: [T, 1, R] with ``k_rope`` [T, 1, Dr]; or both side by side; or None. Written to the cache first.
            v: not used: the first R columns of the cache.
            layer: the ``RadixAttention``; H counts the heads of all ranks that share the cache.
            forward_batch: of the step.
            save_kv_cache: False: the cache has the new tokens' rows.
            q_rope, k_rope: see q and k.
            others: what SGLang passes to other backends; anything but None is refused.

        Returns:
            [T, H * R]; where ranks share the cache also the log-sum-exp, float32 [T, H], to base 2 as SGLang merges it.

        Raises:
            NotImplementedError: a layer that is not plain attention.
        """
        self._check_layer(layer, others)
        self._save(k, v, k_rope, layer, forward_batch, save_kv_cache)
        steps = self.forward_metadata
        batch = len(steps.lengths)
        q_nope_abs, q_rope = self._parts(q, q_rope, layer)
        if q_nope_abs.shape[0] % batch:
            raise ValueError(f"{q_nope_abs.shape[0]} query tokens of {batch} requests; equally many of each are needed")
        shape = (batch, q_nope_abs.shape[0] // batch)
        result = mla_plugin.decode(
            q_nope_abs.unflatten(0, shape),
            q_rope.unflatten(0, shape),
            self._cache(layer),
            softmax_scale=layer.scaling,
            page_table=steps.page_table,
            seqlens_kv=steps.lengths,
            return_lse=self._ranks > 1,
            **self._format,
        )
        if isinstance(result, tuple):
            out, lse = result
            lse = lse.transpose(1, 2).reshape(-1, layer.tp_q_head_num)
            return out.reshape(q_nope_abs.shape[0], -1), lse * math.log2(math.e)
        return result.reshape(q_nope_abs.shape[0], -1)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of several query tokens a request, causal.

        Expanded, q is [T, H, head_dim_qk], and k and v [S, H, ...] are the new tokens, the prefix and them
        (``forward_batch.mha_one_shot``), or a chunk of the prefix (``attn_attend_prefix_cache``). Absorbed, the
        arguments are those of ``forward_decode``: the verification of drafts, and prefills that SGLang captures.

        Returns:
            [T, H * head_dim_v]; with ``forward_batch.mha_return_lse`` (out [T, H, head_dim_v], lse [T, H]), natural
            log, float32. Rows that pad the batch are 0.

        Raises:
            NotImplementedError: a layer that is not plain attention.
        """
        if forward_batch.forward_mode.is_target_verify():
            parts = {"q_rope": q_rope, "k_rope": k_rope}
            return self.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **parts, **others)
        self._check_layer(layer, others)
        if getattr(forward_batch, "attn_cp_metadata", None) is not None:
            raise NotImplementedError("mla-plugin has no context parallelism of the prefill: leave it out")
        if layer.v_head_dim == self._rank and layer.head_dim == self._rank + self._rope:
            self._save(k, v, k_rope, layer, forward_batch, save_kv_cache)
            return self._absorbed(q, q_rope, layer, forward_batch)
        if k is None or v is None or save_kv_cache:
            raise NotImplementedError(
                f"layer {layer.layer_id} gives expanded keys to save; the cache holds compressed ones"
            )
        return self._expanded(q, k, v, layer, forward_batch)

    def _expanded(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        extend = self.forward_metadata
        mask, cu_kv, max_kv, keys = "padding_causal", extend.cu_new, extend.max_new, extend.tokens
        if forward_batch.attn_attend_prefix_cache:
            chunk = forward_batch.prefix_chunk_idx
            mask, cu_kv = "padding", forward_batch.prefix_chunk_cu_seq_lens[chunk]
            max_kv, keys = forward_batch.prefix_chunk_max_seq_lens[chunk], k.shape[0]
        elif forward_batch.mha_one_shot:
            mask, cu_kv = "padding_causal_bottom_right", extend.cu_all
            max_kv, keys = extend.max_all, extend.all_tokens
        rows, heads = q.shape[0], layer.tp_q_head_num
        result = mla_plugin.attention(
            q.view(rows, heads, layer.head_dim)[: extend.tokens],
            k.view(-1, heads, layer.head_dim)[:keys],
            v.view(-1, heads, layer.v_head_dim)[:keys],
            softmax_scale=layer.scaling,
            qkv_format="thd",
            attn_mask_type=mask,
            cu_seqlens_q=extend.cu_new,
            cu_seqlens_kv=cu_kv,
            max_seqlen_q=extend.max_new,
            max_seqlen_kv=max_kv,
            return_lse=bool(forward_batch.mha_return_lse),
        )
        if isinstance(result, tuple):
            out, lse = result
            return _padded(out, rows), _padded(lse.T, rows).contiguous()
        return _padded(result, rows).reshape(rows, -1)

    def _absorbed(self, q: torch.Tensor, q_rope: torch.Tensor | None, layer: Any, forward_batch: Any) -> torch.Tensor:
        if self._ranks > 1:
            raise NotImplementedError(
                f"an absorbed prefill over a cache that {self._ranks} ranks share; let prefixes be expanded: leave out "
                "--disable-chunked-prefix-cache"
            )
        extend = self.forward_metadata
        blocks = extend.blocks
        if extend.page_table is None:
            pages = self._pages(forward_batch.req_pool_indices, extend.max_all)
            extend.page_table = pages[blocks.owners]
        q_nope_abs, q_rope = self._parts(q, q_rope, layer)
        out: torch.Tensor = mla_plugin.decode(  # type: ignore[assignment]
            q_nope_abs[blocks.rows],
            q_rope[blocks.rows],
            self._cache(layer),
            softmax_scale=layer.scaling,
            page_table=extend.page_table,
            seqlens_kv=blocks.lengths,
            **self._format,
        )
        return _padded(out.flatten(0, 1)[blocks.places], q.shape[0]).reshape(q.shape[0], -1)

    def _check_layer(self, layer: Any, others: dict[str, Any]) -> None:
        refused = [
            f"{name}={value!r}"
            for name, value, is_taken in (
                ("logit_cap", layer.logit_cap, not layer.logit_cap),
                ("sliding_window_size", layer.sliding_window_size, layer.sliding_window_size in (None, -1)),
                ("is_cross_attention", layer.is_cross_attention, not layer.is_cross_attention),
                ("attn_type", layer.attn_type, layer.attn_type == AttentionType.DECODER),
            )
            if not is_taken
        ]
        refused += [name for name, value in others.items() if value is not None]
        if refused:
            raise NotImplementedError(
                f"mla-plugin cannot compute layer {layer.layer_id}, which asks for {', '.join(refused)}; expected "
                "plain causal attention"
            )
        if self._format and self._is_shared and layer.k_scale_float not in (None, 1.0):
            raise NotImplementedError(
                f"layer {layer.layer_id} has k_scale={layer.k_scale_float}, and prefill and decode have different "
                "backends; expected 1: some write numbers divided by it into the cache, SGLang's layers and mla-plugin "
                f"as they are: give both to {refusals.NAME}"
            )

    # the cache

    def _cache(self, layer: Any) -> torch.Tensor:
        """[pages, page_size, R + Dr]"""
        slots: torch.Tensor = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        return slots.view(-1, self._page_size, slots.shape[-1])

    def _parts(self, q: torch.Tensor, q_rope: torch.Tensor | None, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(q_nope_abs [T, H, R], q_rope [T, H, Dr])"""
        heads = layer.tp_q_head_num
        if q_rope is not None:
            return q.view(-1, heads, self._rank), q_rope.view(-1, heads, self._rope)
        q_nope_abs, q_rope = q.view(-1, heads, self._rank + self._rope).split((self._rank, self._rope), -1)
        return q_nope_abs, q_rope

    def _save(self, k: Any, v: Any, k_rope: Any, layer: Any, forward_batch: Any, save: bool) -> None:
        if not save or k is None:
            return
        if k_rope is None:
            self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        else:
            self.token_to_kv_pool.set_mla_kv_buffer(layer, forward_batch.out_cache_loc, k, k_rope)

    @staticmethod
    def _drafts(mode: Any, spec_info: Any) -> int:
        """Tokens that a verification appends to each request's length; an idle rank's batch does not say it."""
        if not mode.is_target_verify():
            return 0
        if (topk := getattr(spec_info, "topk", 1)) > 1:
            raise NotImplementedError(
                f"{topk} drafts for a token, expected 1: a tree of drafts has a mask, and the kernels have none; pass "
                "--speculative-eagle-topk 1"
            )
        return int(getattr(spec_info, "draft_token_num", 0))

    def _pages(self, req_pool_indices: torch.Tensor, max_length: int) -> torch.Tensor:
        """int32 [B, n]: the pages of requests, from the slot of each page's first token."""
        slots: torch.Tensor = self.req_to_token_pool.req_to_token[:, : max_length : self._slots]
        return slots.index_select(0, req_pool_indices).floor_divide_(self._slots)

    def _own_lengths(self, seq_lens: torch.Tensor, drafts: int) -> torch.Tensor:
        """int32 [B], of the keys in this rank's cache: token t is on rank t % n."""
        lengths = (seq_lens + drafts).int()
        if self._ranks == 1:
            return lengths
        return lengths // self._ranks + (lengths % self._ranks > self._own_rank)

    def _fill(self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, drafts: int) -> None:
        """Write a step into the graphs' buffers."""
        page_table, lengths = (buffer[: len(seq_lens)] for buffer in self._graph)
        page_table.copy_(self._pages(req_pool_indices, self._max_length))
        lengths.copy_(self._own_lengths(seq_lens, drafts))
        self.forward_metadata = Steps(page_table, mla_plugin.DecodeLengths(seqlens_kv=lengths))


def _sharing() -> tuple[int, int]:
    """Ranks that share the cache, and which of them this is."""
    if not HAS.shared_cache:
        return 1, 0
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().attn_dcp_size, get_parallel().attn_dcp_rank


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x [T, ...] with rows of 0 after it: of an lse too, because SGLang's merge makes NaN of two that are -inf."""
    if x.shape[0] == rows:
        return x
    padded = x.new_zeros((rows, *x.shape[1:]))
    padded[: x.shape[0]] = x
    return padded
