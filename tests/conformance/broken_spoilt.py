"""Faults of rare conjunctions, a third of which hid until queries had NaN and dlse was infinite in calls of each kind."""

from __future__ import annotations

from tests.conformance import broken_decode as of_decode
from tests.conformance.broken_attention import OFFSET, OUT, RETURN, broken
from tests.conformance.broken_gaps import ROW
from tests.conformance.broken_later import SPANS

SEEN = "        seen = weights != 0"
GRADIENTS = "    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype) for x in (t.q, t.k, t.v))\n"
PRE_SCALE = '        if request.bias_type == "pre_scale_bias":\n            scores = scores + bias\n'
ZIP = "    return list(zip(starts, lengths, strict=True))"
POSITIONS = "torch.arange(len_q)[:, None] - offset"
PUT_DK = "        layout.to_bhsd(dk)[row, :, columns] = dk_b.to(dk.dtype)"
ROUNDED = "        ds, weights = rounded(ds, request), rounded(weights, request)\n"
GROUPED = "        dk_b, dv_b = (x.unflatten(0, (-1, group)).sum(1) for x in (dk_b, dv_b))"
END = "            end = length - seqlen_q + i + 1 if t.causal else length\n"
LSE_OF_DECODE = "            lse[b, :, i] = "

ATTENTION = [
    broken(
        "nan_query_hidden_under_a_window",
        OUT,
        "        result = result.nan_to_num(0.0) if request.band.left >= 0 else result\n" + OUT,
    ),
    broken(
        "window_of_an_arbitrary_mask_ends_at_the_last_key",
        OFFSET,
        OFFSET.replace("if bottom_right", "if bottom_right or t.attention_mask is not None"),
    ),
    broken("infinite_dlse_matters_beside_a_bias", SEEN, "        seen = (weights != 0) | (t.bias is not None)"),
    broken(
        "infinite_dlse_matters_to_odd_groups", SEEN, "        seen = (weights != 0) | (group % 2 == 1 and group > 1)"
    ),
    broken(
        "packed_without_dout_has_no_gradients",
        GRADIENTS,
        GRADIENTS + "    if layout.is_packed and not dout.any():\n        return Gradients(dq, dk, dv)\n",
    ),
    broken(
        "padded_starts_kept_for_calls_of_one_kind",
        SPANS,
        SPANS + "\n    if t.kept is not None and t.cu_seqlens_kv_padded is not None:\n"
        "        spans_kv = t.kept.setdefault('spans_kv', spans_kv)",
    ),
    broken("padded_offsets_are_held", RETURN, "    BEFORE.append(t.cu_seqlens_q_padded)\n" + RETURN),
    broken(
        "pre_scale_bias_stops_at_-20000",
        PRE_SCALE,
        PRE_SCALE.replace("+ bias", "+ bias.clamp(min=-20000.0)"),
    ),
    broken(
        "keys_start_where_equal_queries_do",
        SPANS,
        "    same = t.cu_seqlens_q is not None and torch.equal(t.cu_seqlens_q, t.cu_seqlens_kv)\n"
        "    same = same and q.shape[2] == k.shape[2]\n"
        "    spans_kv = spans_q if same else " + SPANS.strip().removeprefix("spans_kv = "),
    ),
    broken("first_of_equal_starts_wins", ZIP, "    return [(start, lengths[starts.index(start)]) for start in starts]"),
    broken(
        "positions_of_few_queries_are_divided_by_the_group",
        POSITIONS,
        f"(torch.arange(len_q) // (request.num_heads // request.num_kv_heads if len_q < 4 else 1)){POSITIONS[19:]}",
    ),
    broken("queries_beyond_four_times_the_keys_are_dropped", ROW, ROW + "        len_q = min(len_q, 4 * len_kv)\n"),
    broken(
        "deterministic_packed_groups_sum_in_part",
        GROUPED,
        "        used = 1 if request.deterministic and layout.is_packed else group\n"
        + GROUPED.replace("(-1, group)).sum", "(-1, group))[:, :used].sum"),
    ),
    broken(
        "gradients_of_bfloat16_through_float16",
        ROUNDED,
        "        ds = ds.to(torch.float16).to(exact) if request.dtype == torch.bfloat16 else ds\n" + ROUNDED,
    ),
    broken(
        "dk_only_beside_dq",
        PUT_DK,
        PUT_DK + " * (t.q.requires_grad or not t.k.requires_grad)",
    ),
    broken("dout_cleared_where_no_key_is_seen", "(x.masked_fill(~seen", "(x.masked_fill_(~seen"),
]

DECODE = [
    of_decode.broken(
        "fp8_ds_mla_rope_through_float16",
        "            scales = rows_of(t.kv_scale, t, b, length).to(exact)\n",
        "            scales = rows_of(t.kv_scale, t, b, length).to(exact)\n"
        "            ropes = ropes.to(torch.float16).to(exact)\n",
    ),
    of_decode.broken(
        "nan_query_hidden_under_left_padding",
        LSE_OF_DECODE,
        "            out[b, i] = out[b, i].nan_to_num(0.0) if t.leftpad_kv is not None else out[b, i]\n"
        + LSE_OF_DECODE,
    ),
    of_decode.broken(
        "nan_query_hidden_in_fp8",
        LSE_OF_DECODE,
        "            out[b, i] = out[b, i].nan_to_num(0.0) if t.kv_cache_format == 'fp8' else out[b, i]\n"
        + LSE_OF_DECODE,
    ),
    of_decode.broken(
        "nan_in_rope_spreads_to_other_queries_of_pages_of_one",
        LSE_OF_DECODE,
        "            if t.page_table is not None and t.c_kv.shape[1] == 1:\n"
        "                out[b] += 0 * t.q_rope[b].sum()\n" + LSE_OF_DECODE,
    ),
    of_decode.broken(
        "last_row_of_a_page_lost_to_earlier_queries",
        END,
        END + "            end -= bool(t.page_table is not None and end < length and end % t.c_kv.shape[1] == 0)\n",
    ),
    of_decode.broken(
        "left_padding_shifts_the_ends_of_three_queries",
        END,
        END + "            end -= start if t.causal and seqlen_q > 2 else 0\n",
    ),
    of_decode.broken(
        "lengths_cut_at_four_times_the_mean",
        "        length, start = lengths[b], starts[b]\n",
        "        length, start = min(lengths[b], 4 * (sum(lengths) // batch + 1)), starts[b]\n",
    ),
    of_decode.broken(
        "square_lse_is_transposed",
        LSE_OF_DECODE,
        "            (lse[b].T if heads == seqlen_q else lse[b])[:, i] = ",
    ),
]
