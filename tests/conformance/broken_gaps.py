"""Faults that hid until the suite had wide gaps, lengths in another order, scores far below zero and shared lengths."""

from __future__ import annotations

from tests.conformance import broken_decode as of_decode
from tests.conformance.broken_attention import DQ, RETURN, SCALE, broken
from tests.conformance.broken_later import HIDE, SPANS
from tests.conformance.broken_sizes import SCALED, SCALES_OF_TILES

LSE_OF_ALL = "    lse = t.q.new_full("
ROW = "        row = 0 if layout.is_packed else b\n"

ATTENTION = [
    broken(
        "keys_of_equal_extents_have_the_queries_lengths",
        SPANS,
        "    like = request.max_seqlen_q == request.max_seqlen_kv and q.shape[2] == k.shape[2]\n"
        + SPANS.replace("t.cu_seqlens_kv,", "t.cu_seqlens_q if like else t.cu_seqlens_kv,"),
    ),
    broken(
        "hidden_scores_are_-30000",
        HIDE,
        HIDE.replace("-torch.inf)", "-30000.0)")
        + "        nothing = hidden(request, t, b, len_q, len_kv).all(-1, keepdim=True)\n"
        "        scores = scores.masked_fill(nothing, -torch.inf)\n",
    ),
    broken(
        "64_rows_of_a_gap_are_zeroed",
        LSE_OF_ALL,
        "    if layout.is_packed:\n"
        "        found = spans(request, len(t.q), t.cu_seqlens_q, t.cu_seqlens_q_padded)\n"
        "        out[64:] = torch.nan\n"
        "        for start, length in found:\n"
        "            out[start : start + length + 64] = 0\n" + LSE_OF_ALL,
    ),
    broken(
        "another_softmax_is_refused_in_training",
        '    if request.softmax_type != "vanilla":',
        '    if request.softmax_type != "vanilla" and request.is_training:',
    ),
    broken("masks_are_kept", RETURN, "    CACHE.setdefault('masks', []).append(t.attention_mask)\n" + RETURN),
    broken(
        "tail_of_a_whole_longest_sequence_is_not_hidden",
        ROW,
        ROW + "        if layout.is_packed and request.max_seqlen_kv % 64 == 0 and request.band.is_open and len_kv:\n"
        "            len_kv = min(-(-len_kv // 64) * 64, k.shape[2] - start_kv)\n",
    ),
    broken("logarithm_of_two_to_five_digits", SCALE, SCALE + " * (1.4427 / 1.4426950408889634)"),
    broken(
        "dq_by_the_scale_of_the_last_call",
        DQ,
        DQ + "\n        dq_b = dq_b * (CACHE.get('scale', t.softmax_scale) / t.softmax_scale)\n"
        "        CACHE['scale'] = t.softmax_scale",
    ),
]

ENDS = """    lengths = lengths_of(t)
    if t.lengths is not None:
        from types import SimpleNamespace
        made = SimpleNamespace(first=[length - seqlen_q for length in lengths], renew=lambda _: False)
        lengths = [first + seqlen_q for first in t.lengths.schedule("sample", lambda _: made).first]"""
ROPE = "            scores = t.q_nope_abs[b, i].to(exact) @ v.T + t.q_rope[b, i].to(exact) @ r.T"
HIDDEN = "\n".join((of_decode.KEYS, ROPE, of_decode.SCALE))

DECODE = [
    broken("a_schedule_for_any_number_of_queries", of_decode.LENGTHS, ENDS),
    broken(
        "nan_in_q_rope_is_lost", ROPE, ROPE.replace("t.q_rope[b, i].to(exact)", "t.q_rope[b, i].to(exact).nan_to_num()")
    ),
    broken(
        "a_page_is_read_once",
        of_decode.PAGES,
        of_decode.PAGES
        + "\n    pages = torch.stack([p if p not in pages[:j] else p * 0 for j, p in enumerate(pages)] or [pages])",
    ),
    broken(
        "fp8_ds_mla_scales_from_1e-6",
        SCALES_OF_TILES,
        "            scales = scales.clamp(min=1e-6)\n" + SCALES_OF_TILES,
    ),
    broken(
        "hidden_keys_of_left_padding_have_-30000",
        HIDDEN,
        HIDDEN.replace("start:end", ":end") + "\n            scores[:, :start] = -30000.0",
    ),
    broken(
        "a_spread_of_one_is_equal_lengths",
        of_decode.LENGTHS,
        of_decode.LENGTHS
        + "\n    lengths = [max(lengths)] * batch if batch and request.profile and request.profile.spread == 1 else lengths",
    ),
    broken("fp8_scale_in_bfloat16", SCALED, SCALED.replace("t.kv_scale.to(exact)", "t.kv_scale.bfloat16().to(exact)")),
    broken(
        "keys_beyond_16_times_the_mean",
        of_decode.LENGTHS,
        of_decode.LENGTHS
        + "\n    lengths = [min(n, 16 * request.profile.mean) for n in lengths] if request.profile else lengths",
    ),
]
