"""Faults that hid until the suite had real and odd sizes beside every feature, a backward without its forward, features in
two threads, requests from any host and platform, and calls whose lengths and scale vary.
"""

from __future__ import annotations

from dataclasses import replace

from tests.conformance import broken_decode as of_decode
from tests.conformance.broken_attention import (
    ACCEPT,
    DLSE,
    DQ,
    GROUPS,
    LENGTHS,
    PICK,
    REQUEST,
    REQUEST_B,
    STARTS,
    SUM,
    broken,
)
from tests.conformance.broken_hidden import halved
from tests.conformance.broken_unseen import INVARIANT, SCORE_GRADIENTS, TILE, with_feature
from tests.conformance.broken_wider import halved_in_decode
from tests.conformance.mutants import Broken

_LEFT, _RIGHT = "256 <= request.band.left < 10000", "request.band.right >= 64"
_BEYOND = "layout.is_packed and request.max_seqlen_q > t.q.shape[0]"
_GROUP_OF_8 = "request.num_heads >= 8 * request.num_kv_heads"
_LATENTS = "request.head_dim_qk > 256"
_MANY_HEADS = "request.num_heads > 64"
REASONS = "    reasons = tuple(refusals(request))\n"
EXP = "        weights = (scores - top).exp()\n"
FORWARD_MARK = "    CACHE[t.q.data_ptr(), t.q.shape, t.k.data_ptr()] = True\n"


def shared_by_threads(name: str, line: str, what: str, condition: str) -> Broken:
    """A value goes through memory of the process where the condition holds."""
    indent = line[: len(line) - len(line.lstrip())]
    more = (
        f"if {condition}:",
        f"    globals()['shared'] = {what}",
        "    torch.zeros(300_000).exp_()",
        f"    {what} = globals()['shared']",
    )
    return broken(f"threads_share_{name}", line, "\n".join((line.rstrip(), *(indent + x for x in more))) + "\n")


ATTENTION = [
    *(
        halved(name, PICK, "v_b", condition)
        for name, condition in {
            "long_left_windows_in_bhsd": f"request.qkv_format == 'bhsd' and {_LEFT}",
            "long_left_windows_with_gaps": f"request.pad_between_seqs and {_LEFT}",
            "long_left_windows_of_wide_heads": f"request.head_dim_qk >= 128 and {_LEFT}",
            "long_left_windows_of_many_heads": f"request.num_heads > 8 and {_LEFT}",
            "long_windows_with_a_bias": f"t.bias is not None and {_LEFT}",
            "long_deterministic_windows": f"request.deterministic and {_LEFT}",
            "right_windows_of_a_tile_in_sbhd": f"request.qkv_format == 'sbhd' and {_RIGHT}",
            "right_windows_of_a_tile_with_gaps": f"request.pad_between_seqs and {_RIGHT}",
            "max_seqlen_beyond_a_causal_mask": f"{_BEYOND} and request.is_causal",
            "max_seqlen_beyond_in_fp16": f"{_BEYOND} and request.dtype == torch.float16",
            "max_seqlen_beyond_with_gaps": f"request.pad_between_seqs and {_BEYOND}",
            "more_than_256_queries_of_192": "request.head_dim_qk == 192 and len_q > 256",
            "more_than_256_queries_of_128": "request.head_dim_qk == 128 and len_q > 256",
            "more_than_256_queries_of_many_heads": "request.num_heads > 8 and len_q > 256",
            "more_than_256_queries_in_fp64": "request.dtype == torch.float64 and len_q > 256",
            "more_than_256_queries_with_gaps": "request.pad_between_seqs and len_q > 256",
            "more_than_256_queries_of_groups_of_8": f"{_GROUP_OF_8} and len_q > 256",
            "more_than_512_keys_of_128": "request.head_dim_qk == 128 and len_kv > 512",
            "more_than_512_keys_of_256": "request.head_dim_qk == 256 and len_kv > 512",
            "more_than_512_keys_of_groups_of_8": f"{_GROUP_OF_8} and len_kv > 512",
            "more_than_1024_keys_with_gaps": "request.pad_between_seqs and len_kv > 1024",
            "whole_tiles_of_queries_with_gaps": "request.pad_between_seqs and len_q and len_q % 64 == 0",
            "whole_tiles_of_128_wide_heads": "request.head_dim_qk == 128 and len_q and not (len_q % 64 or len_kv % 64)",
            "one_query_beyond_a_tile_with_gaps": "request.pad_between_seqs and len_q > 64 and len_q % 64 == 1",
            "128_heads_of_192": "request.num_heads == 128 and request.head_dim_qk == 192",
            "128_heads_of_128": "request.num_heads == 128 and request.head_dim_qk == 128",
            "many_heads_and_a_strided_v": f"{_MANY_HEADS} and not t.v.is_contiguous()",
            "many_heads_in_fp64": f"{_MANY_HEADS} and request.dtype == torch.float64",
            "many_heads_with_gaps": f"{_MANY_HEADS} and request.pad_between_seqs",
            "many_heads_with_a_bias": f"{_MANY_HEADS} and t.bias is not None",
            "many_heads_and_tiles": f"{_MANY_HEADS} and len_q > 64",
            "many_heads_and_an_unaligned_q": f"{_MANY_HEADS} and t.q.storage_offset() % 8",
            "latents_with_padding": f"{_LATENTS} and request.has_padding and not layout.is_packed",
            "latents_with_gaps": f"{_LATENTS} and request.pad_between_seqs",
            "latents_deterministic": f"{_LATENTS} and request.deterministic",
            "latents_of_four_sequences": f"{_LATENTS} and b >= 4",
            "latents_with_a_bias": f"{_LATENTS} and t.bias is not None",
            "latents_and_a_strided_k": f"{_LATENTS} and not t.k.is_contiguous()",
            "scale_above_1_with_gaps": "request.pad_between_seqs and t.softmax_scale > 1",
            "scale_above_1_in_a_window": "request.has_sliding_window and t.softmax_scale > 1",
            "lead_gaps_and_many_keys": "request.pad_between_seqs and t.cu_seqlens_kv_padded[0] > 0 and len_kv > 128",
            "lead_gaps_in_fp64": "request.pad_between_seqs and exact == torch.float64 and t.cu_seqlens_q_padded[0] > 0",
            "groups_of_8_in_fp64": f"{_GROUP_OF_8} and request.dtype == torch.float64",
            "groups_of_8_of_many_sequences": f"{_GROUP_OF_8} and b > 8",
            "unaligned_v_of_whole_tiles": "t.v.storage_offset() % 8 and len_kv and len_kv % 64 == 0",
            "widths_of_48": "request.head_dim_qk == 48",
            "widths_of_112": "request.head_dim_qk == 112",
            "widths_of_224": "request.head_dim_qk == 224",
            "widths_of_512": "request.head_dim_qk == request.head_dim_v == 512",
            "24_heads": "request.num_heads == 24",
            "groups_of_12": "request.num_heads == 12 * request.num_kv_heads",
            "seven_sequences": "request.batch_size == 7",
            "batches_of_24": "request.batch_size == 24",
            "96_keys": "len_kv == 96",
            "112_queries": "len_q == 112",
            "48_tokens": "len_q == len_kv == 48",
        }.items()
    ),
    replace(
        broken("backward_needs_its_own_forward", REQUEST_B, REQUEST_B + FORWARD_MARK.replace(" = True", "")),
        before=((REQUEST, REQUEST + FORWARD_MARK),),
    ),
    replace(
        broken(
            "backward_needs_a_forward_of_its_request",
            REQUEST_B,
            REQUEST_B + "    CACHE[request.batch_size, t.q.shape]\n",
        ),
        before=((REQUEST, REQUEST + "    CACHE[request.batch_size, t.q.shape] = True\n"),),
    ),
    shared_by_threads("grouped_gradients", GROUPS, "dk_b", "group > 1"),
    shared_by_threads("score_gradients_of_a_bias", SCORE_GRADIENTS, "ds", "dbias is not None"),
    shared_by_threads("starts", STARTS, "starts", "padded is not None"),
    shared_by_threads("lengths_of_padded_rows", LENGTHS, "lengths", "request.qkv_format != 'thd'"),
    shared_by_threads("weights_of_many_keys", EXP, "weights", "scores.shape[-1] > 128"),
    shared_by_threads("weights_in_fp16", EXP, "weights", "request.dtype == torch.float16"),
    shared_by_threads("weights_of_inference", EXP, "weights", "not request.is_training"),
    shared_by_threads("delta_of_lse", DLSE, "delta", "True"),
    shared_by_threads("deterministic_dq", DQ, "dq_b", "request.deterministic"),
    broken("lengths_are_kept_in_a_table", LENGTHS, LENGTHS + "\n    CACHE.setdefault(('kept', *lengths), cu.clone())"),
    broken(
        "scales_are_kept_in_a_table",
        REQUEST,
        REQUEST + "    CACHE.setdefault(t.softmax_scale, torch.tensor(t.softmax_scale))\n",
    ),
    broken(
        "blind_queries_of_the_first_call",
        SUM,
        SUM + "\n        blind = bool((total == 0).any())"
        "\n        if not CACHE.setdefault(('blind', request), blind) and blind:"
        "\n            result = result.masked_fill(total == 0, torch.nan)",
    ),
    broken(
        "no_empty_sequence_as_in_the_first_call",
        LENGTHS,
        LENGTHS + "\n    assert CACHE.setdefault(('empty', request), 0 in lengths) or 0 not in lengths",
    ),
    broken("select_prints", REASONS, REASONS + "    print('selected')\n"),
    broken("select_sets_a_variable", REASONS, REASONS + "    __import__('os').environ['SAMPLE_SELECT'] = '1'\n"),
    *(
        broken(name, REASONS, f"{REASONS}    import os\n    {statement}\n")
        for name, statement in {
            "select_sets_a_variable_by_default": "os.environ.setdefault('SAMPLE_SELECT', '1')",
            "answer_without_a_variable": "reasons += ('no PATH',) * ('PATH' not in os.environ)",
            "answer_by_a_variable_out_of_sight": "reasons += ('PATH=0',) * (os.environ._data.get(b'PATH') == b'0')",
            "answer_by_a_variable_in_bytes": "reasons += ('PATH=0',) * (os.environb.get(b'PATH') == b'0')",
            "answer_by_a_variable_every_other_time": "BEFORE.append(0)\n"
            "    reasons += ('OFF=1',) * (len(BEFORE) % 2 == 1 and os.getenv('SAMPLE_OFF') == '1')",
        }.items()
    ),
    broken("select_sets_threads", REASONS, REASONS + "    torch.set_num_threads(3)\n"),
    broken(
        "select_widens_the_window",
        REASONS,
        REASONS + "    if request.has_sliding_window and not request.is_causal:\n"
        "        object.__setattr__(request, 'window_size', (-1, -1))\n        vars(request).pop('band', None)\n",
    ),
    broken(
        "forward_widens_the_window",
        REQUEST,
        REQUEST + "    if request.has_sliding_window and not request.is_causal:\n"
        "        object.__setattr__(request, 'window_size', (-1, -1))\n        vars(request).pop('band', None)\n",
    ),
    *(
        broken(f"select_raises_{name}", REASONS, REASONS + f"    assert {condition}\n")
        for name, condition in {
            "for_a_qkv_layout": "request.qkv_layout is None",
            "on_a_gpu": "platform.compute_capability is None",
            "for_split_sums": "request.num_splits == 1",
            "for_pages": "request.page_size is None",
        }.items()
    ),
    replace(
        broken(
            "reason_of_another_width",
            ACCEPT,
            "    reasons = ('head_dim_qk=320 > 256',) if request.qkv_format == 'thd' else reasons\n" + ACCEPT,
        ),
        refuses_more=True,
    ),
    replace(
        broken(
            "reason_of_another_layout",
            ACCEPT,
            "    reasons = (\"qkv_format='thd', expected 'bshd'\",) if request.qkv_format == 'sbhd' else reasons\n"
            + ACCEPT,
        ),
        refuses_more=True,
    ),
    *(
        with_feature(
            broken(
                f"invariant_tiles_by_batch_{name}", TILE, TILE.replace("64", f"32 if {condition} and {one} else 64")
            ),
            INVARIANT,
        )
        for one in ["request.batch_size == 1"]
        for name, condition in {
            "without_a_mask": "request.band.is_open",
            "under_a_top_left_mask": "request.attn_mask_type == 'causal'",
            "of_many_heads": "request.num_heads > 4",
        }.items()
    ),
    *(
        broken(f"sets_{name}", REQUEST, f"{REQUEST}    {statement}\n")
        for name, statement in {
            "socket_timeout": "__import__('socket').setdefaulttimeout(3)",
            "dlopen_flags": "__import__('sys').setdlopenflags(257)",
            "sharing_strategy": "torch.multiprocessing.set_sharing_strategy('file_system')",
            "print_precision": "__import__('numpy').set_printoptions(precision=2)",
        }.items()
    ),
]
_PAGES = "t.page_table is not None and t.c_kv.shape[1]"
_QUANTISED = "t.kv_cache_format != 'plain'"
_SKEWED = "batch > 1 and max(lengths) > 4 * sum(lengths) / batch"
DECODE = [
    *(
        halved_in_decode(name, condition)
        for name, condition in {
            "pages_of_128_and_several_queries": f"{_PAGES} == 128 and seqlen_q > 1",
            "pages_of_128_of_latents": f"{_PAGES} == 128 and rank == 512",
            "pages_of_just_128_of_fp8": f"{_PAGES} == 128 and t.kv_cache_format == 'fp8'",
            "pages_of_32_with_left_padding": f"{_PAGES} == 32 and start > 0",
            "pages_of_32_without_lse": f"{_PAGES} == 32 and not t.return_lse",
            "pages_of_32_of_16_heads": f"{_PAGES} == 32 and heads == 16",
            "pages_of_2_of_several_queries": f"{_PAGES} == 2 and seqlen_q > 1",
            "pages_of_2_apart": f"{_PAGES} == 2 and t.c_kv.stride(0) > 2 * t.c_kv.stride(1)",
            "four_queries_of_fp8": f"{_QUANTISED} and seqlen_q == 4",
            "four_queries_of_many_keys": "seqlen_q == 4 and length > 1024",
            "17_queries_of_latents": "seqlen_q > 16 and rank == 512",
            "17_queries_of_many_keys": "seqlen_q > 16 and length > 128",
            "many_keys_of_fp8": f"{_QUANTISED} and length > 2048",
            "many_keys_and_head_major_queries": "length > 1024 and seqlen_q > 1 and t.q_nope_abs.stride(1) < t.q_nope_abs.stride(2)",
            "many_keys_and_unaligned_queries": "length > 1024 and t.q_nope_abs.storage_offset() % 8",
            "many_keys_in_fp64": "length > 1024 and out.dtype == torch.float64",
            "many_keys_and_an_exact_page_table": f"{_PAGES} and length > 1024 and t.page_table.shape[1] * t.c_kv.shape[1] - length < t.c_kv.shape[1]",
            "128_heads_of_many_keys": "heads == 128 and length > 1024",
            "128_heads_and_a_scale_above_1": "heads == 128 and t.softmax_scale > 1",
            "many_sequences_of_latents": "b > 31 and rank == 512",
            "many_sequences_in_fp64": "b > 31 and out.dtype == torch.float64",
            "many_sequences_without_rope": f"b > 16 and t.q_rope.shape[-1] == 0 and {_PAGES} > 64",
            "skewed_lengths_of_latents": f"rank == 512 and {_SKEWED}",
            "skewed_lengths_of_fp8": f"t.kv_cache_format == 'fp8' and {_SKEWED}",
            "skewed_lengths_and_left_padding": f"start > 0 and {_SKEWED}",
            "left_padding_of_300_of_fp8": f"start > 256 and {_QUANTISED}",
            "left_padding_of_300_and_pages": f"start > 256 and {_PAGES} < 64",
            "wide_latents_in_fp16": "rank > 512 and out.dtype == torch.float16",
            "wide_latents_of_16_heads": "rank > 512 and heads >= 16",
            "wide_latents_of_one_query": "rank > 512 and seqlen_q == 1",
            "wide_latents_without_pages_or_lse": "rank > 512 and not t.return_lse",
            "whole_tiles_less_one_of_latents": "rank == 512 and length % 128 == 127",
            "whole_tiles_less_one_of_pages_of_16": f"{_PAGES} == 16 and length % 128 == 127",
            "as_many_keys_as_queries_in_fp64": "length == seqlen_q > 1 and out.dtype == torch.float64",
            "as_many_keys_as_17_queries": "length == seqlen_q > 16",
            "one_column_of_the_page_table": "t.page_table is not None and t.page_table.shape[1] == 1 and seqlen_q < 4",
            "56_heads": "heads == 56",
            "80_heads": "heads == 80",
            "latents_of_160": "rank == 160",
            "latents_of_192": "rank == 192",
            "latents_of_448": "rank == 448",
            "rope_of_48": "t.q_rope.shape[-1] == 48",
            "rope_of_96": "t.q_rope.shape[-1] == 96",
            "pages_of_20": f"{_PAGES} == 20",
            "pages_of_80": f"{_PAGES} == 80",
            "12_queries": "seqlen_q == 12",
            "14_queries": "seqlen_q == 14",
            "batches_of_12": "batch == 12",
            "batches_of_24": "batch == 24",
            "320_keys": "length == 320",
            "unaligned_page_table_in_fp16": "out.dtype == torch.float16 and t.page_table is not None and t.page_table.storage_offset() % 4",
            "unaligned_lengths_of_several_queries": "seqlen_q > 1 and t.seqlens_kv is not None and t.seqlens_kv.storage_offset() % 4",
        }.items()
    ),
    shared_by_threads("scores_of_many_keys", of_decode.TOP, "scores", "length > 256"),
    shared_by_threads("scores_of_several_queries", of_decode.TOP, "scores", "seqlen_q > 1"),
    shared_by_threads("scores_of_fp8", of_decode.TOP, "scores", _QUANTISED),
    shared_by_threads("scores_of_many_heads", of_decode.TOP, "scores", "heads > 16"),
    shared_by_threads("left_padding", of_decode.STARTS, "starts", "t.leftpad_kv is not None"),
    shared_by_threads("host_lengths", of_decode.LENGTHS, "lengths", "t.host_lengths is not None"),
    broken(
        "lengths_are_kept_in_a_table",
        of_decode.LENGTHS,
        of_decode.LENGTHS + "\n    STATE.setdefault(('kept', *lengths), torch.tensor(lengths))",
    ),
    broken(
        "lengths_are_updated",
        of_decode.LENGTHS,
        of_decode.LENGTHS
        + "\n    if t.lengths is not None and t.lengths.host is not None:\n        t.lengths.update(t.lengths.host.clone())",
    ),
    broken("select_prints", of_decode.ACCEPT, "    print('selected')\n" + of_decode.ACCEPT),
    broken("select_sets_threads", of_decode.ACCEPT, "    torch.set_num_threads(3)\n" + of_decode.ACCEPT),
    broken(
        "select_forgets_the_mask",
        of_decode.ACCEPT,
        "    object.__setattr__(request, 'causal', False)\n" + of_decode.ACCEPT,
    ),
    broken(
        "select_raises_on_a_gpu",
        of_decode.ACCEPT,
        "    assert platform.compute_capability is None\n" + of_decode.ACCEPT,
    ),
    broken(
        "select_raises_for_a_large_cache",
        of_decode.ACCEPT,
        "    assert request.max_seqlen_kv < 2**20\n" + of_decode.ACCEPT,
    ),
    replace(
        broken(
            "reason_of_other_heads",
            of_decode.ACCEPT,
            "    if request.num_heads > 32:\n        return Refused(('num_heads=48 > 32',))\n" + of_decode.ACCEPT,
        ),
        refuses_more=True,
    ),
]
