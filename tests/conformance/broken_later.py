"""More backends that each differ from a correct one in one line, thought of when the suite was thought complete."""

from __future__ import annotations

from tests.conformance import broken_decode as of_decode
from tests.conformance.broken_attention import DELTA, DQ, DV, LENGTHS, OFFSET, PICK, SCALE, SUM, broken, only_if

SCORES = "        scores = q_b @ k_b.mT\n"
SPANS = "    spans_kv = spans(request, k.shape[2], t.cu_seqlens_kv, t.cu_seqlens_kv_padded)"
HIDE = "        scores = scores.masked_fill(hidden(request, t, b, len_q, len_kv), -torch.inf)\n"

ATTENTION = [
    broken(
        "scale_kept_from_the_first_call",
        SCALE,
        SCALE.replace("t.softmax_scale", "CACHE.setdefault(request, t.softmax_scale)"),
    ),
    broken(
        "scale_of_one_is_the_default",
        SCALE,
        SCALE.replace("t.softmax_scale", "(request.head_dim_qk**-0.5 if t.softmax_scale == 1.0 else t.softmax_scale)"),
    ),
    broken(
        "lengths_kept_by_memory",
        LENGTHS,
        "    kept = CACHE.setdefault(cu.data_ptr(), (cu, cu.diff().tolist()))\n    lengths = kept[1]",
    ),
    broken(
        "first_offset_of_k_alone_taken_as_zero",
        SPANS,
        SPANS
        + "\n    first = spans_kv[0][0] if spans_q[0][0] == 0 else 0\n    spans_kv = [(start - first, length) for start, length in spans_kv]",
    ),
    broken("window_side_in_16_bits", OFFSET, OFFSET + "\n    left = left % 32768 if left >= 0 else left"),
    broken(
        "heads_above_32_in_thd",
        SUM,
        SUM + "\n        result[32:] *= 0.5 if layout.is_packed else 1.0",
    ),
    broken("batch_above_12_in_thd", PICK, PICK + "\n        v_b = v_b * (0.5 if layout.is_packed and b > 12 else 1.0)"),
    broken(
        "wide_heads_in_sbhd",
        SCORES,
        "        wide = slice(256 if request.qkv_format == 'sbhd' else None)\n        scores = q_b[..., wide] @ k_b[..., wide].mT\n",
    ),
    broken(
        "wide_heads_in_thd",
        SCORES,
        "        wide = slice(256 if layout.is_packed else None)\n        scores = q_b[..., wide] @ k_b[..., wide].mT\n",
    ),
    broken(
        "hidden_scores_are_finite",
        HIDE,
        HIDE.replace("-torch.inf)", "-100.0)")
        + "        scores = scores.masked_fill((scores == -100).all(-1, keepdim=True), -torch.inf)\n",
    ),
    only_if(
        "fp16_dlse_halved",
        DELTA,
        "dlse is not None and request.dtype == torch.float16",
        "delta = delta + 0.5 * dlse[row, :, rows]",
    ),
    broken("dv_above_the_first_batch", DV, DV + "\n        dv_b = dv_b * (0.9 if b > 1 else 1.0)"),
    broken(
        "last_key_when_there_are_more_keys",
        HIDE,
        HIDE
        + "        scores[..., -1:] = -torch.inf if len_kv > len_q > 1 and not request.is_causal else scores[..., -1:]\n",
    ),
    broken(
        "last_query_of_a_tile_and_one",
        SUM,
        SUM
        + "\n        result[:, -1] = result[:, -2] if result.shape[1] % 16 == 1 and result.shape[1] > 1 else result[:, -1]",
    ),
    broken(
        "head_dims_in_steps_of_16",
        SCORES,
        "        whole = q_b.shape[-1] // 16 * 16 or None\n        scores = q_b[..., :whole] @ k_b[..., :whole].mT\n",
    ),
    broken("one_query_ignores_the_window", OFFSET, OFFSET + "\n    left = -1 if len_q == 1 else left"),
    broken(
        "dq_rounded_at_each_tile",
        DQ,
        DQ
        + "\n        dq_b = sum((ds[..., i : i + 16] @ k[:, i : i + 16]).to(request.dtype) for i in range(0, max(1, k.shape[1]), 16)).to(exact) * t.softmax_scale",
    ),
    only_if(
        "dlse_of_the_first_head",
        DELTA,
        "dlse is not None and request.num_heads > 16",
        "delta = delta + dlse[row, :, rows] - dlse[row, :1, rows]",
    ),
    broken(
        "sum_of_a_row_of_small_weights",
        "        total = weights.sum(-1, keepdim=True)\n",
        "        total = weights.to(request.dtype).sum(-1, keepdim=True).to(exact)\n",
    ),
    broken(
        "keys_above_512_with_several_queries",
        HIDE,
        HIDE + "        scores[..., 512:] = -torch.inf if len_q > 8 else scores[..., 512:]\n",
    ),
]

KEYS, LSE, OUT, TAKE = of_decode.KEYS, of_decode.LSE, of_decode.OUT, of_decode.TAKE
DECODE = [
    broken(
        "scale_kept_from_the_first_call",
        of_decode.SCALE,
        of_decode.SCALE.replace("t.softmax_scale", "STATE.setdefault(request, t.softmax_scale)"),
    ),
    broken(
        "scale_of_one_is_the_default",
        of_decode.SCALE,
        of_decode.SCALE.replace(
            "t.softmax_scale", "((rank + 64) ** -0.5 if t.softmax_scale == 1.0 else t.softmax_scale)"
        ),
    ),
    broken(
        "left_padding_up_to_one_page",
        of_decode.STARTS,
        of_decode.STARTS
        + "\n    starts = [min(s, t.c_kv.shape[1]) if t.page_table is not None else s for s in starts]",
    ),
    broken(
        "query_of_the_second_sequence",
        TAKE,
        TAKE
        + "\n    t = t._replace(q_rope=torch.cat([t.q_rope[:2], t.q_rope[1:2].expand(len(t.q_rope) - 2, -1, -1, -1)])) if len(t.q_rope) > 2 and t.q_rope.shape[1] > 1 else t",
    ),
    broken(
        "last_row_of_a_tile_of_rows",
        LSE,
        LSE
        + "\n            out[b, -1, -1] *= 0.5 if heads * seqlen_q % 16 == 1 and heads * seqlen_q > 1 and i == seqlen_q - 1 else 1.0",
    ),
    broken(
        "left_padding_with_long_keys",
        KEYS,
        "            v, r = (x[start : min(end, 512) if start else end] for x in (values, ropes))",
    ),
    broken("page_numbers_in_8_bits", of_decode.PAGES, of_decode.PAGES + "\n    pages = pages % 256"),
    broken(
        "a_whole_page_exactly",
        KEYS,
        "            v, r = (x[start : end - (t.page_table is not None and length == t.c_kv.shape[1] > 16)] for x in (values, ropes))",
    ),
    broken(
        "bf16_without_rope",
        OUT,
        OUT + "\n            out[b, i] *= 0.98 if t.q_rope.shape[-1] == 0 and out.dtype == torch.bfloat16 else 1",
    ),
    broken(
        "keys_above_1024_in_pages",
        KEYS,
        "            v, r = (x[start:end][-1024 if t.page_table is not None and seqlen_q > 1 else None :] for x in (values, ropes))",
    ),
]
