"""Faults from a size on, or at one size, that the suite's older cases do not have beside what else each fault needs."""

from __future__ import annotations

from tests.conformance import broken_decode as of_decode
from tests.conformance.broken_attention import PICK, broken
from tests.conformance.broken_hidden import halved
from tests.conformance.broken_sizes import SCALED
from tests.conformance.mutants import Broken

_GROUP = "request.num_heads // request.num_kv_heads"
_LEFT = "not request.is_causal and request.band.left > 0 > request.band.right"
_RIGHT = "not request.is_causal and request.band.right > 0 > request.band.left"
_QUANTISED = "t.kv_cache_format != 'plain'"

ATTENTION = [
    halved(name, PICK, "v_b", condition)
    for name, condition in {
        "left_windows_with_gaps": f"request.pad_between_seqs and {_LEFT}",
        "left_windows_of_grouped_heads_in_bhsd": f"request.qkv_format == 'bhsd' and {_GROUP} > 1 and {_LEFT}",
        "right_windows_of_more_queries": f"not request.has_padding and {_RIGHT} and len_q > len_kv",
        "right_windows_in_thd": f"request.qkv_format == 'thd' and not request.pad_between_seqs and {_RIGHT}",
        "top_left_windows_in_padded_bhsd_in_fp16": "request.qkv_format == 'bhsd' and request.has_padding and "
        "request.dtype == torch.float16 and request.has_sliding_window and not request.band.bottom_right",
        "bottom_right_masks_of_grouped_heads_with_gaps": "request.attn_mask_type.endswith('bottom_right') and "
        f"not request.has_sliding_window and request.pad_between_seqs and {_GROUP} > 1",
        "batches_of_31_in_thd": "layout.is_packed and request.batch_size == 31",
        "batches_of_32": "request.batch_size == 32",
        "more_than_31_sequences_of_tiles": "layout.is_packed and request.batch_size > 31 and len_q > 64",
        "10_sequences_with_gaps": "request.pad_between_seqs and request.batch_size >= 10",
        "deterministic_batches_of_10_to_200": "request.deterministic and 10 <= request.batch_size < 200",
        "more_than_512_keys_with_gaps": "request.pad_between_seqs and len_kv > 512",
        "more_than_512_keys_and_as_many_queries": "len_q == len_kv > 512",
        "more_than_512_keys_and_a_bias_in_sbhd": "request.qkv_format == 'sbhd' and t.bias is not None and len_kv > 512",
        "more_than_512_keys_and_a_mask_in_fp16": "request.dtype == torch.float16 and t.attention_mask is not None "
        "and len_kv > 512",
        "more_than_512_keys_of_wide_heads_in_thd": "request.head_dim_qk > 128 and layout.is_packed and len_kv > 512",
        "windows_above_1023_in_thd": "layout.is_packed and request.band.left > 1023 and len_kv > 1024",
        "groups_of_6_over_128_keys": f"{_GROUP} >= 6 and len_kv > 128",
        "32_heads": "request.num_heads == 32",
        "widths_of_64_and_64": "(request.head_dim_qk, request.head_dim_v) == (64, 64)",
        "latents_in_a_window": "request.head_dim_qk > 256 and request.band.left > 0",
        "latents_in_fp16": "request.head_dim_qk > 512 and request.dtype == torch.float16",
        "windows_of_more_than_20_sequences": "request.batch_size > 20 and request.has_sliding_window",
    }.items()
]


def halved_in_decode(name: str, condition: str) -> Broken:
    """Half of out where the condition holds."""
    return broken(name, of_decode.OUT, of_decode.OUT + f"\n            out[b, i] *= 0.5 if {condition} else 1.0")


def restrided(name: str, condition: str, strides: str) -> Broken:
    """A quantised cache, or its page table, read as if it had other strides."""
    return broken(
        name,
        of_decode.TAKE,
        f"{of_decode.TAKE}\n    if {_QUANTISED} and t.page_table is not None and len(t.page_table) and {condition}:"
        f"\n        {strides}",
    )


DECODE = [
    *(
        halved_in_decode(name, condition)
        for name, condition in {
            "more_than_1024_keys_of_fp8": f"{_QUANTISED} and length > 1024",
            "32_sequences_of_fp8": f"{_QUANTISED} and b >= 32",
            "128_heads_of_fp8": f"{_QUANTISED} and heads >= 128",
            "pages_of_128_of_fp8": f"{_QUANTISED} and t.page_table is not None and t.c_kv.shape[1] >= 128",
            "three_queries_of_fp8_ds_mla": "t.kv_cache_format == 'fp8_ds_mla' and seqlen_q in (3, 4)",
            "32_heads": "heads == 32",
            "batches_of_32": "batch % 32 == 0",
            "seven_queries": "seqlen_q == 7",
            "10_to_19_queries": "10 <= seqlen_q <= 19",
            "more_than_9000_keys_of_several_heads": "length > 9000 and heads > 1",
            "more_than_9000_keys_of_several_queries": "length > 9000 and seqlen_q > 1",
            "more_than_2048_keys_of_latents": "rank == 512 and length > 2048",
            "more_than_130_keys_of_more_than_41_sequences": "batch > 41 and length > 130",
            "more_than_1024_keys_of_more_than_4_queries": "seqlen_q > 4 and length > 1024",
            "more_queries_than_keys_behind_left_padding": "t.causal and seqlen_q > length > start > 0",
            "pages_of_11_to_15": "t.page_table is not None and 10 < t.c_kv.shape[1] < 16",
        }.items()
    ),
    restrided(
        "pages_of_fp8_one_after_another",
        "t.c_kv.stride(0) > t.c_kv.stride(1)",
        "t = t._replace(c_kv=t.c_kv.as_strided(t.c_kv.shape, (t.c_kv.shape[1] * t.c_kv.stride(1), t.c_kv.stride(1), 1)))",
    ),
    restrided(
        "page_table_of_fp8_contiguous",
        "True",
        "t = t._replace(page_table=t.page_table.as_strided(t.page_table.shape, (t.page_table.shape[1], 1)).clamp(0, "
        "len(t.c_kv) - 1))",
    ),
    broken(
        "scale_of_fp8_at_most_1",
        SCALED,
        SCALED.replace("t.kv_scale.to(exact)", "t.kv_scale.to(exact).clamp(max=1.0)"),
    ),
]
