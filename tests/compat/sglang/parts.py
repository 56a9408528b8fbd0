"""An MLA layer of SGLang without its engine: the real pools, batches and forward methods, over a small cache.

Operators of SGLang that are compiled for a GPU are written out in PyTorch here: the write of new rows, the indices of a
prefix and the merge of two partial outputs. It is imported where ``host.use`` has been called.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.layers.attention import merge_state
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mha, forward_mla
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

from mla_plugin.compat import sglang as adapter
from mla_plugin.compat.sglang import releases

HAS = releases.installed()
NOPE, ROPE, V, RANK, HEADS = 16, 8, 24, 32, 3
SCALE = (NOPE + ROPE) ** -0.5
UNREAD = 3e4
"""Of rows that nobody wrote."""
UNREAD_BYTE = 0x7F
"""The same in e4m3: NaN."""


class Pool(MLATokenToKVPool):
    """SGLang's cache; its write of a row's two parts is a Triton kernel, which gets both in the cache's dtype."""

    def set_mla_kv_buffer(self, layer, loc, cache_k_nope, cache_k_rope):
        self.set_kv_buffer(layer, loc, torch.cat([cache_k_nope, cache_k_rope], -1), None)


def runner(
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = 64,
    requests: int = 8,
    kv_cache_dtype: torch.dtype | None = None,
    **changed: Any,
) -> Any:
    """What a backend sees of SGLang's ModelRunner: three pages or 192 tokens a request at most."""
    config = SimpleNamespace(kv_lora_rank=RANK, qk_rope_head_dim=ROPE, hf_config=SimpleNamespace(), context_len=192)
    pool = Pool(192 * requests, page_size, kv_cache_dtype or dtype, RANK, ROPE, 1, "cpu", False)
    pool.kv_buffer[0][page_size:] = UNREAD_BYTE if pool.store_dtype == torch.uint8 else UNREAD
    named = {"server_args": arguments(), "model_config": config, "token_to_kv_pool": pool, "device": "cpu"}
    named |= {"req_to_token_pool": ReqToTokenPool(requests, 192, "cpu", False), "use_mla_backend": True}
    named |= {"is_draft_worker": False, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype or dtype}
    return SimpleNamespace(**{**named, **changed})


def arguments(**changed: Any) -> Any:
    """What the adapter reads of SGLang's ServerArgs, as they are when nothing was asked for."""
    named = {"kv_cache_dtype": "auto", "speculative_algorithm": None, "speculative_eagle_topk": None}
    named |= {"speculative_draft_attention_backend": None, "attn_cp_size": 1, "dllm_algorithm": None}
    named |= {"attention_backend": adapter.NAME, "prefill_attention_backend": None, "decode_attention_backend": None}
    return SimpleNamespace(**{**named, **changed})


class Layer(forward_mha.DeepseekMHAForwardMixin, forward_mla.DeepseekMLAForwardMixin):
    """A DeepSeek layer's attention with SGLang's own forward methods, without norms, rope and the query's latents."""

    def __init__(
        self,
        dtype: torch.dtype = torch.bfloat16,
        page_size: int = 64,
        ranks: int = 1,
        rank: int = 0,
        kv_cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.dtype, self.page_size, self.kept = dtype, page_size, kv_cache_dtype or dtype
        self.runner = runner(dtype, page_size, kv_cache_dtype=kv_cache_dtype)
        with shared_by(ranks, rank):
            self.backend = adapter.create(self.runner)
        self.num_local_heads, self.qk_nope_head_dim, self.qk_rope_head_dim = HEADS, NOPE, ROPE
        self.v_head_dim, self.qk_head_dim, self.kv_lora_rank, self.layer_id = V, NOPE + ROPE, RANK, 0
        self.dcp_size = 1
        self.q_lora_rank = self.rotary_emb = self.next_skip_topk = None
        self.current_attention_backend, self.kv_cache_dtype = adapter.NAME, "auto"
        self.use_deep_gemm_bmm = self.disable_chunked_prefix_cache = self.use_nsa = self.use_dsa = False
        self.attn_mha = RadixAttention(HEADS, NOPE + ROPE, SCALE, HEADS, 0, v_head_dim=V)
        self.attn_mqa = RadixAttention(HEADS, RANK + ROPE, SCALE, 1, 0, v_head_dim=RANK)
        weight = torch.randn(HEADS, NOPE + V, RANK).to(dtype) * RANK**-0.5
        self.w_kc, self.w_vc = weight[:, :NOPE], weight[:, NOPE:].transpose(1, 2)
        self.weight = weight.flatten(0, 1)
        self.slots = torch.randperm(192 * 8 // page_size) + 1  # page 0 pads
        self.used = 0

    def _skip_rope_for_nsa_tilelang_fused(self) -> bool:
        return False

    _skip_rope_for_dsa_tilelang_fused = _skip_rope_for_nsa_tilelang_fused

    def q_proj(self, hidden: torch.Tensor) -> tuple[torch.Tensor]:
        return (hidden[:, : HEADS * (NOPE + ROPE)].contiguous(),)

    def kv_a_proj_with_mqa(self, hidden: torch.Tensor) -> tuple[torch.Tensor]:
        return (hidden[:, HEADS * (NOPE + ROPE) :].clone(),)

    def kv_a_layernorm(self, latents: torch.Tensor) -> torch.Tensor:
        return latents

    def kv_b_proj(self, latents: torch.Tensor) -> tuple[torch.Tensor]:
        return (latents @ self.weight.T,)

    def o_proj(self, out: torch.Tensor) -> tuple[torch.Tensor, None]:
        return out, None

    def add(self, index: int, length: int, written: int) -> torch.Tensor:
        """A request of this many tokens: slots for all of them, and the first ``written`` rows in the cache."""
        table = self.runner.req_to_token_pool.req_to_token
        table[index] = torch.randint(-(2**31), 2**31 - 1, table.shape[1:], dtype=torch.int32)  # behind it: anything
        pages = -(-length // self.page_size)
        own = self.slots[self.used : self.used + pages]
        self.used += pages
        slots = (own[:, None] * self.page_size + torch.arange(self.page_size)).flatten()[:length]
        table[index, :length] = slots.int()
        rows = torch.randn(length, RANK + ROPE).to(self.dtype)
        self.runner.token_to_kv_pool.set_kv_buffer(self.attn_mqa, slots[:written], rows[:written, None], None)
        return rows

    def batch(self, mode: ForwardMode, lengths: list[int], new: list[int], drafts: int = 0, pad: int = 0) -> Batch:
        """Requests of these lengths, of which the last ``new`` tokens are computed.

        Args:
            mode: of the step.
            lengths: keys of each request, the new tokens' included.
            new: new tokens of each.
            drafts: how many of the new ones are drafts, which SGLang does not count in ``seq_lens``.
            pad: rows of queries behind those of the requests.
        """
        indices = (torch.randperm(7)[: len(lengths)] + 1).tolist()
        rows = [
            self.add(index, length, length - count) for index, length, count in zip(indices, lengths, new, strict=True)
        ]
        table = self.runner.req_to_token_pool.req_to_token
        where = [table[index, n - count : n] for index, n, count in zip(indices, lengths, new, strict=True)]
        seq_lens = torch.tensor(lengths) - drafts
        prefix = [length - count for length, count in zip(lengths, new, strict=True)]
        on_device: dict[str, Any] = {}
        if mode.is_extend() and not drafts:
            on_device = {"extend_seq_lens": torch.tensor(new, dtype=torch.int32), "extend_seq_lens_cpu": new}
            on_device |= {"extend_prefix_lens": torch.tensor(prefix, dtype=torch.int32)}
            on_device |= {"extend_prefix_lens_cpu": prefix}
        forward_batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(lengths),
            input_ids=torch.zeros(sum(new) + pad, dtype=torch.int64),
            req_pool_indices=torch.tensor(indices),
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
            seq_lens_sum=int(seq_lens.sum()),
            out_cache_loc=torch.cat([*where, torch.zeros(pad, dtype=torch.int32)]).long(),
            spec_info=SimpleNamespace(draft_token_num=drafts) if drafts else None,
            **on_device,
        )
        if not HAS.batch_hook:
            forward_batch.attn_backend = self.backend
            forward_batch.token_to_kv_pool = self.runner.token_to_kv_pool
            forward_batch.req_to_token_pool = self.runner.req_to_token_pool
        return Batch(self, forward_batch, rows, new, pad)

    def expanded(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [t, H, nope + rope] and values [t, H, V] of cache rows, in float64."""
        both = (rows[:, :RANK].double() @ self.weight.double().T).view(-1, HEADS, NOPE + V)
        rope = rows[:, None, RANK:].double().expand(-1, HEADS, -1)
        return torch.cat([both[..., :NOPE], rope], -1), both[..., NOPE:]


class Batch:
    """A step's batch, its queries [T, H, nope + rope], and each request's rows [length, R + Dr]."""

    def __init__(self, layer: Layer, forward_batch: ForwardBatch, rows: list[torch.Tensor], new: list[int], pad: int):
        self.layer, self.forward_batch, self.rows, self.new, self.pad = layer, forward_batch, rows, new, pad
        self.q = torch.randn(sum(new), HEADS, NOPE + ROPE).to(layer.dtype)

    def hidden(self) -> torch.Tensor:
        """[T + pad, ...]: what the layer's projections make queries and rows of."""
        own = [row[len(row) - count :] for row, count in zip(self.rows, self.new, strict=True)]
        real = torch.cat([self.q.flatten(1), torch.cat(own)], 1)
        return torch.cat([real, torch.randn(self.pad, real.shape[1]).to(real.dtype)])

    def wanted(self, *, as_kept: tuple[bool, bool] = (True, True)) -> torch.Tensor:
        """[T, H * V], in float64.

        Args:
            as_kept: whether the prefix, and the new tokens, are read from the cache, in its dtype.
        """
        from tests.compat.float64 import attend

        parts = []
        for q, rows, count in zip(self.q.split(self.new), self.rows, self.new, strict=True):
            own = rows.split([len(rows) - count, count])
            seen = [x.to(self.layer.kept).float() if is_kept else x for x, is_kept in zip(own, as_kept, strict=True)]
            parts.append(attend(q, *self.layer.expanded(torch.cat(seen)), SCALE)[0])
        return torch.cat(parts).flatten(1)

    def expanded(self, method: AttnForwardMethod) -> torch.Tensor:
        """Through SGLang's own forward method of expanded keys: [T + pad, H * V]."""
        name = {AttnForwardMethod.MHA_ONE_SHOT: "one_shot", AttnForwardMethod.MHA_CHUNKED_KV: "chunked_kv"}[method]
        prepare = getattr(self.layer, f"forward_normal_{name}_prepare")
        core = getattr(self.layer, f"forward_normal_{name}_core")
        return core(*prepare(None, self.hidden(), self.forward_batch, None))

    def absorbed(self) -> torch.Tensor:
        """Through SGLang's own forward method of absorbed queries: [T + pad, H * V]."""
        q, latents = self.hidden().split([HEADS * (NOPE + ROPE), RANK + ROPE], 1)
        q_nope, q_pe = q.view(-1, HEADS, NOPE + ROPE).split([NOPE, ROPE], -1)
        q_nope_abs = torch.bmm(q_nope.transpose(0, 1), self.layer.w_kc).transpose(0, 1)
        k_nope, k_pe = latents[:, None, :RANK], latents[:, None, RANK:]
        core = self.layer.forward_absorb_core
        asked = inspect.signature(core).parameters
        given = {"q_pe": q_pe, "k_pe": k_pe, "q_nope_out": q_nope_abs, "k_nope": k_nope}
        given["forward_batch"] = self.forward_batch
        return core(**{name: given.get(name) for name in asked})


@contextlib.contextmanager
def shared_by(ranks: int, rank: int) -> Iterator[None]:
    """SGLang says that so many ranks share the cache, and which this is."""
    if not HAS.shared_cache:
        yield
        return
    from sglang.srt.runtime_context import get_parallel

    with get_parallel().override(dcp_enabled=ranks > 1, attn_dcp_size=ranks, attn_dcp_rank=rank):
        yield


@contextlib.contextmanager
def sglang_of(layer: Layer, chunk: int = 128 * 1024) -> Iterator[None]:
    """SGLang's surroundings of a forward, and its compiled operators; prefixes come in chunks of so many tokens."""

    def indices(self: ForwardBatch, *_: object) -> None:
        table = layer.runner.req_to_token_pool.req_to_token
        self.prefix_chunk_kv_indices = []
        for starts, lengths in zip(self.prefix_chunk_starts, self.prefix_chunk_seq_lens, strict=True):
            own = zip(self.req_pool_indices, starts, lengths, strict=True)
            self.prefix_chunk_kv_indices.append(torch.cat([table[i, at : at + n] for i, at, n in own]))

    def one_shot(self: ForwardBatch) -> torch.Tensor:
        table = layer.runner.req_to_token_pool.req_to_token
        return torch.cat([table[i, :n] for i, n in zip(self.req_pool_indices, self.seq_lens, strict=True)])

    with contextlib.ExitStack() as patches:
        for name, function in (
            ("prepare_chunked_kv_indices", indices),
            ("fetch_mha_one_shot_kv_indices", one_shot),
            ("get_max_chunk_capacity", lambda self: chunk),
        ):
            patches.enter_context(mock.patch.object(forward_batch_info.ForwardBatch, name, function))
        patches.enter_context(mock.patch.object(forward_mha, "merge_state_v2", merge, create=True))
        patches.enter_context(mock.patch.object(merge_state, "merge_state_triton", merge))
        if HAS.batch_hook:
            from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

            patches.enter_context(forward_context(ForwardContext(attn_backend=layer.backend)))
        yield


def merge(output, lse, other_output, other_lse, merged=None, merged_lse=None):
    """``merge_state``: outputs [T, H, D] over two sets of keys, by their natural log-sum-exp [T, H]."""
    assert lse.is_contiguous()
    merged, merged_lse = (torch.empty_like(x) if y is None else y for x, y in ((output, merged), (lse, merged_lse)))
    total = torch.logaddexp(lse.double(), other_lse.double())
    parts = ((output, lse), (other_output, other_lse))
    merged.copy_(sum(out.double() * (own.double() - total).exp()[..., None] for out, own in parts))
    merged_lse.copy_(total)
    return merged, merged_lse
