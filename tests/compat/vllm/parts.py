"""A layer of vLLM without its engine: the real metadata builder and implementation, over a small cache.

Compiled operators of vLLM that a prefill with context passes through are written out in PyTorch here: the gather from
the cache and the merge of two partial outputs. It is imported where ``host.use`` has been called.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from unittest import mock

import torch
from vllm.model_executor.layers.attention import mla_attention
from vllm.v1.attention.backend import CommonAttentionMetadata

from mla_plugin.compat.vllm import decode, prefill

NOPE, ROPE, V, RANK, PAGE = 16, 8, 24, 568, 16
"""Widths of a layer; vLLM's metadata ask for a head size of 576."""


class KVProjection(torch.nn.Module):
    """kv_b_proj: vLLM's linear layers return a pair."""

    def __init__(self, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(heads * (NOPE + V), RANK).to(dtype) * RANK**-0.5, False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ self.weight.T, None


class Layer:
    """One MLA layer of ``heads`` heads with its cache, and the builder of its metadata.

    The builder's workspace for context has 64 tokens, so that longer ones come in chunks.
    """

    def __init__(self, heads: int, dtype: torch.dtype, num_pages: int, speculative: int = 0) -> None:
        self.heads, self.dtype, self.scale = heads, dtype, (NOPE + ROPE) ** -0.5
        self.projection = KVProjection(heads, dtype)
        dims = {"q_lora_rank": None, "kv_lora_rank": RANK, "qk_nope_head_dim": NOPE}
        dims |= {"qk_rope_head_dim": ROPE, "v_head_dim": V}
        parallel = SimpleNamespace(
            decode_context_parallel_size=1, cp_kv_cache_interleave_size=1, prefill_context_parallel_size=1
        )
        parallel.dcp_kv_cache_interleave_size = 1
        named = SimpleNamespace(hf_text_config=SimpleNamespace(**dims), dtype=dtype, max_model_len=8)
        named.get_head_size = lambda: RANK + ROPE
        named.get_num_attention_heads = lambda _: heads
        speculation = SimpleNamespace(num_speculative_tokens=speculative, parallel_drafting=False, method="ngram")
        self.config = SimpleNamespace(
            model_config=named,
            parallel_config=parallel,
            scheduler_config=SimpleNamespace(max_num_seqs=1),
            cache_config=SimpleNamespace(block_size=PAGE, cache_dtype="auto", enable_prefix_caching=True),
            attention_config=SimpleNamespace(use_prefill_query_quantization=False, trtllm_ragged_backend=None),
            compilation_config=SimpleNamespace(static_forward_context={}),
            speculative_config=speculation if speculative else None,
            use_v2_model_runner=True,
        )
        with self.current():
            self.impl = decode.MLAPluginBackend.get_impl_cls()(
                heads, RANK + ROPE, self.scale, 1, None, None, "auto", None, "decoder", None,
                **dims, qk_head_dim=NOPE + ROPE, kv_b_proj=self.projection,
            )  # fmt: skip
            widths = (heads, self.scale, RANK, NOPE, ROPE, V)
            attention = SimpleNamespace(prefill_backend=prefill.MLAPluginPrefillBackend(*widths, self.config), **dims)
            attention.num_heads = heads
            self.config.compilation_config.static_forward_context["layer"] = attention
            spec = SimpleNamespace(block_size=PAGE, dtype=dtype)
            builder = decode.MLAPluginBackend.get_builder_cls()
            with mock.patch.object(
                mla_attention, "get_num_attention_heads_from_layers", return_value=heads, create=True
            ):
                self.builder = builder(spec, ["layer"], self.config, torch.device("cpu"))
        self.impl.dcp_world_size = 1
        wide = torch.full((num_pages, PAGE, RANK + ROPE + 8), torch.nan, dtype=dtype)
        self.cache = wide[..., : RANK + ROPE]  # rows that were never written are NaN

    @contextlib.contextmanager
    def current(self):
        """vLLM's configuration is this one."""
        with contextlib.ExitStack() as patches:
            for module in (mla_attention, decode):
                patches.enter_context(mock.patch.object(module, "get_current_vllm_config", return_value=self.config))
            yield

    def fill(self, lengths: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Random rows for requests of these lengths: their block table, and each one's rows [length, R + Dr]."""
        pages = torch.randperm(self.cache.shape[0], dtype=torch.int32)
        width = max(-(-length // PAGE) for length in lengths) + 1
        table = torch.randint(-(2**31), 2**31 - 1, (len(lengths), width), dtype=torch.int32)  # after a length: anything
        rows, used = [], 0
        for b, length in enumerate(lengths):
            count = -(-length // PAGE)
            table[b, :count] = pages[used : used + count]
            new = torch.randn(length, RANK + ROPE).to(self.dtype)
            for t in range(length):
                self.cache[table[b, t // PAGE], t % PAGE] = new[t]
            used += count
            rows.append(new)
        return table, rows

    def metadata(self, table: torch.Tensor, lengths: list[int], queries: list[int], causal: bool = True):
        """What vLLM's builder makes of a batch with so many query tokens of each request."""
        starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=seq_lens,
            num_reqs=len(lengths),
            num_actual_tokens=sum(queries),
            max_query_len=max(queries),
            max_seq_len=max(lengths),
            block_table_tensor=table,
            slot_mapping=torch.zeros(sum(queries), dtype=torch.int64),
            causal=causal,
            seq_lens_cpu_upper_bound=seq_lens,
        )
        with not_pinned():
            return self.builder.build(0, common)

    def absorbed(self, q_nope: torch.Tensor) -> torch.Tensor:
        """q_nope [T, H, nope] times W_UK."""
        w_uk = self.projection.weight.view(self.heads, NOPE + V, RANK)[:, :NOPE]
        return torch.einsum("thd,hdr->thr", q_nope, w_uk)

    def expanded(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [t, H, nope + rope] and values [t, H, V] of cache rows, in float64."""
        both = (rows[:, :RANK].double() @ self.projection.weight.double().T).view(-1, self.heads, NOPE + V)
        rope = rows[:, None, RANK:].double().expand(-1, self.heads, -1)
        return torch.cat([both[..., :NOPE], rope], -1), both[..., NOPE:]


@contextlib.contextmanager
def not_pinned():
    """vLLM pins memory for a device; there is none."""

    def without(function):
        def make(*given, pin_memory=False, **named):
            return function(*given, **named)

        return make

    with contextlib.ExitStack() as patches:
        for name in ("empty", "tensor", "zeros"):
            patches.enter_context(mock.patch.object(torch, name, without(getattr(torch, name))))
        patches.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda x: x))
        yield


def gather(src_cache, dst, block_table, cu_seq_lens, token_to_seq, num_tokens, kv_cache_dtype, scale, seq_starts):
    """``gather_and_maybe_dequant_cache``: rows seq_starts[b] .. of each request, side by side."""
    for token in range(int(num_tokens)):
        b = int(token_to_seq[token])
        position = token - int(cu_seq_lens[b]) + int(seq_starts[b])
        dst[token] = src_cache[block_table[b, position // PAGE], position % PAGE]


def mask_empty_context(lse, output, query_start_loc, context_start_loc):
    """The operator of this name, a Triton kernel of vLLM 0.26 and 0.27: requests without context in a chunk."""
    without = context_start_loc.diff() == 0
    rows = torch.repeat_interleave(without, query_start_loc.diff())
    output[rows], lse[:, rows] = 0, -torch.inf


def merge(
    output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None, prefill_tokens_with_context=None
):
    """``merge_attn_states``: outputs [T, H, D] over two sets of keys, by their log-sum-exp [H, T]."""
    tokens = prefill_tokens_with_context
    total = torch.logaddexp(prefix_lse.double(), suffix_lse.double())
    least = total.masked_fill(total.isneginf(), 0.0)
    parts = ((prefix_output, prefix_lse), (suffix_output, suffix_lse))
    merged = sum(out.double() * (lse.double() - least).exp().T[..., None] for out, lse in parts)
    if tokens is not None:  # after them no request has context
        merged[tokens:] = suffix_output[tokens:].double()
    output.copy_(merged)
    if output_lse is not None:
        output_lse.copy_(total)


@contextlib.contextmanager
def compiled_operators():
    """vLLM's compiled operators on the way of a prefill."""
    with (
        mock.patch.object(mla_attention.ops, "gather_and_maybe_dequant_cache", gather),
        mock.patch.object(mla_attention, "merge_attn_states", merge),
        mock.patch.object(mla_attention, "mask_empty_context", mask_empty_context, create=True),
    ):
        yield
